"""What Ctrl-C does to our commands: while one is loaded there is nothing to end in order.

Raised there, `KeyboardInterrupt` shows a traceback of whatever was being imported, and numpy's
start does not survive it. So the process ends by the signal itself, as any program does that has
not set a handler, until the command is loaded and handles what is raised.
"""

from __future__ import annotations

import atexit
import gc
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def run(load: Callable[[], Callable[[], int]]) -> int:
    """Load a command and run it; before and after that, Ctrl-C ends the process at once.

    A process that ends needs no search for garbage among all that it has loaded; Python's takes a
    third of what a start takes.
    """
    _end_at_once()
    command = load()
    atexit.register(gc.freeze)
    try:
        return command()
    finally:
        _end_at_once()


def _end_at_once() -> None:
    """Let Ctrl-C end the process at once; not where it is ignored, as in the background."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def raise_again() -> None:
    """Let Ctrl-C raise `KeyboardInterrupt`, as Python has it; undoes `_end_at_once`."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
