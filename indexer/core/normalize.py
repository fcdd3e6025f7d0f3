"""Decoded events of any engine, translated into the one form the index understands.

`dialects` knows the shapes on the wire; `wire` and `pieces` decode messages whole or piecewise and
pass the events here, one by one, to become a `BlockStored`, a `BadEvent` and so on.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

from msgspec import UNSET, Raw, UnsetType

from indexer.core.dialects import (
    ANY,
    ARRAY,
    ARRAY_TAG,
    MAP,
    MAP_TAG,
    MIXED,
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
    AllBlocksCleared,
    BadEvent,
    BlockRemoved,
    BlockStored,
    Event,
    Ignored,
)
from indexer.core.extra_keys import ExtraKeys
from indexer.types import U64_MASK, Tier

if TYPE_CHECKING:
    from collections.abc import Iterable

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
"""Medium names in upper case; an absent name is the device."""

_DEVICE: Final = Tier.DEVICE  # accessing a member of an enum costs two look-ups
_HASH_TAIL: Final = 8  # a digest and its 64-bit form agree in the last 8 bytes, big-endian
OTHER_PAIRING: Final = "eagle_mismatch"
"""Why a store event cannot be read that tells of pairs of tokens where single ones are expected, or
the other way round."""

_TAGS: Final = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared", "Ignored"})

REMOVALS: Final = (MapRemoved, ArrayRemoved)
_CLEARS: Final = (MapCleared, ArrayCleared)

# What msgspec raises on hostile bytes: DecodeError and UnicodeDecodeError are ValueErrors, ten
# thousand nested arrays cause a RecursionError, a 64-bit overflow an OverflowError.
UNREADABLE: Final = (ValueError, TypeError, RecursionError, OverflowError, MemoryError)


def form_of(data: bytes | Raw) -> str | None:
    """Return array or map, judged by the first byte."""
    first = memoryview(data)[0]
    if first & 0xF0 == 0x90 or first in (0xDC, 0xDD):
        return ARRAY
    if first & 0xF0 == 0x80 or first in (0xDE, 0xDF):
        return MAP
    return None


def value_of(raw: Raw) -> object:
    """Decode any value; None if it is unreadable."""
    try:
        value: object = ANY.decode(raw)
    except UNREADABLE:
        return None
    return value


def number_of(raw: Raw) -> float | None:
    """Decode a number; None if it is something else."""
    value = value_of(raw)
    return float(value) if type(value) in (int, float) else None  # type: ignore[arg-type]


def rank_of(value: object) -> int | None:
    """Return a rank, or None if the value is not one."""
    # negative numbers and text are not ranks
    return value if type(value) is int and value >= 0 else None


def read_event(raw: Raw, *, bigram: bool) -> Event:
    """Decode a single event in any form; a `BadEvent` if it is unreadable."""
    form = form_of(raw)
    if form is None:
        return BadEvent("malformed")
    with suppress(*UNREADABLE):
        return normal_event(TYPED_EVENT[form, bigram].decode(raw))
    why = why_unreadable(raw, form)
    if why == "malformed":
        with suppress(*UNREADABLE):
            normal_event(TYPED_EVENT[form, not bigram].decode(raw))
            why = OTHER_PAIRING
    return BadEvent(why)


def wire_event(raw: Raw, *, bigram: bool) -> WireEvent | BadEvent:
    """Decode a single event, but do not normalise it yet: it may be joined with others."""
    event = read_event(raw, bigram=bigram)
    if isinstance(event, BadEvent):
        return event
    return TYPED_EVENT[form_of(raw) or MAP, bigram].decode(raw)


def why_unreadable(raw: Raw, form: str) -> str:
    """Return the reason for a `BadEvent`; the caller finds out whether it is `OTHER_PAIRING`."""
    try:
        tag = ARRAY_TAG.decode(raw).tag if form == ARRAY else MAP_TAG.decode(raw).type
    except UNREADABLE:
        return "malformed"
    return "malformed" if tag in _TAGS else "unknown_tag"


def form_of_events(forms: set[str | None], usual: str) -> str:
    """Return the form of a batch, given those of its events; `usual` if it has none."""
    if not forms:
        return usual
    known = forms - {None}
    return (known.pop() or MIXED) if len(known) == 1 else MIXED


# -- whole events ----------------------------------------------------------------------------------


def normal_events(events: Iterable[WireEvent | BadEvent]) -> list[Event]:
    """Normalise every event, joining adjacent removals: their effect is the same.

    Raises:
        ValueError: as `normal_event`.
    """
    normal: list[Event] = []
    last: MapRemoved | ArrayRemoved | None = None
    joined = 0
    for event in events:
        removal = event if isinstance(event, REMOVALS) and event.block_hashes else None
        if removal is not None and last is not None and goes_on(last, removal):
            last.block_hashes += removal.block_hashes
            joined += 1
            continue
        if last is not None:
            normal.append(_removed(last, joined))
        if removal is None:
            normal.append(normal_event(event))
        last, joined = removal, 1
    if last is not None:
        normal.append(_removed(last, joined))
    return normal


def goes_on(last: MapRemoved | ArrayRemoved, event: MapRemoved | ArrayRemoved) -> bool:
    """Whether a removal can be joined with the one right before it."""
    return (
        type(last) is type(event)
        and last.medium == event.medium
        and last.group_idx == event.group_idx
        and last.locality == event.locality
        and len(last.block_hashes) < JOINED_BLOCKS_MAX
    )


def normal_event(event: WireEvent | BadEvent) -> Event:
    """Normalise one event.

    Raises:
        ValueError: the event is malformed. Likewise TypeError and OverflowError.
    """
    if isinstance(event, MapStored | ArrayStored):
        return _stored(event)
    if isinstance(event, REMOVALS):
        return _removed(event, 1)
    if isinstance(event, _CLEARS):
        return AllBlocksCleared()
    return event if isinstance(event, BadEvent) else Ignored()


def _removed(event: MapRemoved | ArrayRemoved, joined: int) -> BlockRemoved:
    return BlockRemoved(
        block_hashes=unsigned(event.block_hashes),
        tier=_tier(event.medium),
        group=_group(event.group_idx),
        is_remote=_is_remote(event.locality),
        events=joined,
    )


def _has_extra_keys(event: ArrayStored | MapStored) -> bool:
    keys = event.extra_keys
    if not keys:
        return False
    # plain text has [nil, nil, ...]: no closer look needed, unless the count is wrong
    return any(keys) or len(keys) != len(event.block_hashes)


def _stored(event: ArrayStored | MapStored) -> BlockStored:
    if event.block_size < 0:
        raise ValueError("negative block size")
    name: str | dict[str, object] = event.lora_name or ""
    salt = event.cache_salt or ""
    if not isinstance(name, str):
        salt = _text(name.get("cache_salt"))
        name = ""
    parent, extra_keys = event.parent_block_hash, None
    if _has_extra_keys(event) or event.mm_keys or event.block_mm_infos:
        extra_keys = ExtraKeys(
            len(event.block_hashes),
            event.extra_keys,
            event.mm_keys,
            event.block_mm_infos,
            lora_name=name,
            is_root=parent is None,
            has_bare_media=event.has_bare_media,
        )
        salt = extra_keys.salt or salt
    return BlockStored(
        block_hashes=unsigned(event.block_hashes),
        parent=None if parent is None else _hash(parent),
        token_ids=event.token_ids,
        block_size=event.block_size,
        tier=_tier(event.medium),
        lora_name=name,
        has_nameless_adapter=event.lora_id is not None and not name,
        cache_salt=salt,
        mm_hashes=extra_keys.media if extra_keys else None,
        opaque=extra_keys.opaque if extra_keys else None,
        group=_group(event.group_idx),
        attention=event.kv_cache_spec_kind,
        window=event.kv_cache_spec_sliding_window,
        is_remote=_is_remote(event.locality),
    )


def _tier(medium: str | None) -> Tier | None:
    if medium is None or medium == "GPU":
        return _DEVICE
    tier = MEDIA.get(medium)
    return MEDIA.get(medium.upper()) if tier is None else tier


def _is_remote(locality: str | None) -> bool:
    return locality is not None and locality.upper() == "REMOTE"


def _group(group_idx: int | UnsetType | None) -> int:
    if group_idx is None or group_idx is UNSET or group_idx == 0:
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


def unsigned(values: list[EngineHash]) -> list[int]:
    """Return block names as unsigned 64-bit numbers.

    Raises:
        ValueError: one of them is an empty digest.
    """
    try:
        # unsigned numbers, which nearly every engine sends, are returned as they are
        if not values or min(values) >= 0:  # type: ignore[operator]
            return values  # type: ignore[return-value]
    except TypeError:  # digests, or a mixture
        pass
    return [_hash(value) for value in values]
