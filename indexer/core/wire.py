"""Payload bytes to `EventBatch`: every dialect, decoded event by event where it matters.

A batch in the stream's usual dialect is decoded in one typed call; whatever that call refuses is
decoded again event by event, so that one bad event costs itself only (R4). What events *mean*
for the index is decided in `writer`; sequence numbers and frames are `stream`'s.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

from msgspec import Raw
from xxhash import xxh3_64, xxh3_64_intdigest

from indexer.compiled import usable
from indexer.core.colours import Colours
from indexer.core.dialects import (
    ANY,
    ARRAY,
    ARRAY_TAG,
    LOOSE_MAP,
    MAP,
    MAP_TAG,
    MIXED,
    NIL,
    RAW_LIST,
    TYPED,
    TYPED_EVENT,
    ArrayCleared,
    ArrayRemoved,
    ArrayStored,
    EngineHash,
    MapCleared,
    MapRemoved,
    MapStored,
    WireEvent,
)
from indexer.core.events import (
    JOINED_BLOCKS_MAX,
    READ_AT_ONCE_BYTES,
    AllBlocksCleared,
    BadEvent,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    Ignored,
)
from indexer.types import U64_MASK, Tier

if usable("indexer._ingest", 4):
    from indexer._ingest import LongBatch, decode_plain
else:
    LongBatch = None  # type: ignore[assignment,misc]

    def decode_plain(payload: bytes, form: str) -> EventBatch | None:
        """Leave it to the decoders below: the twin of a reader of what is plain."""
        del payload, form
        return None


if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MEDIA", "UNREADABLE", "BatchDecoder", "LongBatch", "decode_plain"]

MEDIA: Final = {
    "GPU": Tier.DEVICE,
    "DEVICE": Tier.DEVICE,
    "CPU": Tier.HOST_PINNED,
    "CPU_PINNED": Tier.HOST_PINNED,
    "CPU_TIER1": Tier.HOST_PINNED,
    "STORAGE": Tier.DISK,
    "FS": Tier.DISK,
    "OBJ": Tier.DISK,
    "DISK": Tier.DISK,
    "NVME": Tier.DISK,
    "CPU_TIER2": Tier.DISK,
    "EXTERNAL": Tier.EXTERNAL,
    "NETWORK": Tier.EXTERNAL,
    "REMOTE": Tier.EXTERNAL,
    "SHARED": Tier.EXTERNAL,
}
"""Names of media in upper case (events section 9); no name at all is the device."""

_DEVICE: Final = Tier.DEVICE  # the member of an enum costs two look-ups
_HASH_TAIL: Final = 8  # a digest and its 64-bit form meet in the last 8 bytes, big-endian
_TAGS: Final = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared", "Ignored"})

_REMOVALS: Final = (MapRemoved, ArrayRemoved)
_CLEARS: Final = (MapCleared, ArrayCleared)

# What msgspec raises on hostile bytes: DecodeError and UnicodeDecodeError are ValueErrors, ten
# thousand nested arrays are a RecursionError, a 64-bit overflow an OverflowError.
UNREADABLE: Final = (ValueError, TypeError, RecursionError, OverflowError, MemoryError)


READ_VALUES: Final = 1 << 15
"""Values of a long message that are read at once, some 0.15 ms."""

DIGESTED_BYTES: Final = 1 << 18
"""Bytes of it whose digest is taken at once, 0.03 ms."""


class Reading:
    """A long payload that is read in pieces.

    Attributes:
        is_over: Whether nothing is left to be read.
    """

    __slots__ = ("_at", "_batch", "_hasher", "is_over", "payload")

    def __init__(self, payload: bytes, *, is_plain: bool) -> None:
        self.payload = payload
        self.is_over = False
        self._hasher = xxh3_64()
        self._at = 0
        self._batch: LongBatch | None = None
        if is_plain and LongBatch is not None:
            with suppress(MemoryError):  # then as a whole, or not at all
                self._batch = LongBatch(payload)

    def go_on(self) -> bool:
        """Read a piece; return `is_over`."""
        if self._at < len(self.payload):
            piece = memoryview(self.payload)[self._at : self._at + DIGESTED_BYTES]
            self._hasher.update(piece)
            self._at += DIGESTED_BYTES
        if self._batch is None or self._batch.go_on(READ_VALUES):
            self.is_over = self._at >= len(self.payload)
        return self.is_over

    @property
    def digest(self) -> int:
        """XXH3-64 of the payload."""
        return self._hasher.intdigest()

    @property
    def batch(self) -> EventBatch | None:
        """What was read; None if it is not plain."""
        return None if self._batch is None else self._batch.result()


class BatchDecoder:
    """Decodes the payloads of one stream and remembers which dialect it speaks."""

    __slots__ = ("_bigram", "_form", "_reading")

    def __init__(self, *, is_eagle: bool = False) -> None:
        self._bigram = is_eagle
        self._form = MAP  # what current engines speak; a wrong guess costs one failed attempt
        self._reading: Reading | None = None

    def read_ahead(self, payload: bytes) -> bool:
        """Read a piece of a long payload; True when there is no more to be read before `decode`.

        What was read is kept for this very object, until `let_go` or another one is read.
        """
        if len(payload) <= READ_AT_ONCE_BYTES:
            return True
        if self._reading is None or self._reading.payload is not payload:
            self._reading = Reading(payload, is_plain=not self._bigram)
        return self._reading.is_over or self._reading.go_on()

    def let_go(self) -> None:
        """Forget what was read ahead."""
        self._reading = None

    def digest(self, payload: bytes) -> int:
        """XXH3-64 of a payload."""
        reading = self._reading
        if reading is not None and reading.payload is payload and reading.is_over:
            return reading.digest
        return xxh3_64_intdigest(payload)

    def decode(self, payload: bytes) -> EventBatch | None:
        """The batch, or None where there is none to be read. Never raises on any bytes."""
        if not payload:
            return None
        form = self._form
        reading = self._reading
        if reading is not None and reading.payload is payload and reading.is_over:
            batch = reading.batch
            if batch is not None:
                self._form = batch.form
                return batch
        elif not self._bigram:
            plain = decode_plain(payload, form)
            if plain is not None:
                return plain
        try:
            typed = TYPED[form, self._bigram].decode(payload)
            events = _normal_all(typed.events)
        except UNREADABLE:
            return self._decode_loosely(payload)
        return EventBatch(events, typed.ts, _rank(typed.dp_rank), form)

    def _decode_loosely(self, payload: bytes) -> EventBatch | None:
        try:
            ts, raw_events, rank = _loose_batch(payload)
            raws = RAW_LIST.decode(raw_events)
        except UNREADABLE:
            return None
        forms = {_form(raw) for raw in raws} - {None}
        events = [_read_event(raw, bigram=self._bigram) for raw in raws]
        form = MIXED
        if len(forms) == 1:
            form = self._form = forms.pop() or form
        return EventBatch(events, _number(ts), _rank(_value(rank)), form)


def _loose_batch(payload: bytes) -> tuple[Raw, Raw, Raw]:
    """Time, events and rank of a batch that may have any shape an engine ever gave it."""
    if _form(payload) == MAP:
        batch = LOOSE_MAP.decode(payload)
        ranks = (batch.data_parallel_rank, batch.dp_rank, batch.attn_dp_rank)
        return batch.ts, batch.events, next((r for r in ranks if r != NIL), NIL)
    ts, events, *rest = RAW_LIST.decode(payload)
    return ts, events, rest[0] if rest else NIL


def _form(data: bytes | Raw) -> str | None:
    """Array or map, by the first byte."""
    first = memoryview(data)[0]
    if first & 0xF0 == 0x90 or first in (0xDC, 0xDD):  # noqa: PLR2004 - MessagePack's own numbers
        return ARRAY
    if first & 0xF0 == 0x80 or first in (0xDE, 0xDF):  # noqa: PLR2004
        return MAP
    return None


def _value(raw: Raw) -> object:
    try:
        value: object = ANY.decode(raw)
    except UNREADABLE:
        return None
    return value


def _number(raw: Raw) -> float | None:
    value = _value(raw)
    return float(value) if type(value) in (int, float) else None  # type: ignore[arg-type]


def _rank(value: object) -> int | None:
    # a negative rank is nobody's (contract 8.2), neither is one written as text
    return value if type(value) is int and value >= 0 else None


def _read_event(raw: Raw, *, bigram: bool) -> Event:
    form = _form(raw)
    if form is None:
        return BadEvent("malformed")
    try:
        return _normal(TYPED_EVENT[form, bigram].decode(raw))
    except UNREADABLE:
        return BadEvent(_why_unreadable(raw, form))


def _why_unreadable(raw: Raw, form: str) -> str:
    try:
        tag = ARRAY_TAG.decode(raw).tag if form == ARRAY else MAP_TAG.decode(raw).type
    except UNREADABLE:
        return "malformed"
    return "malformed" if tag in _TAGS else "unknown_tag"


# -- one normal form -------------------------------------------------------------------------------


def _normal_all(events: Sequence[WireEvent]) -> list[Event]:
    """Every event in its normal form, removals in a row as one: they say the same together."""
    normal: list[Event] = []
    last: MapRemoved | ArrayRemoved | None = None
    joined = 0
    for event in events:
        if last is None and type(event) is MapStored:
            normal.append(_map_stored(event))
            continue
        if isinstance(event, _REMOVALS) and event.block_hashes:
            if last is not None and _goes_on(last, event):
                last.block_hashes += event.block_hashes
                joined += 1
                continue
            if last is not None:
                normal.append(_removed(last, joined))
            last, joined = event, 1
            continue
        if last is not None:
            normal.append(_removed(last, joined))
            last = None
        normal.append(_normal(event))
    if last is not None:
        normal.append(_removed(last, joined))
    return normal


def _goes_on(last: MapRemoved | ArrayRemoved, event: MapRemoved | ArrayRemoved) -> bool:
    return (
        last.medium == event.medium
        and last.group_idx == event.group_idx
        and last.locality == event.locality
        and len(last.block_hashes) < JOINED_BLOCKS_MAX
    )


def _normal(event: WireEvent) -> Event:
    if isinstance(event, MapStored):
        return _map_stored(event)
    if isinstance(event, ArrayStored):
        return _array_stored(event)
    if isinstance(event, _REMOVALS):
        return _removed(event, 1)
    if isinstance(event, _CLEARS):
        return AllBlocksCleared()
    return Ignored()


def _removed(event: MapRemoved | ArrayRemoved, joined: int) -> BlockRemoved:
    return BlockRemoved(
        block_hashes=_hashes(event.block_hashes),
        tier=_tier(event.medium),
        group=_group(event.group_idx),
        is_remote=_is_remote(event.locality),
        events=joined,
    )


def _map_stored(event: MapStored) -> BlockStored:
    colours = None
    if _has_extra_keys(event) or event.mm_keys or event.block_mm_infos:
        colours = _colours(event, event.lora_name or "")
        if event.mm_keys:
            colours.read_mm_keys(event.mm_keys)
        if event.block_mm_infos:
            colours.read_mm_infos(event.block_mm_infos)
    elif not event.lora_name and not event.cache_salt and event.lora_id is None:
        return _plain(event)
    return _stored(event, event.lora_name or "", event.cache_salt or "", colours)


def _array_stored(event: ArrayStored) -> BlockStored:
    if not event.lora_name and event.lora_id is None and not _has_extra_keys(event):
        return _plain(event)
    name, salt = "", ""
    if isinstance(event.lora_name, dict):
        salt = _text(event.lora_name.get("cache_salt"))
    elif event.lora_name:
        name = event.lora_name
    return _stored(event, name, salt, _colours(event, name) if _has_extra_keys(event) else None)


def _has_extra_keys(event: ArrayStored | MapStored) -> bool:
    keys = event.extra_keys
    if not keys:
        return False
    # plain text has [nil, nil, ...]: not worth a closer look, unless their number is wrong
    return any(keys) or len(keys) != len(event.block_hashes)


def _colours(event: ArrayStored | MapStored, lora_name: str) -> Colours:
    colours = Colours(len(event.block_hashes))
    if event.extra_keys:
        is_root = event.parent_block_hash is None
        colours.read_extra_keys(event.extra_keys, lora_name, is_root=is_root)
    return colours


def _plain(event: ArrayStored | MapStored) -> BlockStored:
    """Plain text without adapter or salt, nearly every event: what has a default keeps it."""
    if event.block_size < 0:
        raise ValueError("negative block size")
    parent, locality = event.parent_block_hash, event.locality
    return BlockStored(
        block_hashes=_hashes(event.block_hashes),
        parent=None if parent is None else _hash(parent),
        token_ids=event.token_ids,
        block_size=event.block_size,
        tier=_tier(event.medium),
        group=_group(event.group_idx),
        attention=event.kv_cache_spec_kind,
        is_remote=locality is not None and _is_remote(locality),
    )


def _stored(
    event: ArrayStored | MapStored, lora_name: str, salt: str, colours: Colours | None
) -> BlockStored:
    if event.block_size < 0:
        raise ValueError("negative block size")
    parent = event.parent_block_hash
    return BlockStored(
        block_hashes=_hashes(event.block_hashes),
        parent=None if parent is None else _hash(parent),
        token_ids=event.token_ids,
        block_size=event.block_size,
        tier=_tier(event.medium),
        lora_name=lora_name,
        has_nameless_adapter=event.lora_id is not None and not lora_name,
        cache_salt=(colours.salt if colours else "") or salt,
        mm_hashes=colours.media if colours else None,
        opaque=colours.opaque if colours else None,
        group=_group(event.group_idx),
        attention=event.kv_cache_spec_kind,
        is_remote=_is_remote(event.locality),
    )


def _tier(medium: str | None) -> Tier | None:
    if medium is None or medium == "GPU":
        return _DEVICE
    tier = MEDIA.get(medium)
    return MEDIA.get(medium.upper()) if tier is None else tier


def _is_remote(locality: str | None) -> bool:
    return locality is not None and locality.upper() == "REMOTE"


def _group(group_idx: int | None) -> int:
    if not group_idx:
        return 0
    if not 0 <= group_idx < 1 << 32:
        raise ValueError("not a group")
    return group_idx


def _text(value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TypeError("not text")
    return value


def _hash(value: EngineHash) -> int:
    if isinstance(value, int):
        return value & U64_MASK
    if not value:
        raise ValueError("an empty digest is not a hash")
    return int.from_bytes(value[-_HASH_TAIL:], "big")


def _hashes(values: list[EngineHash]) -> list[int]:
    try:
        # unsigned numbers, what nearly every engine sends, stay the list they are
        if not values or min(values) >= 0:  # type: ignore[operator]
            return values  # type: ignore[return-value]
    except TypeError:  # digests, or a mixture
        pass
    return [_hash(value) for value in values]
