"""Skips these tests where their engine is missing; takes their rows to the table at the end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.engines.environment import Environment
from tests.engines.install import VLLM
from tests.engines.verdicts import Verdict
from tests.tables import ENGINES, Record

Recorder = Callable[[Verdict], Verdict]


@pytest.fixture(scope="module", autouse=True)
def _engine(request: pytest.FixtureRequest) -> None:
    """A module's `ENVIRONMENT`, vLLM's if it says nothing."""
    environment: Environment = getattr(request.module, "ENVIRONMENT", VLLM)
    if (reason := environment.why_missing) is not None:
        pytest.skip(reason)


@pytest.fixture
def recorder(record_property: Record) -> Recorder:
    """Takes a row to the table, and gives it back."""

    def take(verdict: Verdict) -> Verdict:
        ENGINES.add(record_property, verdict)
        return verdict

    return take
