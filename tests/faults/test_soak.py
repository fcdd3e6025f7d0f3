"""The soak in a form that fits a submission; `make soak MINUTES=10` is the real one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.soak import soak
from tests.faults.table import Line

pytestmark = [pytest.mark.heavy, pytest.mark.e2e]

SECONDS = 24.0


def test_a_short_soak(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    found = soak(tmp_path, SECONDS)
    Line("soak", SECONDS, note=f"\n{found}").write(record_property)
    assert not found.faults
    assert all(count > 0 for count in found.turns.values())
