"""JSON or MessagePack: what a body is written in, and what its answer shall be written in.

Both are decided by two header lines alone, so that `fast_lane.py` need not look at lines it has
seen before. `json_codec.py` and `msgpack_codec.py` read and write the forms that are named here.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Final

__all__ = ["MSGPACK_TYPES", "Form", "answer_type", "form_of"]

MSGPACK_TYPES: Final = (
    b"application/msgpack",
    b"application/x-msgpack",
    b"application/vnd.msgpack",  # the registered one
)

_JSON: Final = re.compile(
    rb"application/(?:json|[a-z0-9!#$&^_.+-]+\+json)[ \t]*(?:;.*)?", re.IGNORECASE | re.DOTALL
)
_QUALITY: Final = re.compile(rb"[ \t]*q=(0(?:\.[0-9]{0,3})?|1(?:\.0{0,3})?)[ \t]*", re.IGNORECASE)
_ALSO_JSON: Final = (b"application/json", b"application/*", b"*/*")  # the nearer one counts


class Form(Enum):
    """How a value is written."""

    JSON = "JSON"
    MSGPACK = "msgpack"


def form_of(content_type: bytes | None) -> Form | None:
    """Return what a Content-Type header announces; None: nothing that is read here.

    JSON is application/json or application/<x>+json.
    """
    if content_type is None:
        return None
    if content_type == b"application/json" or _JSON.fullmatch(content_type.strip()):
        return Form.JSON
    media_type = content_type.partition(b";")[0].strip().lower()
    return Form.MSGPACK if media_type in MSGPACK_TYPES else None


def answer_type(accept: bytes) -> bytes | None:
    """Return the name of msgpack under which an Accept header wants it; None: JSON will do.

    JSON wins unless msgpack is named and preferred: `*/*` is no wish, nor is a tie.
    """
    if b"msgpack" not in accept.lower():
        return None
    quality = dict(map(_media_range, reversed(accept.split(b","))))  # the first of two counts
    json = next((quality[name] for name in _ALSO_JSON if name in quality), 0.0)
    best = max(MSGPACK_TYPES, key=lambda name: quality.get(name, 0.0))
    return best if quality.get(best, 0.0) > json else None


def _media_range(text: bytes) -> tuple[bytes, float]:
    """Read one range; a quality that cannot be read is the worst."""
    name, *parameters = text.split(b";")
    quality = 1.0
    for parameter in parameters:
        if parameter.strip(b" \t").lower().startswith(b"q="):
            found = _QUALITY.fullmatch(parameter)
            quality = float(found[1]) if found else 0.0
    return name.strip(b" \t").lower(), quality
