"""Result files: checked before anything runs, and written completely or not at all.

A run takes minutes, so an unwritable file is reported at its beginning. The old content stays until
the new file is complete: a full disk or Ctrl-C leaves no partial file.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path


class NotWritten(Exception):
    """A result could not be written; the text names the file."""


def expect_writable(*paths: str | None) -> None:
    """Refuse files that cannot be written; None: not requested.

    Raises:
        OSError: naming the first of them.
        ValueError: two are the same file, so the last would overwrite the first.
    """
    targets: set[Path] = set()
    for path in filter(None, paths):
        target = Path(path).resolve()
        if target in targets and (target.is_file() or not target.exists()):
            raise ValueError(f"{path}: two results would be the same file")
        targets.add(target)
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not target.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if not os.access(target if target.exists() else target.parent, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)


def write_whole(path: str | Path, content: bytes) -> None:
    """Replace a file completely, or leave it as it is; pipes and devices are written directly.

    Raises:
        NotWritten: the disk is full, for example.
    """
    target = Path(path).resolve()
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(content)
            return
        aside = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            aside.write_bytes(content)
            os.replace(aside, target)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        raise NotWritten(f"{path}: {error.strerror}") from error
