"""What commands print: without secrets, to readers that may stop, as `| head` does, or full disks.

Either is no bug of ours and shows no traceback; the interpreter would say so once more at its exit,
when it flushes what is left, and end with a code of its own.
"""

from __future__ import annotations

import argparse
import errno
import os
import shlex
import sys
import traceback
from typing import TYPE_CHECKING, Final

from indexer.redaction import redact

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from _typeshed import SupportsWrite

__all__ = ["CommandParser", "command_line", "complain", "printing", "redact_tracebacks"]

_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
_FAILED: Final = 1


class CommandParser(argparse.ArgumentParser):
    """A parser whose messages show no secrets; an argument that is wrong may contain some."""

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        super()._print_message(redact(message) if message else message, file)


def command_line(program: str, argv: Sequence[str] | None) -> str:
    """Return what was typed, as a shell takes it and without secrets; None: of this process."""
    return redact(shlex.join([program, *(sys.argv[1:] if argv is None else argv)]))


def complain(text: str) -> None:
    """Write a line to standard error."""
    print(redact(text), file=sys.stderr, flush=True)  # noqa: T201 - for commands


def redact_tracebacks() -> None:
    """Let the interpreter show no secrets when an error ends the process."""

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        complain("".join(traceback.format_exception(kind, error, trace)).rstrip())

    sys.excepthook = show


def printing(run: Callable[[], int], command: str, unread: int) -> int:
    """Run what prints an answer.

    Args:
        run: returns the exit code.
        command: what it calls itself.
        unread: the exit code where nobody has read to the end.

    Returns:
        The exit code; 1 where it cannot be written, and standard error says why.
    """
    try:
        code = run()
        sys.stdout.flush()
    except BrokenPipeError:
        _let_go()
        return unread
    except OSError as error:
        if error.errno not in _NO_ROOM or error.filename is not None:
            raise
        _let_go()
        sys.stderr.write(f"{command}: standard output: {error.strerror}\n")
        return _FAILED
    return code


def _let_go() -> None:
    """Let nothing be flushed at the exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
