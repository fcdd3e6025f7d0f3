"""The planner's peers are in this process here: what they answer in time is not the scheduler's."""

from __future__ import annotations

import pytest

from select_service.client import Options
from select_service.planner.edge import kube, selectors
from select_service.planner.edge.connectors import ray
from select_service.planner.edge.sources import prometheus, selector
from tests.wait import PATIENCE_S


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for peers as long as tests wait; who tests a timeout sets one below."""
    for module in (kube, selectors, ray, prometheus, selector):
        monkeypatch.setattr(module, "TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr(selectors, "_ONCE", Options.single_attempt(PATIENCE_S))
