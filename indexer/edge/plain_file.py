"""Opens files an operator names and files of our own, without ever waiting for them.

What replaced a file may be a FIFO, and opening that waits until somebody writes: for ever, in a
thread that the end of the process waits for, or on the event loop itself. What an operator names
may be a link; a name that we have given is a file, or it was put there by somebody else.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["check_plain", "open_own", "open_plain"]


def open_plain(path: str | Path) -> BinaryIO:
    """Open a file for reading.

    Raises:
        OSError: it cannot be opened, or is a directory, a FIFO, a device.
        ValueError: that is no path.
    """
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _check(os.fstat(number))
        return open(number, "rb")
    except BaseException:
        os.close(number)
        raise


def open_own(path: Path, flags: int) -> int:
    """Open a file of a directory that is ours, and return its descriptor.

    Args:
        path: whose last part is a name we have given; a link there is not followed.
        flags: as of `os.open`. What is made is for its owner only; what is cut short is a plain
            file for sure.

    Raises:
        OSError: it cannot be opened, or is a link, a directory, a FIFO, a device.
    """
    always = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        number = os.open(path, flags & ~os.O_TRUNC | always, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, f"{path.name} is a link") from None
        if error.errno == errno.ENXIO:  # a FIFO that nobody reads, a socket
            raise OSError(errno.ENXIO, f"{path.name} is no plain file") from None
        raise
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, f"{path.name} is no plain file")
    if flags & os.O_TRUNC:
        os.ftruncate(number, 0)
    return number


def check_plain(path: str | Path, bytes_max: int) -> None:
    """Look at a file that somebody else will open by its path.

    Raises:
        OSError: as `open_plain`, or it is longer than this.
        ValueError: that is no path.
    """
    found = os.stat(path)
    _check(found)
    if found.st_size > bytes_max:
        raise OSError(errno.EFBIG, f"longer than {bytes_max} bytes")


def _check(found: os.stat_result) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a plain file")
