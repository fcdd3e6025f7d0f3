"""Bodies to bytes and answers to types: MessagePack with packed numbers, or JSON.

`attempts.py` encodes with it, `session.py` and `booking_kinds.py` decode.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import msgspec
from msgspec import UNSET, Struct, UnsetType

from indexer.core.packing import pack_tokens, pack_u64, unpack_i64, unpack_tokens
from select_service.client.core.problems import NotAnAnswer
from select_service.types import Selection

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from select_service.client.core.exchange import ExchangeOutcome

T = TypeVar("T")

JSON: Final = "application/json"
MSGPACK: Final = "application/msgpack"
ACCEPT: Final = f"{MSGPACK}, {JSON};q=0.5"
_TOKENS: Final = "token_ids"
_HASHES: Final = ("block_hashes", "sequence_hashes")
LISTS: Final = (_TOKENS, *_HASHES)
"""Members of a prompt that may be long."""
_MEDIA: Final = "mm_routing_info"
_AROUND_MEDIA: Final = "routing_token_ids"
_to_msgpack: Final = msgspec.msgpack.Encoder().encode
_to_json: Final = msgspec.json.Encoder().encode


class CatalogWorker(Struct, frozen=True):
    """The fields of a worker's record that degraded choices and local hashing need."""

    worker_id: int
    model_name: str
    tenant_id: str
    lifecycle: str
    endpoint: str | None = None
    block_size: int | None = None
    data_parallel_start_rank: int | None = None
    data_parallel_size: int | None = None
    is_eagle: bool | None = None
    taints: list[str] = []
    role: str | UnsetType = UNSET


def packed(
    token_ids: Sequence[int] | bytes | None,
    block_hashes: Sequence[int] | bytes | None,
    sequence_hashes: Sequence[int] | bytes | None,
) -> dict[str, object]:
    """Return the given parts of a prompt as packed little-endian numbers.

    Raises:
        ValueError: a token or hash is invalid.
    """
    body: dict[str, object] = {}
    if token_ids is not None:
        body[_TOKENS] = token_ids if isinstance(token_ids, bytes) else pack_tokens(token_ids)
    for name, hashes in zip(_HASHES, (block_hashes, sequence_hashes), strict=True):
        if hashes is not None:
            body[name] = hashes if isinstance(hashes, bytes) else pack_u64(hashes)
    return body


def packed_prompt(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of a prompt with its long lists packed.

    Raises:
        ValueError: a token or hash is invalid.
    """
    lists = packed(*(body.get(name) for name in LISTS))
    media = body.get(_MEDIA)
    if media is not None and not isinstance(media[_AROUND_MEDIA], bytes):
        lists[_MEDIA] = {**media, _AROUND_MEDIA: pack_tokens(media[_AROUND_MEDIA])}
    return {**body, **lists}


def encode(body: Mapping[str, object] | None, *, json_only: bool) -> tuple[bytes, str]:
    """Return an encoded body and its Content-Type."""
    if body is None:
        return b"", ""
    if json_only:
        return _to_json(to_jsonable(body)), JSON
    return _to_msgpack(body), MSGPACK


def to_jsonable(body: Mapping[str, object]) -> dict[str, object]:
    """Return a body with packed numbers replaced by lists."""
    plain = dict(body)
    tokens = plain.get(_TOKENS)
    if isinstance(tokens, bytes):
        plain[_TOKENS] = unpack_tokens(tokens)
    for name in _HASHES:
        hashes = plain.get(name)
        if isinstance(hashes, bytes):
            plain[name] = unpack_i64(hashes)
    media = plain.get(_MEDIA)
    if isinstance(media, dict) and isinstance(media.get(_AROUND_MEDIA), bytes):
        plain[_MEDIA] = {**media, _AROUND_MEDIA: unpack_tokens(media[_AROUND_MEDIA])}
    items = plain.get("requests")  # items of a batch selection
    if isinstance(items, list):
        plain["requests"] = [to_jsonable(one) for one in items]
    return plain


@cache
def _decoders(kind: Any) -> tuple[Any, Any]:
    return (
        msgspec.msgpack.Decoder(_packed_form(kind)).decode,
        msgspec.json.Decoder(kind).decode,
    )


def decode(outcome: ExchangeOutcome, kind: type[T]) -> T:
    """Decode the body of an answer.

    Raises:
        NotAnAnswer: the answer is not a selection service's.
    """
    from_msgpack, from_json = _decoders(cast("Any", kind))
    try:
        if outcome.content_type.startswith(MSGPACK):
            found: Any = from_msgpack(outcome.body)
        else:
            found = from_json(outcome.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotAnAnswer(f"status {outcome.status} with a body that is none: {error}") from None
    if kind is Selection and isinstance(found.sequence_hashes, bytes):
        found.sequence_hashes = unpack_i64(found.sequence_hashes)
    return cast("T", found)


def _packed_form(kind: Any) -> Any:
    """Return a variant of the type whose long list of hashes may be binary, if it has one."""
    if kind is not Selection:
        return kind
    hashes = ("sequence_hashes", bytes | list[int] | UnsetType, UNSET)
    return msgspec.defstruct(kind.__name__, [hashes], bases=(kind,), kw_only=True)
