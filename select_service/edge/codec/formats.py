"""JSON or MessagePack: the format of a body, and the format wanted for its answer.

Two header lines alone decide both, so that `connection.py` can remember the result by these lines.
`json_codec.py` and `msgpack_codec.py` implement the formats.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Final

MSGPACK_TYPES: Final = (
    b"application/msgpack",
    b"application/x-msgpack",
    b"application/vnd.msgpack",  # the registered one
)

_JSON: Final = re.compile(
    rb"application/(?:json|[a-z0-9!#$&^_.+-]+\+json)[ \t]*(?:;.*)?", re.IGNORECASE | re.DOTALL
)
_QUALITY: Final = re.compile(rb"[ \t]*q=(0(?:\.[0-9]{0,3})?|1(?:\.0{0,3})?)[ \t]*", re.IGNORECASE)
_ALSO_JSON: Final = (b"application/json", b"application/*", b"*/*")  # the most specific one counts


class Format(Enum):
    """How a value is encoded."""

    JSON = "JSON"
    MSGPACK = "msgpack"


def form_of(content_type: bytes | None) -> Format | None:
    """Return the format a Content-Type header announces; None: not one we read.

    JSON is application/json or application/<x>+json.
    """
    if content_type is None:
        return None
    if content_type == b"application/json" or _JSON.fullmatch(content_type.strip()):
        return Format.JSON
    media_type = content_type.partition(b";")[0].strip().lower()
    return Format.MSGPACK if media_type in MSGPACK_TYPES else None


def answer_type(accept: bytes) -> bytes | None:
    """Return the media type under which an Accept header prefers msgpack; None: JSON will do.

    JSON wins unless msgpack is named and preferred: neither `*/*` nor a tie is a preference.
    """
    if b"msgpack" not in accept.lower():
        return None
    quality = dict(map(_media_range, reversed(accept.split(b","))))  # the first duplicate counts
    json = next((quality[name] for name in _ALSO_JSON if name in quality), 0.0)
    best = max(MSGPACK_TYPES, key=lambda name: quality.get(name, 0.0))
    return best if quality.get(best, 0.0) > json else None


def _media_range(text: bytes) -> tuple[bytes, float]:
    """Read one range; an unreadable quality counts as 0."""
    name, *parameters = text.split(b";")
    quality = 1.0
    for parameter in parameters:
        if parameter.strip(b" \t").lower().startswith(b"q="):
            found = _QUALITY.fullmatch(parameter)
            quality = float(found[1]) if found else 0.0
    return name.strip(b" \t").lower(), quality
