"""By what a request is recognised when it comes again: 16 bytes of all it says.

Whoever repeats a booking gets the first answer (`desk.py`), and whoever says something else under
the same id is refused. `_fingerprints.pyx` writes the same bytes for what is plain.
"""

from __future__ import annotations

from typing import Final

import msgspec
import xxhash
from msgspec import UNSET

from select_service.core.pricing.prompt import packed
from select_service.types import PromptFields, SelectRequest

__all__ = ["fingerprint_of", "in_order"]

in_order: Final = msgspec.msgpack.Encoder(order="deterministic").encode
"""Packs a request to be recognised by: members of objects have no order."""

_KINDS: Final[dict[type, tuple[bytes, bool, bool]]] = {}
"""By the type of a request, of which there are a handful: its name, whether it may ask to have its
decision explained, and whether it has a prompt. `isinstance` takes 750 instructions for that."""


def fingerprint_of(request: msgspec.Struct, unknown: bytes) -> bytes:
    """Return 16 bytes that two requests share iff they are the same body on the same route.

    Two spellings of one hash, signed and unsigned, are the same. 1 µs for 128 blocks.

    State directories keep it, and the next version must find the same in a repeat: a member that a
    request is given from now on is UNSET unless somebody says it, and written only then.

    Args:
        request: as decoded, or by a caller in this process: its lists have been found right.
        unknown: canonical bytes of the members that nobody knows.
    """
    kind = type(request)
    known = _KINDS.get(kind)
    if known is None:
        may_explain, has_prompt = issubclass(kind, SelectRequest), issubclass(kind, PromptFields)
        known = _KINDS[kind] = kind.__name__.encode(), may_explain, has_prompt
    route, may_explain, has_prompt = known
    if may_explain and request.explain is not UNSET:  # type: ignore[attr-defined]
        request = msgspec.structs.replace(request, explain=UNSET)  # changes nothing of a booking
    if has_prompt:
        request = packed(request)  # type: ignore[type-var]
    return xxhash.xxh3_128_digest(route + in_order(request) + unknown)
