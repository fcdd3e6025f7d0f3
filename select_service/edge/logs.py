"""One format for all log records, whoever wrote them: text for people or one JSON object per line.

The code logs through the standard library; this is its formatter. Prompts, tokens and hashes are
never passed to a logger; secrets that others put into a text are removed, and client-chosen values
(ids, paths, names) escaped and cut here.
"""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from textwrap import indent
from typing import TYPE_CHECKING, Final

import orjson
from typing_extensions import override

from indexer.redaction import redact
from select_service.edge.log_writer import LogWriter

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
        said = " ".join(f"{key}={_quoted(value)}" for key, value in sorted(_extras(record).items()))
        line = (
            f"{_time(record)} [{record.levelname.lower():{_LEVEL_WIDTH}}] "
            f"{tame(record.getMessage()):{_EVENT_WIDTH}} [{record.name}] {said}"
        ).rstrip()
        traces = "\n".join(_traces(self, record).values())
        return redact(f"{line}\n{indent(traces, _INDENT)}" if traces else line)


class JsonLines(logging.Formatter):
    """One object per line; values JSON cannot express are written as their repr."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, object] = {
            "event": tame(record.getMessage()),
            "level": record.levelname.lower(),
            "logger": record.name,
            **_extras(record),
            "timestamp": _time(record),
            **_traces(self, record),
        }
        try:
            text = orjson.dumps(said, default=repr, option=orjson.OPT_NON_STR_KEYS)
        except TypeError:  # a key that JSON cannot express, or a number beyond 64 bits
            text = orjson.dumps({key: _plain(value) for key, value in said.items()})
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
