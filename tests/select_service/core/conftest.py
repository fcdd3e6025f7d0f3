"""Fixtures for tests that speak to the core directly."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.select_service.core.whole_fleet import Fleet, long_lives


@pytest.fixture(autouse=True)
def checked() -> Iterator[None]:
    """Check at the end the fleets that were not checked after their last calls."""
    long_lives.clear()
    yield
    for one in long_lives:
        one.core.check()


@pytest.fixture
def fleet() -> Fleet:
    """Two workers with nothing unusual about them."""
    made = Fleet()
    made.worker(1)
    made.worker(2)
    return made
