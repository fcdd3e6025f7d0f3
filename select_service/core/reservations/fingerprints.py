"""Request fingerprints: 16 bytes of a request's whole content, to recognise its repeats.

A repeated booking gets the first answer (`lifecycle.py`); different content under the same id is
refused.
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
"""Packs a request for its fingerprint: members of objects have no order."""

_KINDS: Final[dict[type, tuple[bytes, bool, bool]]] = {}
"""By request type, of which there are a handful: its name, whether it may ask for an explanation,
and whether it has a prompt. `isinstance` would take 750 instructions."""


def fingerprint_of(request: msgspec.Struct, unknown: bytes) -> bytes:
    """Return 16 bytes that two requests share iff they are the same body on the same route.

    Signed and unsigned spellings of one hash are the same. 1 µs for 128 blocks.

    State directories keep fingerprints, and the next version must compute the same for a repeat: a
    member added to a request from now on must default to UNSET, and is written only if set.

    Args:
        request: as decoded, or built in this process: its lists are already validated.
        unknown: canonical bytes of the unknown members.
    """
    kind = type(request)
    known = _KINDS.get(kind)
    if known is None:
        may_explain, has_prompt = issubclass(kind, SelectRequest), issubclass(kind, PromptFields)
        known = _KINDS[kind] = kind.__name__.encode(), may_explain, has_prompt
    route, may_explain, has_prompt = known
    if may_explain and request.explain is not UNSET:  # type: ignore[attr-defined]
        request = msgspec.structs.replace(request, explain=UNSET)  # does not affect the booking
    if has_prompt:
        request = packed(request)  # type: ignore[type-var]
    return xxhash.xxh3_128_digest(route + in_order(request) + unknown)
