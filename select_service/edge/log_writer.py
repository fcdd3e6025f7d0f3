"""Writes log lines without ever blocking: a line is written at once or counted as lost.

The reader of stderr may stall (a container's log driver with a full disk), which would block the
event loop on its next line, and the service with it. So a line is written only if there is room for
it now, and the first line that fits again reports how many were lost.
"""

from __future__ import annotations

import logging
import os
import select
import stat
import time
from typing import TYPE_CHECKING, Final

from typing_extensions import override

if TYPE_CHECKING:
    from typing import TextIO

PIECE_BYTES: Final = getattr(select, "PIPE_BUF", 512)
"""A pipe that reports room takes this much without blocking, all of it or nothing."""

RETRY_S: Final = 0.1
"""How long to leave an outlet alone after an error, which costs more than a line."""

PATIENCE_MS: Final = 2
"""How long the first line that finds no room waits: a reader that is alive soon makes some."""

HASTE_S: Final = 1.0
"""How long lines do not wait after one waited in vain: a reader slower than the lines stays so."""

LOST: Final[dict[str, int]] = {"blocked": 0, "failed": 0}
"""Lost lines of this process: there was no room, or the write failed."""


class LogWriter(logging.Handler):
    """Writes formatted lines to a stream, through its descriptor if it has one."""

    def __init__(self, stream: TextIO) -> None:
        """Take a stream; its owner closes it."""
        super().__init__()
        self._stream = stream
        self._own: int | None = None
        self._number: int | None = None
        if hasattr(select, "poll"):  # without it nothing tells whether there is room
            try:
                self._number = stream.fileno()
            except (AttributeError, OSError, ValueError):  # in memory, closed, or not a file
                pass
            else:
                self._own = _reopened(self._number)
                self._watch()
        self._lost = 0  # since the last line that found room
        self._is_torn = False  # only a part of the last line was written
        self._retry_at = 0.0
        self._patient_at = 0.0  # from when on a line may wait for room again
        self._until: float | None = None  # until when the current line may wait, once it had to

    def _watch(self) -> None:
        number = self._number if self._own is None else self._own
        assert number is not None
        self._writes = number
        self._room = select.poll()
        self._room.register(number, select.POLLOUT)

    @override
    def close(self) -> None:
        """Close our own descriptor; later lines are written to the stream's."""
        if self._own is not None:
            os.close(self._own)
            self._own = None
            self._watch()
        super().close()

    @override
    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001 - as in `logging`: logging must not fail the caller
            self.handleError(record)
            return
        why = (self._print if self._number is None else self._write)(f"{line}\n")
        if why is not None:
            LOST[why] += 1
            self._lost += 1

    def _print(self, text: str) -> str | None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # for example closed
            return "failed"
        return None

    def _write(self, text: str) -> str | None:
        """Write a line, after a pending note about lost ones; return why it is lost, or None."""
        if self._lost:
            if time.monotonic() < self._retry_at:
                return "failed"
            told = logging.makeLogRecord(
                {
                    "name": "select_service",
                    "levelno": logging.WARNING,
                    "levelname": "WARNING",
                    "msg": f"{self._lost} lines of the log are lost: nobody took them",
                }
            )
            text = f"{self.format(told)}\n{text}"
        if self._is_torn:
            text = f"\n{text}"
        rest = memoryview(text.encode("utf-8", "backslashreplace"))
        size = len(rest)
        self._until = None
        try:
            while rest:
                self._find_room()
                rest = rest[os.write(self._writes, rest[:PIECE_BYTES]) :]
        except BlockingIOError:
            why = "blocked"
        except OSError:
            why = "failed"
            self._retry_at = time.monotonic() + RETRY_S
        else:
            self._lost, self._is_torn = 0, False
            return None
        self._is_torn |= len(rest) < size
        return why

    def _find_room(self) -> None:
        """Return once there is room for a piece; all pieces of a line share one wait.

        Raises:
            BlockingIOError: there is none in time.
        """
        if self._room.poll(0):
            return
        now = time.monotonic()
        if self._until is None:
            is_patient = not self._lost and now >= self._patient_at
            self._until = now + PATIENCE_MS / 1e3 if is_patient else 0.0
        left_ms = round((self._until - now) * 1e3)
        if left_ms <= 0 or not self._room.poll(left_ms):
            self._patient_at = max(self._patient_at, self._until + HASTE_S)
            raise BlockingIOError


def _reopened(number: int) -> int | None:
    """Reopen a pipe or terminal in non-blocking mode; None if that is impossible.

    The flags of the original descriptor stay as they are: every process that inherited it shares
    them.
    """
    try:
        if os.isatty(number) or stat.S_ISFIFO(os.fstat(number).st_mode):
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            return os.open(f"/proc/self/fd/{number}", flags)
    except OSError:  # no such path, another user's terminal, a pipe without a reader
        pass
    return None
