"""`select-sim run` on files and numbers that it was not built on: read, or refused by name."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from select_service.simulator.cli import main
from select_service.simulator.core.requests import ClientRequest
from select_service.simulator.runs import workload
from select_service.simulator.settings import SimulationSettings, Trace

QUICK = ["run", "--policy", "first-token", "--workers", "2", "--quiet"]


def line(at: int = 0, isl: int = 1500, osl: int = 5, ids: object = (0, 1, 2)) -> bytes:
    fields = {"timestamp": at, "input_length": isl, "output_length": osl, "hash_ids": ids}
    return json.dumps(fields).encode() + b"\n"


def written(folder: Path, *lines: bytes) -> str:
    path = folder / "trace.jsonl"
    path.write_bytes(b"".join(lines))
    return str(path)


def read(path: str, **changes: object) -> list[ClientRequest]:
    trace = Trace(path=path, **changes)  # type: ignore[arg-type]
    return list(iter(workload(SimulationSettings(trace=trace, block_size=16)).next, None))


def test_a_packed_trace_is_the_same_trace(tmp_path: Path) -> None:
    lines = [line(0), line(500, ids=[0, 1, 7])]
    plain = read(written(tmp_path, *lines))
    packed = read(written(tmp_path, gzip.compress(b"".join(lines))))
    assert [one.blocks for one in packed] == [one.blocks for one in plain]


@pytest.mark.parametrize("cut", [9, 40])
def test_a_packed_trace_that_was_cut_is_named(
    tmp_path: Path, cut: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, gzip.compress(line())[:cut])
    assert main([*QUICK, "--trace", path]) == 1
    assert f"{path}: Compressed file ended" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([], "there is no request in it"),
        ([b"\n", b" \n"], "there is no request in it"),
        ([line(), line(isl=0, ids=[])], "line 2: input_length must be at least 1"),
        ([line(), line(osl=-1)], "line 2: output_length must not be negative"),
        ([line(), line(ids=[-1, 3])], "line 2: hash_ids must not be negative"),
        ([line(), line(ids=list(range(94)))], "line 2: 94 hash_ids for an input_length of 1500"),
        ([line(), line(isl=9000, ids=list(range(9)))], "line 2: 9 hash_ids for an input_length"),
        ([line(), line(10**18)], "lines 1 and 2: requests are 1e+15 s apart"),
        ([line(), b"\xff\xfe\n"], "line 2 is not JSON: invalid"),
        ([line(), line(ids="0")], "line 2: Expected `array`, got `str` - at `$.hash_ids`"),
    ],
)
def test_a_trace_that_cannot_be_read_is_reported_by_file_line_and_field(
    tmp_path: Path, lines: list[bytes], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, *lines)
    assert main([*QUICK, "--trace", path]) == 1
    assert f"{path}: {why}" in capsys.readouterr().err


def test_blocks_of_a_trace_may_have_another_size(tmp_path: Path) -> None:
    ids = [4, 9, 4, *range(100, 191)]  # one of them twice
    path = written(tmp_path, line(ids=ids), line(10, ids=[*ids[:50], *range(200, 244)]))
    first, second = read(path, block_size=16)
    assert len(first.blocks) == 1500 // 16 == 93
    assert first.blocks[0] == first.blocks[2]
    assert first.blocks[:50] == second.blocks[:50]
    assert first.blocks[50] != second.blocks[50]
    assert main([*QUICK, "--trace", path, "--trace-block-size", "16", "--block-size", "16"]) == 0


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--trace-block-size", "16", "--block-size", "512"], "no part of the trace's"),
        (["--trace-block-size", "0"], "--trace-block-size: 0 is not in 1.."),
        (["--trace-block-size", "16", "--format", "openai"], "is of the format mooncake"),
        (["--seeds", "1000000000"], "--seeds: 1000000000 is not in 1..10000"),
        (["--workers", "100000"], "--workers: 100000 is not in 1..10000"),
        (["--prefill-workers", "-1"], "--prefill-workers: -1 is not in 0..10000"),
        (["--replicas", "65"], "--replicas: 65 is not in 1..64"),
        (["--event-lag", "inf"], "--event-lag: 'inf' is not a number in 0..86400"),
        (["--sync-delay", "inf"], "--sync-delay: 'inf' is not a number in 0..86400"),
        (["--event-lag", "1e308"], "--event-lag: '1e308' is not a number in 0..86400"),
        (["--jitter", "1e308"], "--jitter: '1e308' is not a number in 0.."),
        (["--speed", "inf"], "--speed: 'inf' is not a number above 0"),
        (["--load", "0"], "--load: '0' is not a number above 0"),
        (["--load", "nan"], "--load: 'nan' is not a number above 0"),
        (["--change", "nan:fail"], "nan:fail: at: 'nan' is not a number at least 0"),
        (["--change", "1:fail:-3"], "1:fail:-3: count: -3 is not in 1..10000"),
        (["--engine", "base_s=inf"], "base_s must be at least 0, and finite"),
        (["--engine", "base_s=1e308"], "base_s must be at most 3600"),
        (["--admission", "{x"], "--admission: JSON is malformed"),
        (["--admission", '{"cache_hit_treshold": 1}'], "--admission: there is no cache_hit_tr"),
    ],
)
def test_numbers_that_would_never_end_are_refused(
    tmp_path: Path, argv: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main([*QUICK, "--trace", written(tmp_path, line()), *argv])
    assert refused.value.code == 2
    assert why in capsys.readouterr().err


def test_a_speed_at_which_nothing_ever_comes_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, line(), line(10))
    assert main([*QUICK, "--trace", path, "--speed", "1e-300"]) == 1
    assert "line 2: comes 1e+298 s after the first at a speed of 1e-300" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["turns=1e300", "prompt_tokens=99999999999"])
def test_sessions_that_nobody_could_draw_are_refused(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*QUICK, "--workload", f"chat,requests=10,{option}"])
    assert "10,000 turns" in capsys.readouterr().err


def test_settings_that_cannot_be_read_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, line())
    with pytest.raises(SystemExit):
        main([*QUICK, "--settings", path])
    assert f"{path}: Object contains unknown field `timestamp`" in capsys.readouterr().err


def test_what_a_log_says_is_null_is_not_said(tmp_path: Path) -> None:
    bare = {"timestamp": 1.0, "messages": [{"role": "user", "content": "hi " * 40}]}
    odd = bare | dict.fromkeys(("max_tokens", "response", "usage", "choices", "user"))
    parts = [{"type": "text", "text": None}, {"type": "image_url", "image_url": {"url": "x"}}]
    path = written(
        tmp_path,
        *(json.dumps(one).encode() + b"\n" for one in (bare, odd)),
        json.dumps({"created": 2, "messages": [{"role": None, "content": parts}]}).encode(),
    )
    one, other, last = read(path, format="openai")
    assert (one.isl, one.osl, one.blocks) == (other.isl, other.osl, other.blocks)
    assert last.isl == 1
