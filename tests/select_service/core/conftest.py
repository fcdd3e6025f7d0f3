"""Fixtures for tests that speak to the core directly."""

from __future__ import annotations

import pytest

from tests.select_service.core.whole_fleet import Fleet


@pytest.fixture
def fleet() -> Fleet:
    """Two workers with nothing unusual about them."""
    made = Fleet()
    made.worker(1)
    made.worker(2)
    return made
