"""Request fingerprints: 16 bytes of a request's whole content, to recognise its repeats.

A repeated booking gets the first answer (`lifecycle.py`); different content under the same id is
refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
import xxhash
from msgspec import UNSET

from indexer.compiled import usable
from indexer.core.hashing import pack_tokens, pack_u64, unpack_tokens
from select_service.types import PromptFields, SelectRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    P = TypeVar("P", bound=PromptFields)

if usable("select_service._speed", 8):
    from select_service._speed import msgpack_tokens as _msgpack_tokens

    msgpack_tokens: Callable[[bytes], bytes] | None = _msgpack_tokens
else:
    msgpack_tokens = None

__all__ = ["fingerprint_of", "in_order", "packed"]

_AS_THEY_ARE: Final = frozenset({bytes, type(None)})

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
    if has_prompt and not (  # the form in which the codec delivers nearly all
        request.mm_routing_info is None  # type: ignore[attr-defined]
        and type(request.sequence_hashes) in _AS_THEY_ARE  # type: ignore[attr-defined]
        and type(request.block_hashes) in _AS_THEY_ARE  # type: ignore[attr-defined]
        and type(request.token_ids) in _AS_THEY_ARE  # type: ignore[attr-defined]
    ):
        request = packed(request)  # type: ignore[type-var]
    return xxhash.xxh3_128_digest(route + in_order(request) + unknown)


def packed(request: P) -> P:
    """Return the request with its long lists packed, as the codec delivers them: one form for all.

    Exception: token lists with media stay lists, as they were before packing was introduced,
    because fingerprints, the use of this function, outlive the process. The lists must have been
    validated, as `read_prompt` does.
    """
    media = request.mm_routing_info
    if media is not None and type(media.routing_token_ids) is not list:
        tokens = _listed(media.routing_token_ids)
        media = msgspec.structs.replace(media, routing_token_ids=tokens)
        request = msgspec.structs.replace(request, mm_routing_info=media)
    return msgspec.structs.replace(
        request,
        token_ids=_pack_unless(request.token_ids, pack_tokens),
        block_hashes=_pack_unless(request.block_hashes, pack_u64),
        sequence_hashes=_pack_unless(request.sequence_hashes, pack_u64),
    )


def _listed(tokens: Sequence[int] | bytes) -> list[int] | msgspec.Raw:
    """Return tokens as a list, or its encoded equivalent."""
    if not isinstance(tokens, bytes):
        return [int(one) for one in tokens]
    return unpack_tokens(tokens) if msgpack_tokens is None else msgspec.Raw(msgpack_tokens(tokens))


def _pack_unless(
    values: list[int] | bytes | None, pack: Callable[[list[int]], bytes]
) -> bytes | None:
    return values if values is None or isinstance(values, bytes) else pack(values)
