"""How far a command is, shown at a terminal."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def progress_bar(
    what: str, total: float | None, *, quiet: bool = False
) -> Iterator[Callable[[float], None]]:
    """Show a progress bar on standard error, if that is a terminal.

    Args:
        what: the command does.
        total: what there is to do; None: that is not known.
        quiet: show none.

    Yields:
        What takes how much of the total is done.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda _: None
        return
    try:
        from rich.console import Console  # from the extra `demo`
        from rich.progress import Progress
    except ImportError:
        report = _plain(what, total)
        report(0.0)
        yield report
        sys.stderr.write("\n")
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


def _plain(what: str, total: float | None) -> Callable[[float], None]:
    def report(done: float) -> None:
        share = "" if not total else f" {100 * done / total:3.0f} %"
        sys.stderr.write(f"\r{what}{share}")
        sys.stderr.flush()

    return report
