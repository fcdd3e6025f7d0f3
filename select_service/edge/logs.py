"""One shape for every log record, whoever wrote it: text for people or one JSON object per line.

The code logs through the standard library; structlog renders. Prompts, tokens and hashes are never
handed to a logger; what clients can choose (ids, paths, names) is escaped and cut here.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Final

import structlog

from select_service.edge.codec import encode

if TYPE_CHECKING:
    from typing import TextIO

    from structlog.typing import EventDict, Processor, WrappedLogger

    from select_service.config import LogFormat

__all__ = ["configure"]

VALUE_CHARS_MAX: Final = 256
"""Longer strings are cut: an id may be as long as a body."""


def configure(
    log_format: LogFormat, level: str, *, access_log: bool, stream: TextIO | None = None
) -> None:
    """Send every record of the process to stderr (or `stream`) in one format. Repeatable."""
    shared: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        tame,
    ]
    rendering: Processor
    if log_format == "json":
        shared.append(structlog.processors.format_exc_info)
        rendering = structlog.processors.JSONRenderer(serializer=_to_json)
    else:
        rendering = structlog.dev.ConsoleRenderer(
            colors=False, exception_formatter=structlog.dev.plain_traceback
        )
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, rendering],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    quiet = level != "debug"
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "asyncio", "httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.WARNING if quiet else logging.NOTSET)
    logging.getLogger("select_service.access").disabled = not access_log


def tame(_: WrappedLogger, __: str, record: EventDict) -> EventDict:
    """Escape control characters and cut long strings, so that nobody writes our log for us."""
    for key, value in record.items():
        if isinstance(value, str):
            if len(value) > VALUE_CHARS_MAX:
                value = value[:VALUE_CHARS_MAX] + "…"  # noqa: PLW2901 - the tamed value
            if not value.isprintable():
                value = value.encode("unicode_escape").decode()  # noqa: PLW2901
            record[key] = value
    return record


def _to_json(record: EventDict, **_: object) -> str:
    try:
        return encode(record).decode()
    except TypeError:
        return encode({key: _plain(value) for key, value in record.items()}).decode()


def _plain(value: object) -> object:
    return value if isinstance(value, str | int | float | bool | None) else repr(value)
