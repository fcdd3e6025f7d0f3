"""What a worker can tell about its KV cache, in the one form the index understands.

Every dialect of every engine ends here (`wire` translates); nothing here knows bytes or tiers'
spelling. A `BadEvent` keeps the place of one that could not be read, so that it can be counted
in order without costing its neighbours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from msgspec import Struct

if TYPE_CHECKING:
    from array import array
    from collections.abc import Mapping, Sequence

    from indexer.types import Tier

    Names = list[int] | memoryview[int]
    """What blocks are called; of a long event a view."""

JOINED_BLOCKS_MAX: Final = 512
"""Removals in a row are one up to here: as long as the longest store written in one go."""


READ_AT_ONCE_BYTES: Final = 1 << 17
"""Messages up to here, some 1,700 blocks, are read in one go, 0.1 ms; longer ones in pieces."""


class BlockStored(Struct, frozen=True, gc=False, kw_only=True):
    """Consecutive blocks are now on a tier.

    `token_ids` covers all blocks, `block_size` tokens (or pairs of tokens, see `is_bigram`) each.
    """

    kind: ClassVar[str] = "stored"

    block_hashes: Names  # the engine's own, unsigned
    parent: int | None  # its name of the block before the first one; None: start of a sequence
    token_ids: Sequence[int] | Sequence[tuple[int, int]] | array[int] | memoryview[int]
    block_size: int
    tier: Tier | None  # None: a medium nobody knows, credited nowhere
    lora_name: str = ""
    has_nameless_adapter: bool = False
    cache_salt: str = ""
    mm_hashes: Sequence[list[int]] | None = None  # per block; of a long event packed
    opaque: Mapping[int, bytes] | None = (
        None  # block → what else colours it and no request can name
    )
    group: int = 0
    attention: str | None = None  # kv_cache_spec_kind
    is_remote: bool = False

    @property
    def is_placeholder(self) -> bool:
        """An offload connector's "this block is here as well", without tokens."""
        return not self.token_ids and self.block_size == 0


class BlockRemoved(Struct, frozen=True, gc=False, kw_only=True):
    """Blocks have left a tier."""

    kind: ClassVar[str] = "removed"

    block_hashes: Names
    tier: Tier | None
    group: int = 0
    is_remote: bool = False
    events: int = 1  # as many events of the batch, one right after the other, said it


class AllBlocksCleared(Struct, frozen=True, gc=False):
    """The rank holds nothing any more, on any tier."""

    kind: ClassVar[str] = "cleared"


class Ignored(Struct, frozen=True, gc=False):
    """An event that says nothing."""

    kind: ClassVar[str] = "ignored"


class BadEvent(Struct, frozen=True, gc=False):
    """An event that cannot be read."""

    kind: ClassVar[str] = "unreadable"

    reason: str  # unknown_tag | malformed


Event = BlockStored | BlockRemoved | AllBlocksCleared | Ignored | BadEvent


class EventBatch(Struct, frozen=True, gc=False):
    """One message: what happened in one step of an engine, in order."""

    events: Sequence[Event]  # of a long batch they are made when they are asked for
    ts: float | None  # the engine's wall clock, seconds; None: absent or nonsense
    dp_rank: int | None  # what the engine calls itself; None: it does not say
    form: str  # array | map | mixed
