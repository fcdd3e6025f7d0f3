"""Recordings that were changed after they were written: what is before the damage is used."""

from __future__ import annotations

from pathlib import Path

import pytest

from select_service.core.recording.decoder import BadRecording
from select_service.core.recording.items import FRAME, OPENING
from select_service.simulator.cli import main
from select_service.simulator.recording_replay import replay
from select_service.simulator.recordings import requests_of
from tests.harms import HARMS, Harm, flipped
from tests.models.recorded_fleet import RecordedFleet


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A recording of many frames."""
    fleet = RecordedFleet(3)
    fleet.play(40)
    return fleet.recorded_file.into(tmp_path_factory.mktemp("whole") / "recording").read_bytes()


def frames_of(data: bytes) -> list[int]:
    """Where each frame begins, and the end of the file."""
    starts = [len(OPENING)]
    while starts[-1] < len(data):
        starts.append(starts[-1] + FRAME.size + FRAME.unpack_from(data, starts[-1])[0])
    return starts


def positions(data: bytes) -> list[int]:
    """The opening, every byte of some frames' heads, both sides of every boundary, and inside."""
    starts = frames_of(data)
    found = set(range(len(OPENING))) | {start - 1 for start in starts} | set(starts)
    for start in (*starts[:2], starts[-2]):
        found |= {start + at for at in (*range(10), 40, 200)}
    return sorted(at for at in found if at < len(data))


@pytest.mark.parametrize("harm", HARMS)
def test_a_recording_changed_anywhere_is_reported(tmp_path: Path, whole: bytes, harm: Harm) -> None:
    path = tmp_path / "recording"
    path.write_bytes(whole)
    sound = replay([path])
    assert not sound.missing
    starts = frames_of(whole)
    for at in positions(whole):
        path.write_bytes(harm(whole, at))
        try:
            result = replay([path])
        except BadRecording:
            assert at < starts[1], "where nothing can be used"
            continue
        assert result.missing, f"in silence at {at} of {len(whole)}"
        assert result.reproduced == result.decisions <= sound.decisions, "what is before it is used"
        assert result.decisions or at < starts[-3]


def test_damage_costs_the_rest_of_its_file(
    tmp_path: Path, whole: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / "rec.000001", tmp_path / "rec"]
    decisions = replay([_written(paths[1], whole)]).decisions
    _written(paths[0], flipped(whole, frames_of(whole)[4] + 20))
    result = replay(paths)
    assert result.is_damaged
    assert decisions < result.decisions == result.reproduced < 2 * decisions
    assert main(["replay", str(paths[1])]) == 1
    shown = capsys.readouterr()
    where = f"the end of {paths[0]} (damaged, frame at byte {frames_of(whole)[4]}: its checksum is"
    assert where in shown.out
    assert where in shown.err
    _written(paths[0], b"GIF89a")
    assert replay(paths).decisions == decisions, "no recording, beside one"


def test_requests_of_a_file_that_was_cut_are_reported(
    tmp_path: Path, whole: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = _written(tmp_path / "recording", whole)
    count = len(list(requests_of(path, 4)))
    assert not caplog.records
    _written(path, whole[: frames_of(whole)[-3]])
    assert 0 < len(list(requests_of(path, 4))) < count
    assert "has no end" in caplog.text


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path
