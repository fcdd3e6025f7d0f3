"""What commands print: whoever reads it may stop, as `| head` does, and a disk it goes to be full.

Either is no bug of ours and shows no traceback; the interpreter would say so once more at its exit,
when it flushes what is left, and end with a code of its own.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["printing"]

_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
_FAILED: Final = 1


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
