"""Locks on files of this machine; the kernel releases them when the process ends, however it ends.

One file per planned model, so that two planners collide over any model they share; and one in the
state directory, whose file both would write.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from select_service.planner.errors import PlannerError, SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from select_service.planner.types import ModelKey

_log = logging.getLogger("select_planner")

_NO_FOLDER: Final = (
    "no directory can be written for the locks that keep two planners apart: "
    "name one with --state-dir, XDG_RUNTIME_DIR or TMPDIR"
)
_UNNOTICED: Final = (
    "neither XDG_RUNTIME_DIR nor TMPDIR can be written: the locks are in --state-dir, so a planner "
    "with another one is not noticed"
)


class FileLease:
    """Locks on several files: all of them, or none.

    Args:
        paths: of the files; they are created. A dry run has none: there is nothing to contend for.
        identity: written into them, for people.
    """

    problem = ""
    failures = 0

    def __init__(self, *paths: Path, identity: str = "") -> None:
        self._paths = sorted(set(paths))
        self._identity = identity
        self._files: dict[Path, int] = {}
        self.taken: Path | None = None
        """The file that another planner has locked."""

    async def held(self) -> bool:
        """Try to lock all unlocked files, once; a held lock stays held while its file exists.

        Raises:
            PlannerError: a file cannot be opened.
        """
        for path in self._paths:
            if not self._lock(path):
                self.taken = path
                await self.close()
                return False
        self.taken = None
        return True

    @property
    def is_sure(self) -> bool:
        """Whether all are locked; the kernel keeps them for as long as this process lives."""
        return len(self._files) == len(self._paths)

    def _lock(self, path: Path) -> bool:
        held = self._files.get(path)
        if held is not None and not _is_replaced(path, held):
            return True
        try:
            opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            if held is not None:
                return True  # its directory is gone, so no other process can lock there
            raise PlannerError(f"{path}: {error.strerror}") from error
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(opened)
            return False
        if _is_replaced(path, opened):  # removed between opening and locking
            os.close(opened)
            return False
        if held is not None:
            os.close(held)
        self._files[path] = opened
        with contextlib.suppress(OSError):  # the disk may be full; the text is only for people
            os.ftruncate(opened, 0)
            os.pwrite(opened, self._identity.encode(), 0)
        return True

    @property
    def holder(self) -> str:
        """What the current holder has written; empty: nothing."""
        if self.taken is None:
            return ""
        try:
            return self.taken.read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    async def close(self) -> None:
        """Unlock the files; they stay, or two planners could hold one name."""
        for opened in self._files.values():
            os.close(opened)
        self._files.clear()


def _is_replaced(path: Path, opened: int) -> bool:
    """Return whether the path now leads to another file: /tmp is cleaned occasionally."""
    ours = os.fstat(opened)
    try:
        there = os.stat(path)
    except OSError:
        return True
    return (ours.st_dev, ours.st_ino) != (there.st_dev, there.st_ino)


def model_locks(
    models: Iterable[ModelKey],
    name: str,
    folder: Path | None = None,
    state_dir: Path | None = None,
) -> list[Path]:
    """Return the lock files of models, and create their directory.

    Args:
        models: that are planned.
        name: of the lease: fleets of different names may have models of the same name.
        folder: for tests; None: of this user, on this machine.
        state_dir: where they are if this machine has no directory for them.

    Raises:
        SettingsError: the directory belongs to another user, or none can be created.
    """
    folder = folder or _folder() or state_dir
    if folder is None:
        raise SettingsError(_NO_FOLDER)
    if folder == state_dir:
        _log.warning(_UNNOTICED)
    return [
        folder
        / hashlib.blake2b(
            "\0".join((name, one.model_name, one.tenant_id)).encode(), digest_size=16
        ).hexdigest()
        for one in models
    ]


def _folder() -> Path | None:
    """Return a directory that no other user can write to: of the login session, or temporary.

    None: neither can be written, as in a container whose file system is read-only.
    """
    for folder in _folders():
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            found = folder.lstat()
        except OSError:
            continue
        if found.st_uid != os.getuid() or found.st_mode & 0o022:
            why = "locks of planners are there, and others can change them"
            raise SettingsError(f"{folder}: {why}")
        if os.access(folder, os.W_OK):
            return folder
    return None


def _folders() -> Iterator[Path]:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        yield Path(runtime) / "select-planner"
    with contextlib.suppress(FileNotFoundError):  # none is usable
        yield Path(tempfile.gettempdir()) / f"select-planner-{os.getuid()}"
