"""Whoever waits at a terminal sees how far a command is, with rich and without it."""

from __future__ import annotations

import sys

import pytest

from select_service.simulator.progress_bar import progress_bar


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
