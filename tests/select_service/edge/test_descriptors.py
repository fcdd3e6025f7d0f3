"""The limit on open files is raised as far as it may be, and said so once."""

from __future__ import annotations

import resource

import pytest

from select_service.edge import app
from select_service.edge.app import raise_limit


class _System:
    """A system's limits, to be raised."""

    def __init__(self, soft: int, hard: int) -> None:
        self.limits = (soft, hard)
        self.refuses = False

    def get(self, _: int) -> tuple[int, int]:
        return self.limits

    def set(self, _: int, limits: tuple[int, int]) -> None:
        if self.refuses:
            raise ValueError("not allowed to raise maximum limit")
        self.limits = limits


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> _System:
    one = _System(1024, 4096)
    monkeypatch.setattr(resource, "getrlimit", one.get)
    monkeypatch.setattr(resource, "setrlimit", one.set)
    return one


def test_no_hard_limit_is_no_reason_to_have_none(system: _System) -> None:
    system.limits = (1024, resource.RLIM_INFINITY)
    assert raise_limit() == app.ENOUGH
    system.limits = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert raise_limit() == resource.RLIM_INFINITY


def test_a_system_that_refuses_is_no_reason_not_to_start(
    system: _System, caplog: pytest.LogCaptureFixture
) -> None:
    system.refuses = True
    assert raise_limit() == 1024
    assert "open files stay limited to 1024" in caplog.text
