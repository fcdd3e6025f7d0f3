"""Skips these tests where there is no vLLM; takes their rows to the table at the end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.engines.install import why_missing
from tests.engines.verdicts import Verdict
from tests.tables import ENGINES, Record

Recorder = Callable[[Verdict], Verdict]


@pytest.fixture(scope="session", autouse=True)
def _vllm() -> None:
    if (reason := why_missing()) is not None:
        pytest.skip(reason)


@pytest.fixture
def told(record_property: Record) -> Recorder:
    """Takes a row to the table, and gives it back."""

    def take(verdict: Verdict) -> Verdict:
        ENGINES.add(record_property, verdict)
        return verdict

    return take
