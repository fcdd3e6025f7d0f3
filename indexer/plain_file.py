"""Opens files named by an operator and files of our own, without ever blocking on them.

A file may have been replaced by a FIFO, and opening a FIFO blocks until something writes: for ever,
in a thread that shutdown waits for, or on the event loop itself. A path given by an operator may be
a link; a name we have chosen ourselves is a plain file, or another user put it there.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from pathlib import Path


def open_plain(path: str | Path) -> BinaryIO:
    """Open a file for reading.

    Raises:
        OSError: it cannot be opened, or is a directory, a FIFO, a device.
        ValueError: the path is invalid.
    """
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _check(os.fstat(number))
        return open(number, "rb")
    except BaseException:
        os.close(number)
        raise


def open_own(path: Path, flags: int) -> int:
    """Open a file in a directory of our own, and return its descriptor.

    Args:
        path: its last part is a name of our own; a link there is not followed.
        flags: as for `os.open`. New files are accessible to their owner only; only plain files are
            truncated.

    Raises:
        OSError: it cannot be opened, or is a link, a directory, a FIFO, a device.
    """
    always = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        number = os.open(path, flags & ~os.O_TRUNC | always, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, f"{path.name} is a link") from None
        if error.errno == errno.ENXIO:  # a FIFO without a reader, or a socket
            raise OSError(errno.ENXIO, f"{path.name} is no plain file") from None
        raise
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, f"{path.name} is no plain file")
    if flags & os.O_TRUNC:
        os.ftruncate(number, 0)
    return number


def check_plain(path: str | Path, bytes_max: int) -> None:
    """Check a file that other code will open by its path.

    Raises:
        OSError: as `open_plain`, or it is longer than `bytes_max`.
        ValueError: the path is invalid.
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
