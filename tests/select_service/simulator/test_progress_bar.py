"""Whoever waits at a terminal sees how far a command is, with rich and without it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from select_service.simulator.capacity import CapacitySearch, search
from select_service.simulator.comparison import perform
from select_service.simulator.progress_bar import progress_bar
from select_service.simulator.runs import capacity_of
from select_service.simulator.settings import SimulationSettings, Trace
from tests.select_service.simulator.test_select_sim import trace_file
from tests.select_service.simulator.test_targets import TARGETS
from tests.wait import block_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.mark.parametrize(
    ("total", "seen"), [(4.0, "replaying  50 %"), (0.0, "replaying"), (None, "replaying")]
)
def test_without_rich_there_is_a_line(
    total: float | None,
    seen: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with progress_bar("replaying", total) as progress:
        progress(2.0)
    assert capsys.readouterr().err.split("\r")[-1] == f"{seen}\n"


def test_with_rich_there_is_a_bar_that_goes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with progress_bar("replaying", 4.0) as progress:
        progress(2.0)
    assert "replaying" in capsys.readouterr().err


@pytest.mark.parametrize(("quiet", "is_terminal"), [(True, True), (False, False)])
def test_nobody_is_bothered_who_does_not_look(
    quiet: bool,
    is_terminal: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    with progress_bar("replaying", 4.0, quiet=quiet) as progress:
        progress(2.0)
    assert capsys.readouterr().err == ""


def _half_done_until_seen(seen: Path, progress: Callable[[float], None] | None) -> str:
    assert progress is not None
    progress(0.5)
    block_until(seen.exists)
    return seen.name


def test_progress_within_runs_of_other_processes_is_seen(tmp_path: Path) -> None:
    shares: list[float] = []

    def progress(done: float) -> None:
        shares.append(done)
        if done == 1.0:  # two halves
            (tmp_path / "seen").touch()

    names = perform(_half_done_until_seen, [tmp_path / "seen"] * 2, 2, progress)
    assert names == ["seen", "seen"]
    assert shares[-1] == 2.0
    assert shares == sorted(shares)


def test_progress_within_a_run_of_a_search_is_seen() -> None:
    shares: list[float] = []
    search(CapacitySearch(settings=TARGETS, workers=False, share=0.9, tolerance=0.5), shares.append)
    assert shares == sorted(shares)
    assert 0.0 < shares[0] < 0.1, "within the first run"
    assert shares[-1] < 1.0, "it is done when it has ended"


def test_progress_of_the_capacity_s_measurement_is_seen(tmp_path: Path) -> None:
    shares: list[float] = []
    trace = Trace(path=str(trace_file(tmp_path)))
    capacity_of(SimulationSettings(trace=trace, workers=2), shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
