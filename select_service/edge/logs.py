"""One format for all log records, also of libraries: text for people or one JSON object per line.

The code logs through the standard library; this is its formatter. Prompts, tokens and hashes are
never passed to a logger; secrets that others put into a text are removed, and client-chosen values
(ids, paths, names) escaped and cut here.
"""

from __future__ import annotations

import logging
import os
import select
import stat
import sys
import time
from collections import OrderedDict
from datetime import UTC, datetime
from textwrap import indent
from typing import TYPE_CHECKING, Final

import orjson
from typing_extensions import override

from indexer.redaction import redact

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import TextIO

    from select_service.settings import LogFormat

VALUE_CHARS_MAX: Final = 256
"""Longer strings are cut: an id may be as long as a body."""

TRACE_LINES_MAX: Final = 200
"""Lines kept of a traceback, half from its start and half from its end: the message of an exception
may have as many lines as its cause chose."""

_LEVEL_WIDTH: Final = 9
_EVENT_WIDTH: Final = 30
_INDENT: Final = "    "
_QUOTED: Final = frozenset(" \t=\"'")  # a value with one of these needs quotes to show its end
_LIBRARIES: Final = ("uvicorn", "uvicorn.error", "uvicorn.access", "asyncio", "httpx", "httpcore")
_INT_BITS: Final = 63  # orjson refuses wider numbers
_OF_EVERY_RECORD: Final = frozenset((*vars(logging.makeLogRecord({})), "message", "asctime"))


def configure(
    log_format: LogFormat,
    level: str,
    *,
    access_log: bool,
    stream: TextIO | None = None,
    ids: Callable[[], Mapping[str, str] | None] | None = None,
) -> None:
    """Send all records of the process to stderr (or `stream`) in one format. Repeatable.

    Args:
        log_format: of the lines.
        level: the least important level to log.
        access_log: whether to log requests.
        stream: where to write; without it and without stderr, nothing is written.
        ids: returns the trace ids of the current request, if tracing is on.
    """
    taker = sys.stderr if stream is None else stream
    handler = logging.NullHandler() if taker is None else LogWriter(taker)  # `2>&-` leaves none
    handler.setFormatter(JsonLines() if log_format == "json" else TextLines())
    if ids is not None:
        handler.addFilter(_Identified(ids))
    root = logging.getLogger()
    for old in root.handlers:
        if isinstance(old, LogWriter):
            old.close()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    quiet = level != "debug"
    for name in _LIBRARIES:
        logging.getLogger(name).setLevel(logging.WARNING if quiet else logging.NOTSET)
    logging.getLogger("select_service.access").disabled = not access_log


class _Identified(logging.Filter):
    """Adds the trace ids of the current request to every record; drops none."""

    def __init__(self, ids: Callable[[], Mapping[str, str] | None]) -> None:
        super().__init__()
        self._ids = ids

    @override
    def filter(self, record: logging.LogRecord) -> bool:
        for name, value in (self._ids() or {}).items():
            vars(record).setdefault(name, value)
        return True


class TextLines(logging.Formatter):
    """`time [level] event [logger] key=value …`, followed by an indented traceback.

    The indentation keeps its lines from being mistaken for records.
    """

    @override
    def format(self, record: logging.LogRecord) -> str:
        extras = " ".join(
            f"{key}={_quoted(value)}" for key, value in sorted(_extras(record).items())
        )
        line = (
            f"{_time(record)} [{record.levelname.lower():{_LEVEL_WIDTH}}] "
            f"{tame(record.getMessage()):{_EVENT_WIDTH}} [{record.name}] {extras}"
        ).rstrip()
        traces = "\n".join(_traces(self, record).values())
        return redact(f"{line}\n{indent(traces, _INDENT)}" if traces else line)


class JsonLines(logging.Formatter):
    """One object per line; values JSON cannot express are written as their repr."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        members: dict[str, object] = {
            "event": tame(record.getMessage()),
            "level": record.levelname.lower(),
            "logger": record.name,
            **_extras(record),
            "timestamp": _time(record),
            **_traces(self, record),
        }
        try:
            text = orjson.dumps(members, default=repr, option=orjson.OPT_NON_STR_KEYS)
        except TypeError:  # a key that JSON cannot express, or a number beyond 64 bits
            text = orjson.dumps({key: _plain(value) for key, value in members.items()})
        return redact(text.decode())


def tame(text: str) -> str:
    """Escape control characters and cut long text, so that clients cannot forge log lines."""
    if len(text) > VALUE_CHARS_MAX:
        text = redact(text)[:VALUE_CHARS_MAX] + "…"
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def _extras(record: logging.LogRecord) -> dict[str, object]:
    return {
        key: _tamed(value) for key, value in vars(record).items() if key not in _OF_EVERY_RECORD
    }


def _tamed(value: object) -> object:
    if isinstance(value, str):
        return tame(value)
    if isinstance(value, dict):
        return {
            tame(key) if isinstance(key, str) else key: _tamed(one) for key, one in value.items()
        }
    if isinstance(value, list | tuple):
        return [_tamed(one) for one in value]
    return value


def _traces(formatter: logging.Formatter, record: logging.LogRecord) -> dict[str, str]:
    """Return the parts of a record that span several lines."""
    traces: dict[str, str] = {}
    if record.exc_info:
        traces["exception"] = formatter.formatException(record.exc_info)
    if record.stack_info:
        traces["stack"] = formatter.formatStack(record.stack_info)
    return {name: _tamed_lines(text) for name, text in traces.items()}


def _tamed_lines(text: str) -> str:
    lines = text.split("\n")
    if len(lines) > TRACE_LINES_MAX:
        half = TRACE_LINES_MAX // 2
        lines[half:-half] = [f"… {len(lines) - 2 * half} lines"]
    return "\n".join(map(tame, lines))


def _time(record: logging.LogRecord) -> str:
    made_at = datetime.fromtimestamp(record.created, UTC)
    return made_at.replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"


def _quoted(value: object) -> str:
    return value if isinstance(value, str) and _QUOTED.isdisjoint(value) else repr(value)


def _plain(value: object) -> object:
    if isinstance(value, int):
        return value if value.bit_length() <= _INT_BITS else repr(value)
    return value if isinstance(value, str | float | None) else repr(value)


# Rate-limited logging of failures that others cause. Otherwise anyone able to make us fail, with a
# wrong address in every heartbeat or registration, could flood our log. Suppressed lines are
# counted, and the next line written says how many.

PERIOD_S: Final = 10.0
LINES_MAX: Final = 4
"""Lines written per period about one party; more than one, since causes may differ."""

PARTIES_REMEMBERED: Final = 1024
"""The most recently mentioned ones."""


class LogThrottle:
    """Writes lines of one kind."""

    def __init__(self, log: Callable[[str], object], clock: Callable[[], float]) -> None:
        """Start with nothing logged.

        Args:
            log: writes a line.
            clock: monotonic seconds.
        """
        self._log, self._clock = log, clock
        # party → (start of its period, lines written since, lines suppressed)
        self._logged: OrderedDict[str, tuple[float, int, int]] = OrderedDict()

    def log(self, party: str, what: str) -> None:
        """Log a failure that `party` caused, or count it for the next line."""
        now = self._clock()
        since, written, suppressed = self._logged.pop(party, (now, 0, 0))
        if now - since >= PERIOD_S:
            since, written = now, 0
        if written < LINES_MAX:
            self._log(f"{what} ({suppressed} more since the last line)" if suppressed else what)
            written, suppressed = written + 1, 0
        else:
            suppressed += 1
        self._logged[party] = since, written, suppressed
        while len(self._logged) > PARTIES_REMEMBERED:
            self._logged.popitem(last=False)


# Writes log lines without ever blocking: a line is written at once or counted as lost. The reader
# of stderr may stall (a container's log driver with a full disk), which would block the event loop
# on its next line, and the service with it. So a line is written only if there is room for it now,
# and the first line that fits again reports how many were lost.

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
        if hasattr(select, "poll"):  # without it nothing shows whether there is room
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
            note = logging.makeLogRecord(
                {
                    "name": "select_service",
                    "levelno": logging.WARNING,
                    "levelname": "WARNING",
                    "msg": f"{self._lost} lines of the log are lost: they were not read",
                }
            )
            text = f"{self.format(note)}\n{text}"
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
