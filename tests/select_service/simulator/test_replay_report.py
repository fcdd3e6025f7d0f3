"""A replay as a page: it says what the numbers say, of any recording, and loads nothing."""

from __future__ import annotations

import math
import random
import re
import zlib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import msgspec
import pytest
from msgspec.structs import replace

from select_service.core.recording.decoder import BadRecording
from select_service.core.recording.encoder import message
from select_service.core.recording.items import FRAME, LENGTH, OPENING, Header
from select_service.simulator.cli import main
from select_service.simulator.recording_replay import replay
from select_service.simulator.replay_findings import (
    RecordingGap,
    ReplayDifference,
    ReplayPlace,
    ReplayResult,
)
from select_service.simulator.replay_report import html_of
from select_service.simulator.replay_text import missing
from select_service.simulator.time_series import PARTS_MAX, Clock, TimeSeries
from select_service.types import RouterConfig
from tests.models.recorded_fleet import Cassette, RecordedFleet

SVG = "{http://www.w3.org/2000/svg}"
WEIGHTS = ["--weights", "overlap_score_credit=0,temperature=0"]


def recorded(path: Path, seed: int, steps: int = 200) -> Path:
    fleet = RecordedFleet(seed)
    fleet.play(steps)
    return fleet.recorded_file.into(path)


def in_another_life(path: Path, **changes: Any) -> None:
    """Let the file begin with another header."""
    data, at = path.read_bytes(), len(OPENING)
    size, _ = FRAME.unpack_from(data, at)
    begin, end = at + FRAME.size, at + FRAME.size + size
    raw = zlib.decompress(data[begin:end])
    first = LENGTH.size + LENGTH.unpack_from(raw)[0]
    header = msgspec.msgpack.decode(raw[LENGTH.size : first], type=Header)
    body = zlib.compress(message(replace(header, **changes)) + raw[first:])
    frame = FRAME.pack(len(body), zlib.crc32(body)) + body
    path.write_bytes(data[:at] + frame + data[end:])


def titles_of(page: str) -> list[str]:
    """Titles of its plots; each is well-formed, and none of its numbers is none."""
    assert not re.search(r"<(script|link|img|iframe)|url\((?!#)|@import", page)
    assert set(re.findall(r"https?://[^\"<> ]+", page)) <= {"http://www.w3.org/2000/svg"}
    plots = re.findall(r"<svg xmlns.*?</svg>", page, re.DOTALL)
    assert not re.search(r'"[^"]*\b(nan|inf)\b[^"]*"', "".join(plots))
    return [str(ET.fromstring(plot).findtext(f".//{SVG}text")) for plot in plots]


def test_a_page_of_other_weights_says_what_the_json_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, report, out = (
        recorded(tmp_path / "rec", 5),
        tmp_path / "page.html",
        tmp_path / "report.json",
    )
    assert main(["replay", str(path), *WEIGHTS, "--report", str(report), "--out", str(out)]) == 0
    assert "reproduced" in capsys.readouterr().out
    result = msgspec.json.decode(out.read_bytes(), type=ReplayResult)
    page = report.read_text("utf-8")
    assert "<title>select-sim: replay of rec with overlap_score_credit=0.0, temp" in page
    assert titles_of(page) == [
        "Decisions over time",
        "Tokens to prefill",
        "Tokens to prefill of a request",
        "Spread of requests over ranks",
        "Requests by rank",
        "Tokens to prefill by rank",
        "Cached, over time",
        "Elsewhere, over time",
    ]
    what_if = result.what_if
    assert what_if is not None
    assert what_if.changed > 0
    assert f"{what_if.changed} of {what_if.decisions} decisions go elsewhere" in page
    then, now = what_if.prefill_tokens_recorded, what_if.prefill_tokens
    assert f'<td class="word">tokens to prefill</td><td>{then:,}</td><td>{now:,}</td>' in page
    assert f">{then:,}</text>" in page, "above its bar, all of it"
    assert "Open loop" in page
    assert str(what_if.examples[0].selection_id or what_if.examples[0].reservation_id) in page
    assert "&quot;policy&quot;" in page, "what was in force"


@pytest.mark.parametrize("seed", range(6))
def test_parts_ranks_and_sizes_add_up_to_the_whole(tmp_path: Path, seed: int) -> None:
    result = replay([recorded(tmp_path / "rec", seed)], {"temperature": 0.5})
    what_if, course = result.what_if, result.course
    assert what_if is not None
    assert sum(part.compared for part in course) == what_if.decisions > 0
    assert sum(part.changed for part in course) == what_if.changed
    assert sum(part.prefill_tokens_recorded for part in course) == what_if.prefill_tokens_recorded
    assert sum(part.prefill_tokens for part in course) == what_if.prefill_tokens
    assert sum(part.decided.get("refused", 0) for part in course) == sum(result.refused.values())
    assert sum(part.decided.get("placed", 0) for part in course) == result.placed
    assert sum(part.length_s for part in course) == pytest.approx(result.seconds)
    for side in ("requests", "prefill_tokens"):
        given = [getattr(one, f"{side}_recorded") for one in what_if.ranks]
        spread = getattr(what_if.spread_recorded, f"{side}_max_over_mean")
        assert max(given) / (sum(given) / len(given)) == pytest.approx(spread)
    assert sum(one.requests_recorded for one in what_if.ranks) == what_if.decisions
    assert sum(then for _, then, _ in what_if.sizes) == what_if.decisions
    rough = sum(size * then for size, then, _ in what_if.sizes)
    assert 0.96 * what_if.prefill_tokens_recorded <= rough <= what_if.prefill_tokens_recorded


def test_a_page_without_weights_and_of_hardly_anything(tmp_path: Path) -> None:
    page = html_of(replay([recorded(tmp_path / "whole", 1)]))
    assert titles_of(page) == ["Decisions over time"]
    assert "(100.00%) are made again" in page
    nothing = Cassette(RouterConfig()).into(tmp_path / "nothing")
    assert titles_of(html_of(replay([nothing], {"temperature": 0.5}))) == []
    for steps in range(1, 12):
        result = replay([recorded(tmp_path / "few", 2, steps)], {"temperature": 0.5})
        titles_of(html_of(result))


def test_names_are_no_markup() -> None:
    """Whoever sends requests chooses what they are called."""
    name = "<script>alert(1)</script>&"
    place = ReplayPlace("placed", 1, 0, code=name)
    found = ReplayDifference(name, 1, 0.0, name, name, name, name, 1, 1, place, place)
    result = ReplayResult(
        [name], [name], 0.0, first_difference=found, missing=[RecordingGap(name, "disk", 1)]
    )
    result.refused = {name: 1}
    assert "<script" not in html_of(result)


def test_a_page_is_refused_before_anything_is_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = tmp_path / "no" / "page.html"
    with pytest.raises(SystemExit) as exited:
        main(["replay", str(tmp_path / "none"), "--report", str(where)])
    assert exited.value.code == 2
    assert str(where) in capsys.readouterr().err


def test_two_lives_of_a_service_stand_behind_one_another(tmp_path: Path) -> None:
    """A machine that started again counts from nothing; between the two went a thousand seconds."""
    first, second = recorded(tmp_path / "rec.000001", 5), recorded(tmp_path / "rec", 5)
    alone = replay([first])
    in_another_life(second, recording="another", wall_s=1000.0)
    result = replay([first, second], {"temperature": 0.5}, examples=10_000)
    assert result.decisions == 2 * alone.decisions
    assert result.seconds == pytest.approx(1000.0 + alone.seconds, abs=alone.seconds)
    assert result.what_if is not None
    times = [one.at_s for one in result.what_if.examples]
    assert times == sorted(times)
    in_another_life(second, recording="another", wall_s=-1000.0)
    result = replay([first, second])
    assert result.seconds >= 1.9 * alone.seconds, "a clock that went back shows nothing"


def test_a_file_that_was_taken_away_is_reported(tmp_path: Path) -> None:
    names = ("rec.000001", "rec.000002", "rec")
    paths = [recorded(tmp_path / name, 5) for name in names]
    for path, number in zip(paths, (1, 2, 5), strict=True):
        in_another_life(path, file=number)
    result = replay(paths)
    assert [missing(one) for one in result.missing if one.files] == [f"2 files before {paths[2]}"]
    assert "2 files before" in html_of(result)
    in_another_life(paths[2], recording="another", file=5)
    assert not [one for one in replay(paths).missing if one.files], "of another life"


@pytest.mark.parametrize("at", [math.inf, -math.inf, math.nan, 1e300])
def test_moments_that_no_clock_shows_are_damage(at: float) -> None:
    clock = Clock()
    clock.open(Header("1", "one", 1, 0.0, 0.0, RouterConfig()))
    assert clock.since(5.0) == 0.0
    assert clock.since(4.0) == 0.0, "nothing is before the first"
    with pytest.raises(BadRecording, match="after the first decision"):
        clock.since(at)
    other = Clock()
    other.open(Header("1", "one", 1, 0.0, 0.0, RouterConfig()))
    if not math.isfinite(at):
        with pytest.raises(BadRecording):
            other.since(at)


@pytest.mark.parametrize("seed", range(20))
def test_a_course_holds_what_it_was_given_however_long_it_gets(seed: int) -> None:
    rng = random.Random(seed)
    course, moments, at = TimeSeries(), [], 0.0
    for _ in range(rng.randint(1, 400)):
        at += rng.expovariate(rng.choice([0.001, 1.0, 1e5]))
        moment = rng.uniform(0.9, 1.0) * at
        course.at(moment).compared += 1
        moments.append(moment)
    until = max(moments)
    parts = course.parts(until)
    assert len(parts) <= PARTS_MAX
    for number, part in enumerate(parts):
        is_last = number == len(parts) - 1
        end = math.inf if is_last else part.at_s + part.length_s
        assert part.compared == sum(part.at_s <= moment < end for moment in moments)
        assert is_last or part.at_s + part.length_s == parts[number + 1].at_s
    assert parts[-1].at_s + parts[-1].length_s == pytest.approx(until)
    if len(parts) > 1:
        assert parts[-1].length_s >= parts[0].length_s / 2 > 0.0
