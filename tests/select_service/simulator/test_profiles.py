"""Engines as the planner's profiling measured them, in both forms it leaves."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from select_service.simulator.core.workloads import WorkloadSettings
from select_service.simulator.profiles import read_profile
from select_service.simulator.runs import run
from select_service.simulator.settings import EngineSpec, SimulationSettings
from tests.select_service.planner.golden import GOLDEN


@pytest.mark.parametrize("form", ["npz", "json", "both"])
def test_engines_may_be_as_a_profile_measured_them(tmp_path: Path, form: str) -> None:
    write_profile(tmp_path, form)
    settings = SimulationSettings(
        workloads=[WorkloadSettings(requests=60)], workers=2, block_size=64, policy="random"
    )
    engine = EngineSpec(profile=str(tmp_path))
    measured = run(replace(settings, engine=engine))
    assert measured.ok == 60
    assert engine.build().kv_tokens == 100_000
    assert replace(engine, kv_tokens=50_000).build().kv_tokens == 50_000
    assert 0.0079 <= measured.gap_s.p50 <= 0.0202, "bins are 2 % wide"


def write_profile(directory: Path, form: str) -> None:
    """As the planner's profiling leaves it; where there are both forms, NPZ is the one to take."""
    arrays: dict[str, dict[str, Any]] = {
        "prefill": {"prefill_isl": [100, 4000], "prefill_ttft": [10.0, 400.0]},
        "decode": {
            "x_kv_usage": [0.1, 0.9],
            "y_context_length": [1000, 1000],
            "z_itl": [8.0, 20.0],
            "max_kv_tokens": [100_000],
        },
    }
    for part, columns in arrays.items():
        if form != "json":
            folder = directory / f"selected_{part}_interpolation"
            folder.mkdir()
            np.savez(folder / "raw_data.npz", **columns)
        text = msgspec.json.encode(columns) if form == "json" else b"{}"
        if form != "npz":
            (directory / f"{part}_raw_data.json").write_bytes(text)


def test_a_profile_says_the_same_in_both_forms() -> None:
    npz, plain = (read_profile(GOLDEN / name) for name in ("profile_a", "profile_a_json"))
    for tokens in (1, 128, 3_000, 20_000):
        assert npz.prefill_s(tokens, 500) == plain.prefill_s(tokens, 500)
    for sequences, kv_tokens in ((1, 900), (20, 60_000), (64, 300_000)):
        assert npz.stretch_s(sequences, kv_tokens, 7) == plain.stretch_s(sequences, kv_tokens, 7)


@pytest.mark.parametrize(
    ("half", "text", "why"),
    [
        ("decode", '{"z_itl": [1', "decode_raw_data.json: Input data was truncated"),
        ("decode", "[]", "decode_raw_data.json: Expected `object`"),
        ("decode", "{}", "there is no array 'max_kv_tokens'"),
        ("prefill", '{"prefill_isl": [1], "prefill_ttft": ["slow"]}', "'slow'"),
        ("prefill", '{"prefill_isl": [1, 2], "prefill_ttft": [3.0]}', "prefill_isl and"),
        ("prefill", None, "no prefill profile: neither"),
    ],
)
def test_a_profile_that_cannot_be_read_is_named(
    tmp_path: Path, half: str, text: str | None, why: str
) -> None:
    write_profile(tmp_path, "json")
    path = tmp_path / f"{half}_raw_data.json"
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    with pytest.raises((ValueError, OSError), match=re.escape(str(tmp_path))) as refused:
        read_profile(tmp_path)
    assert why in str(refused.value)
