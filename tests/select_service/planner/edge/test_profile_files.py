"""Profiles that cannot be used say so, with the array and the place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from select_service.planner.edge.profile_files import read_profile
from select_service.planner.errors import ProfileError
from tests.select_service.planner.golden import GOLDEN

SOUND = GOLDEN / "profile_a_json"


def written(folder: Path, half: str, **changes: Any) -> Path:
    for name in ("prefill", "decode"):
        arrays = json.loads((SOUND / f"{name}_raw_data.json").read_text())
        if name == half:
            arrays |= changes
            arrays = {key: value for key, value in arrays.items() if value is not None}
        (folder / f"{name}_raw_data.json").write_text(json.dumps(arrays))
    return folder


@pytest.mark.parametrize(
    ("half", "changes", "message"),
    [
        ("prefill", {"prefill_isl": None}, "prefill_isl missing"),
        ("prefill", {"prefill_ttft": [1, 2, 3]}, "prefill_ttft has 3 values, prefill_isl has 6"),
        ("prefill", {"prefill_isl": [1, 2, 3, 3, 5, 6]}, "prefill_isl has 3 twice"),
        ("prefill", {"prefill_ttft": [1, 2, 0, 4, 5, 6]}, r"prefill_ttft\[2\] is 0, not positive"),
        ("prefill", {"prefill_ttft": [1, 2, "x", 4, 5, 6]}, "prefill_ttft is no array of numbers"),
        ("decode", {"max_kv_tokens": None}, "max_kv_tokens is missing"),
        ("decode", {"max_kv_tokens": 0}, "max_kv_tokens must be one positive number"),
        ("decode", {"x_kv_usage": [12.5] * 30}, r"x_kv_usage\[0\] is 12.5.*a percentage\?"),
        ("decode", {"z_itl": [[1.0] * 30]}, "z_itl has 2 dimensions, not 1"),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path, half: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ProfileError, match=message):
        read_profile(written(tmp_path, half, **changes))


def test_too_few_points_for_a_cubic(tmp_path: Path) -> None:
    names = ("prefill_isl", "prefill_ttft", "prefill_thpt_per_gpu")
    written(tmp_path, "prefill", **{name: [1.0, 2.0, 3.0] for name in names})
    with pytest.raises(ProfileError, match="has 3 lengths, interpolation needs 4"):
        read_profile(tmp_path)


def test_both_places_are_named_when_nothing_is_there(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"neither .*raw_data\.npz nor .*prefill_raw_data\.json"):
        read_profile(tmp_path)


def test_no_pickle_is_opened_and_no_archive_guessed(tmp_path: Path) -> None:
    for half in ("prefill", "decode"):
        (tmp_path / f"selected_{half}_interpolation").mkdir()
    path = tmp_path / "selected_prefill_interpolation" / "raw_data.npz"
    np.savez(path, prefill_isl=np.array([object()], dtype=object))
    with pytest.raises(ProfileError, match="pickle"):
        read_profile(tmp_path)
    path.write_bytes(b"PK\x03\x04 cut off")
    with pytest.raises(ProfileError, match=str(path)):
        read_profile(tmp_path)


def test_samples_may_come_in_any_order(tmp_path: Path) -> None:
    arrays = json.loads((SOUND / "prefill_raw_data.json").read_text())
    turned = {name: values[::-1] for name, values in arrays.items()}
    profile = read_profile(written(tmp_path, "prefill", **turned))
    assert profile.prefill.isl.tolist() == arrays["prefill_isl"]
    assert profile.prefill.ttft_ms.tolist() == arrays["prefill_ttft"]
