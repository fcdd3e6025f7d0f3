"""The soak, short and brisk; with SOAK_SECONDS so long, and gently (`make test-full`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.soak import GENTLE, soak
from tests.faults.table import Line

pytestmark = [pytest.mark.heavy, pytest.mark.e2e]

SECONDS = 24.0
BESIDE_S = float(os.environ.get("SOAK_SECONDS", "0"))


@pytest.mark.skipif(not BESIDE_S, reason="SOAK_SECONDS says how long, as in make test-full")
@pytest.mark.timeout(BESIDE_S + 300)
def test_a_soak_beside_other_tests(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    found = soak(tmp_path, BESIDE_S, GENTLE)
    Line("soak", BESIDE_S, note=f"\n{found}").write(record_property)
    assert not found.faults
    assert all(count > 0 for count in found.turns.values())


@pytest.mark.skipif(BESIDE_S > 0, reason="the long one is asked for")
def test_a_short_soak(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    found = soak(tmp_path, SECONDS)
    Line("soak", SECONDS, note=f"\n{found}").write(record_property)
    assert not found.faults
    assert all(count > 0 for count in found.turns.values())
