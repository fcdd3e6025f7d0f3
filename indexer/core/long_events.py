"""One event with very many values: its long lists are decoded piecewise, and kept packed.

`pieces` finds the lists and hands over the event without them. Names and tokens become arrays,
extra keys become `packed` lists, so that no single step of creating, holding or freeing them takes
long.
"""

from __future__ import annotations

from array import array
from collections.abc import Generator
from typing import TYPE_CHECKING, Final, TypeVar

from msgspec import structs
from msgspec.msgpack import Decoder

from indexer.core.dialects import ArrayRemoved, ArrayStored, EngineHash, MapRemoved, MapStored
from indexer.core.events import JOINED_BLOCKS_MAX, BlockRemoved, BlockStored, Event
from indexer.core.extra_keys import ExtraKeys
from indexer.core.normalize import REMOVALS, normal_event, unsigned
from indexer.core.packed import PackedBytes, PackedLists, PackedPairs
from indexer.core.plain_walk import container
from indexer.types import U64_MASK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from indexer.core.dialects import WireEvent
    from indexer.core.events import Names

T = TypeVar("T")
BlockKey = list[object] | dict[str, object] | None
Steps = Generator[None, None, T]
"""Resumable work that yields between its steps."""

ELEMENTS_PER_STEP: Final = {
    "block_hashes": 1.0,
    "token_ids": 1.0,  # nosec B105 - tokens of a prompt, no secret
    "extra_keys": 1 / 16,  # the keys of a block cost as much as sixteen tokens
    "mm_keys": 1 / 16,
    "block_mm_infos": 1 / 16,
}
"""Elements of each list that are decoded at once, relative to the values of a piece."""

LISTS: Final = frozenset(ELEMENTS_PER_STEP)
"""The fields whose lists make an event long."""

ANYTHING: Final = frozenset({"lora_id", "lora_name"})
"""Fields that may be a container, but never a long one from an engine: decoded in one go."""

_ARRAY_FIELDS: Final = {
    "BlockStored": ("type", *ArrayStored.__struct_fields__),
    "BlockRemoved": ("type", *ArrayRemoved.__struct_fields__),
}
_MAP_FIELDS: Final = ("type", *MapStored.__struct_fields__, *MapRemoved.__struct_fields__)
_FIELD_BYTES_MAX: Final = max(map(len, _MAP_FIELDS))

_TEXT: Final = Decoder(str)
_HASHES: Final = Decoder(list[EngineHash])
_TOKENS: Final = Decoder(list[int])
_PAIRS: Final = Decoder(list[tuple[int, int]])
_KEYS: Final[dict[str, Decoder[list[BlockKey]]]] = {
    "extra_keys": Decoder(list[list[object] | None]),
    "mm_keys": Decoder(list[list[object] | None]),
    "block_mm_infos": Decoder(list[dict[str, object] | None]),
}


def list_head(payload: bytes, at: int) -> tuple[int, int]:
    """Length of a list, and the offset of its first element.

    Raises:
        ValueError: it is not a list.
    """
    count, inner, is_map = container(payload, at)
    if is_map:
        raise ValueError("a map where a list should be")
    return count, inner


def known_field(
    payload: bytes, at: int, end: int, names: tuple[str, ...] = _MAP_FIELDS
) -> str | None:
    """The field name at a place of a payload; "" if it is not among `names`, None if not text."""
    code = payload[at]
    if not (0xA0 <= code < 0xC0 or 0xD9 <= code <= 0xDB):
        return None
    head = 1 if code < 0xC0 else 1 + (1 << (code - 0xD9))
    if end - at - head > _FIELD_BYTES_MAX:  # unknown, and perhaps long
        return ""
    name = payload[at + head : end].decode("latin-1")
    return name if name in names else ""


def fields_of(tag: bytes) -> tuple[str, ...]:
    """Field names by position of a positional event with this tag, given as encoded."""
    try:
        return _ARRAY_FIELDS.get(_TEXT.decode(tag), ())
    except ValueError:
        return ()


class Ranges:
    """Where in a payload a long list is, and where it can be cut.

    Attributes:
        count: Number of elements according to its header.
        is_overruled: Whether the event has another, later list of the same name.
        ends: Offsets in the payload: the start of the first piece, then the end of each piece.
    """

    __slots__ = ("_numbers", "_payload", "count", "ends", "is_overruled")

    def __init__(self, payload: bytes, at: int) -> None:
        self._payload = payload
        self.count, first = list_head(payload, at)
        self.is_overruled = False
        self.ends = array("Q", [first])
        self._numbers = array("Q", [0])  # elements before each of these

    def __len__(self) -> int:
        return self.count

    def add(self, number: int, at: int, step: int, bytes_max: int) -> bool:
        """Cut here, after `number` elements, if the piece is long enough."""
        is_time = (
            number == self.count
            or number - self._numbers[-1] >= step
            or at - self.ends[-1] >= bytes_max
        )
        if is_time:
            self._numbers.append(number)
            self.ends.append(at)
        return is_time

    def pieces(self, decoder: Decoder[list[T]]) -> Iterator[list[T]]:
        """Decode the list piece by piece."""
        for at in range(1, len(self.ends)):
            number = self._numbers[at] - self._numbers[at - 1]
            head = b"\xdd" + number.to_bytes(4, "big")
            yield decoder.decode(head + self._payload[self.ends[at - 1] : self.ends[at]])


class LongRemoval:
    """Removed blocks, from one event or several adjacent ones."""

    __slots__ = ("_base", "_events", "_names", "wire")

    def __init__(self, wire: MapRemoved | ArrayRemoved, names: array[int] | None = None) -> None:
        self.wire = wire
        self._base = normal_event(wire)
        self._names = array("Q") if names is None else names
        self._events = 0 if names is None else 1

    def __len__(self) -> int:
        return len(self._names)

    def add(self, event: MapRemoved | ArrayRemoved) -> None:
        """Append a short event."""
        self._names.extend(_packed(event.block_hashes))
        self._events += 1

    def take(self, other: LongRemoval) -> None:
        """Append a long one."""
        self._names.extend(other._names)
        self._events += other._events

    def event(self) -> BlockRemoved:
        """Return the event for the index."""
        assert isinstance(self._base, BlockRemoved)
        return structs.replace(self._base, block_hashes=_as_names(self._names), events=self._events)


def fill(
    wire: WireEvent, lists: list[tuple[str, Ranges]], values: int, *, bigram: bool
) -> Steps[Event | LongRemoval]:
    """Decode the long lists of an event that its kind uses.

    Raises:
        ValueError: The event is malformed. Likewise TypeError, OverflowError and the like.
    """
    if isinstance(wire, REMOVALS):
        names = yield from _read_last("block_hashes", lists, _read_names)
        return LongRemoval(wire, _packed(wire.block_hashes) if names is None else names)
    if not isinstance(wire, MapStored | ArrayStored):
        return normal_event(wire)
    return (yield from _fill_store(wire, lists, values, bigram=bigram))


def _fill_store(
    wire: MapStored | ArrayStored,
    lists: list[tuple[str, Ranges]],
    values: int,
    *,
    bigram: bool,
) -> Steps[Event]:
    names = yield from _read_last("block_hashes", lists, _read_names)
    read_tokens = _read_pairs if bigram else _read_tokens
    tokens = yield from _read_last("token_ids", lists, read_tokens)
    blocks = len(wire.block_hashes if names is None else names)
    keys = yield from _keys_of(wire, lists)
    stored = normal_event(wire)
    assert isinstance(stored, BlockStored)
    if names is not None:
        stored = structs.replace(stored, block_hashes=_as_names(names))
    if tokens is not None:
        stored = structs.replace(stored, token_ids=tokens)
    if keys:
        stored = yield from _colour(stored, wire, blocks, keys, values)
    return stored


def _keys_of(
    wire: MapStored | ArrayStored, lists: list[tuple[str, Ranges]]
) -> Steps[dict[str, Ranges | list[BlockKey]]]:
    """Take the per-block extra keys out of an event."""
    keys: dict[str, Ranges | list[BlockKey]] = {}
    for name, decoder in _KEYS.items():
        short = getattr(wire, name, None)
        long = [ranges for other, ranges in lists if other == name]
        for ranges in long:
            if ranges.is_overruled or ranges is not long[-1]:  # unused, but it must be well-formed
                for _ in ranges.pieces(decoder):
                    yield
        if long and not long[-1].is_overruled:
            keys[name] = long[-1]
        elif short:
            keys[name] = short
        if short is not None:
            setattr(wire, name, None)
    return keys


def _read_last(
    name: str, lists: list[tuple[str, Ranges]], read: Callable[[Ranges], Steps[T]]
) -> Steps[T | None]:
    """Decode all lists of a name; the last one counts, unless it is overruled."""
    found = None
    for other, ranges in lists:
        if other == name:
            value = yield from read(ranges)
            if not ranges.is_overruled:
                found = value
    return found


def _read_names(ranges: Ranges) -> Steps[array[int]]:
    names = array("Q")
    for piece in ranges.pieces(_HASHES):
        names.extend(_packed(piece))
        yield
    return names


def _read_tokens(ranges: Ranges) -> Steps[memoryview[int]]:
    """32-bit tokens; 64-bit if one is larger, which `writer` then notices and refuses."""
    tokens = array("I")
    try:
        for piece in ranges.pieces(_TOKENS):
            tokens.fromlist(piece)
            yield
    except OverflowError:
        tokens = array("Q")
        for piece in ranges.pieces(_TOKENS):
            tokens.fromlist([token & U64_MASK for token in piece])
            yield
    return memoryview(tokens)


def _read_pairs(ranges: Ranges) -> Steps[PackedPairs]:
    numbers = array("Q")
    for piece in ranges.pieces(_PAIRS):
        numbers.fromlist([number & U64_MASK for pair in piece for number in pair])
        yield
    return PackedPairs(numbers)


def _packed(hashes: list[EngineHash]) -> array[int]:
    return array("Q", unsigned(hashes))


def _as_names(names: array[int]) -> Names:
    """As a list, if short enough to be written in one go."""
    return names.tolist() if len(names) <= JOINED_BLOCKS_MAX else memoryview(names)


def _colour(
    stored: BlockStored,
    wire: MapStored | ArrayStored,
    blocks: int,
    sources: dict[str, Ranges | list[BlockKey]],
    values: int,
) -> Steps[BlockStored]:
    """Read the extra keys of the blocks, some of them at a time."""
    for source in sources.values():
        if len(source) != blocks:
            msg = f"{len(source)} entries for {blocks} blocks"
            raise ValueError(msg)
    step = max(1, int(values * ELEMENTS_PER_STEP["extra_keys"]))
    pieces = {name: _pieces(source, _KEYS[name], step) for name, source in sources.items()}
    ready: dict[str, Sequence[BlockKey]] = dict.fromkeys(sources, ())
    media, opaque, salt, at = PackedLists(), PackedBytes(), "", 0
    while at < blocks:
        for name, piece in ready.items():
            if not piece:
                ready[name] = next(pieces[name])
                yield
        count = min(len(piece) for piece in ready.values())
        keys = {name: piece[:count] for name, piece in ready.items()}
        extra_keys = ExtraKeys(
            count,
            *map(keys.get, _KEYS),  # type: ignore[arg-type] # as their decoders made them
            lora_name=stored.lora_name,
            is_root=wire.parent_block_hash is None and not at,
            has_bare_media=wire.has_bare_media,
        )
        salt = salt or extra_keys.salt
        found = extra_keys.media
        if found is None:
            media.extend_empty(count)
        else:
            media.extend(found)
        for block, data in sorted((extra_keys.opaque or {}).items()):
            opaque.add(at + block, data)
        ready = {name: piece[count:] for name, piece in ready.items()}
        at += count
    is_short = blocks <= JOINED_BLOCKS_MAX  # and goes to the index as it is
    return structs.replace(
        stored,
        cache_salt=salt or stored.cache_salt,
        mm_hashes=(media[0:blocks] if is_short else media) if media.has_values else None,
        opaque=(dict(opaque) if is_short else opaque) if opaque else None,
    )


def _pieces(
    source: Ranges | list[BlockKey], decoder: Decoder[list[BlockKey]], step: int
) -> Iterator[list[BlockKey]]:
    if isinstance(source, Ranges):
        yield from source.pieces(decoder)
        return
    for at in range(0, len(source), step):
        yield source[at : at + step]
