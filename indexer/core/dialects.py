"""The shapes of batches and events on the wire, engine by engine, and their decoders.

Field names and positions are the engines' own; fields not named here are ignored wherever they
appear. `wire` picks a decoder and normalises its result.
"""

from __future__ import annotations

from typing import ClassVar, Final, Generic, TypeVar

from msgspec import UNSET, Raw, Struct, UnsetType
from msgspec.msgpack import Decoder

ARRAY: Final = "array"
MAP: Final = "map"
MIXED: Final = "mixed"

NIL: Final = Raw(b"\xc0")

EngineHash = int | bytes
E = TypeVar("E")


# -- the two shapes of an event on the wire; field names and positions are the engines' ------------


class ArrayStored(Struct, tag="BlockStored", array_like=True, gc=False):
    """Positional BlockStored, vLLM to 0.23 and SGLang to 0.5.19."""

    locality: ClassVar[str | None] = None
    cache_salt: ClassVar[str | None] = None
    mm_keys: ClassVar[list[list[object] | None] | None] = None
    block_mm_infos: ClassVar[list[dict[str, object] | None] | None] = None

    block_hashes: list[EngineHash]
    parent_block_hash: EngineHash | None
    token_ids: list[int]
    block_size: int
    lora_id: object = None
    medium: str | None = None
    lora_name: str | dict[str, object] | None = None  # SGLang 0.5.18 puts {"cache_salt": s} here
    extra_keys: list[list[object] | None] | None = None
    group_idx: int | UnsetType | None = UNSET  # an array that has it, even as nil, is of vLLM 0.20
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None

    @property
    def has_bare_media(self) -> bool:
        """Whether media items are bare identifiers, as from vLLM 0.17 to 0.19, and no lists."""
        return self.group_idx is UNSET


class ArrayRemoved(Struct, tag="BlockRemoved", array_like=True, gc=False):
    """Positional BlockRemoved."""

    locality: ClassVar[str | None] = None

    block_hashes: list[EngineHash]
    medium: str | None = None
    group_idx: int | None = None


class ArrayCleared(Struct, tag="AllBlocksCleared", array_like=True, gc=False):
    """Positional AllBlocksCleared."""


class ArrayIgnored(Struct, tag="Ignored", array_like=True, gc=False):
    """Positional no-op."""


class MapStored(Struct, tag="BlockStored", gc=False):
    """BlockStored as a map: vLLM from 0.24, SGLang from 0.5.20, TensorRT-LLM, Dynamo."""

    block_hashes: list[EngineHash]
    token_ids: list[int]
    block_size: int
    parent_block_hash: EngineHash | None = None
    lora_id: object = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[object] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    cache_salt: str | None = None
    mm_keys: list[list[object] | None] | None = None
    block_mm_infos: list[dict[str, object] | None] | None = None

    has_bare_media: ClassVar[bool] = False


class MapRemoved(Struct, tag="BlockRemoved", gc=False):
    """BlockRemoved as a map."""

    block_hashes: list[EngineHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class MapCleared(Struct, tag="AllBlocksCleared", gc=False):
    """AllBlocksCleared as a map."""


class MapIgnored(Struct, tag="Ignored", gc=False):
    """No-op as a map."""


class ArrayBigram(ArrayStored, tag="BlockStored", array_like=True, gc=False):
    """Positional BlockStored of SGLang's speculative pages, with pairs of tokens."""

    token_ids: list[tuple[int, int]]  # type: ignore[assignment]


class MapBigram(MapStored, tag="BlockStored", gc=False):
    """BlockStored of SGLang's speculative pages as a map."""

    token_ids: list[tuple[int, int]]  # type: ignore[assignment]


ArrayEvent = ArrayStored | ArrayRemoved | ArrayCleared | ArrayIgnored
MapEvent = MapStored | MapRemoved | MapCleared | MapIgnored
ArrayBigramEvent = ArrayBigram | ArrayRemoved | ArrayCleared | ArrayIgnored
MapBigramEvent = MapBigram | MapRemoved | MapCleared | MapIgnored
WireEvent = ArrayEvent | MapEvent


class Batch(Struct, Generic[E], array_like=True, gc=False):
    """A batch of events in one shape."""

    ts: float
    events: list[E]
    dp_rank: int | None = None


class LooseMapBatch(Struct, gc=False):
    """A batch that is itself a map; engines differ in the name of the rank field."""

    events: Raw
    ts: Raw = NIL
    data_parallel_rank: Raw = NIL
    dp_rank: Raw = NIL
    attn_dp_rank: Raw = NIL


class ArrayTag(Struct, array_like=True, gc=False):
    """Only the tag of a positional event."""

    tag: str


class MapTag(Struct, gc=False):
    """Only the tag of a map."""

    type: str


ANY: Final = Decoder()
RAW_LIST: Final = Decoder(list[Raw])
LOOSE_MAP: Final = Decoder(LooseMapBatch)
ARRAY_TAG: Final = Decoder(ArrayTag)
MAP_TAG: Final = Decoder(MapTag)
TYPED: Final[dict[tuple[str, bool], Decoder[Batch[WireEvent]]]] = {
    (ARRAY, False): Decoder(Batch[ArrayEvent]),
    (MAP, False): Decoder(Batch[MapEvent]),
    (ARRAY, True): Decoder(Batch[ArrayBigramEvent]),
    (MAP, True): Decoder(Batch[MapBigramEvent]),
}
TYPED_EVENT: Final[dict[tuple[str, bool], Decoder[WireEvent]]] = {
    (ARRAY, False): Decoder(ArrayEvent),
    (MAP, False): Decoder(MapEvent),
    (ARRAY, True): Decoder(ArrayBigramEvent),
    (MAP, True): Decoder(MapBigramEvent),
}
