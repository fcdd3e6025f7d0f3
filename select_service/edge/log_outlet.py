"""Where log lines leave the process: written at once, or counted as lost; never waited for.

Whoever reads them may stand still (a container's log driver with a full disk), and so would the
event loop with its next line, and with it the service. So a line is written if there is room for
it now, and the first that finds room again says how many did not.
"""

from __future__ import annotations

import io
import logging
import os
import select
import time
from typing import TYPE_CHECKING, Final

from typing_extensions import override

if TYPE_CHECKING:
    from typing import TextIO

__all__ = ["LOST", "LogOutlet"]

PIECE_BYTES: Final = select.PIPE_BUF
"""As much as a pipe takes without waiting, all of it or nothing, when it says that it has room."""

RETRY_S: Final = 0.1
"""How long an outlet that failed is left alone: an error costs more than a line."""

PATIENCE_MS: Final = 2
"""How long the first line waits that finds no room: a reader that is at work makes some."""

LOST: Final[dict[str, int]] = {"blocked": 0, "failed": 0}
"""Lines of this process that nobody will read: there was no room, or the disk refused."""


class LogOutlet(logging.Handler):
    """Writes the lines of a formatter to a stream; to its descriptor, if it has one."""

    def __init__(self, stream: TextIO) -> None:
        """Take a stream, which stays its owner's to close."""
        super().__init__()
        self._stream = stream
        try:
            self._number: int | None = stream.fileno()
        except io.UnsupportedOperation:  # text in memory
            self._number = None
        self._room = select.poll()
        if self._number is not None:
            self._room.register(self._number, select.POLLOUT)
        self._lost = 0  # since the last line that found room
        self._is_torn = False  # the last line has a beginning only
        self._retry_at = 0.0

    @override
    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001 - as in `logging`: who logs must not fail by it
            self.handleError(record)
            return
        if self._number is None:
            self._stream.write(line + "\n")
            return
        why = self._write(f"{line}\n")
        if why is not None:
            LOST[why] += 1
            self._lost += 1

    def _write(self, text: str) -> str | None:
        """Write a line, behind what has to be said first; return why it is lost, if it is."""
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
        is_begun = False
        assert self._number is not None
        while rest:
            try:
                if not self._room.poll(0 if self._lost else PATIENCE_MS):
                    self._is_torn |= is_begun
                    return "blocked"
                rest = rest[os.write(self._number, rest[:PIECE_BYTES]) :]
            except OSError:
                self._is_torn |= is_begun
                self._retry_at = time.monotonic() + RETRY_S
                return "failed"
            is_begun = True
        self._lost, self._is_torn = 0, False
        return None
