"""One log line per request under `--access-log`: client, method, path, status, duration.

It includes the selection and reservation ids the request was about, if any. Format and escaping of
log records are the business of `logs.py`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

import msgspec

if TYPE_CHECKING:
    from starlette.types import Scope

    from select_service.edge.codec.responses import Response

_log = logging.getLogger("select_service.access")

TRACE_IDS: Final = "select_service.trace_ids"
"""Key in the ASGI scope of the trace ids to log, if the request is traced."""

_PATH_CHARS_MAX: Final = 128
_RESERVATIONS: Final = b"/reservations/"


class _Ids(msgspec.Struct):
    selection_id: str | None = None
    reservation_id: str | None = None


def log_access(scope: Scope, status: int, seconds: float, answer: Response | None) -> None:
    """Log a request that was answered, or whose client disconnected."""
    client = scope.get("client")
    path: bytes = scope.get("raw_path") or b""
    _log.info(
        "request",
        extra={
            "method": scope["method"][:16],
            "path": short(path),
            "status": status,
            "ms": round(seconds * 1e3, 3),
            "client": client[0] if client else None,
            **_ids(path, answer),
            **scope.get(TRACE_IDS, {}),
        },
    )


def short(raw_path: bytes) -> str:
    """Return a path in loggable form, cut and escaped."""
    return raw_path[:_PATH_CHARS_MAX].decode("ascii", "backslashreplace")


def _ids(path: bytes, answer: Response | None) -> dict[str, str]:
    if path.startswith(_RESERVATIONS):
        name = path[len(_RESERVATIONS) :].partition(b"/")[0]
        return {} if name == b"batch" else {"reservation_id": unquote(short(name))}
    if answer is None or not path.startswith((b"/select", b"/reservations")):
        return {}
    decode = msgspec.json.decode if answer.body.startswith(b"{") else msgspec.msgpack.decode
    try:
        ids = decode(answer.body, type=_Ids)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return {name: value for name, value in msgspec.structs.asdict(ids).items() if value}
