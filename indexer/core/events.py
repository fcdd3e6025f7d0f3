"""What a worker can report about its KV cache, in the one form the index understands.

`wire` translates every dialect of every engine into these events; nothing here knows bytes or the
spelling of tiers. A `BadEvent` takes the place of an unreadable one, so that it is counted in order
and its neighbours still apply.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from msgspec import Struct

if TYPE_CHECKING:
    from array import array
    from collections.abc import Mapping, Sequence
    from typing import Self

    from indexer.types import Tier

    Names = list[int] | memoryview[int]
    """The engine's hashes of blocks; a view if the event is long."""

JOINED_BLOCKS_MAX: Final = 512
"""Consecutive removals are joined up to this many blocks: the longest store written in one go."""


READ_AT_ONCE_BYTES: Final = 1 << 17
"""Messages up to this size, some 1,700 blocks, are decoded at once in 0.1 ms; longer in pieces."""


HEAD_BYTES: Final = 64
"""What is kept of a message that is too long."""


class Oversized(bytes):
    """The head of a message that was refused for its size, in place of the whole.

    Attributes:
        size: Bytes of the whole message.
    """

    size: int

    @classmethod
    def of(cls, head: bytes, size: int) -> Self:
        """Keep the head only."""
        one = cls(head[:HEAD_BYTES])
        one.size = size
        return one


def size_of(frame: bytes) -> int:
    """Bytes of a frame as it was sent."""
    return frame.size if isinstance(frame, Oversized) else len(frame)


class BlockStored(Struct, frozen=True, gc=False, kw_only=True):
    """Consecutive blocks are now on a tier.

    `token_ids` covers all blocks, `block_size` tokens each (or pairs of tokens in speculative
    pages).
    """

    kind: ClassVar[str] = "stored"

    block_hashes: Names  # the engine's own, unsigned
    parent: int | None  # engine hash of the block before the first one; None: start of a sequence
    token_ids: Sequence[int] | Sequence[tuple[int, int]] | array[int] | memoryview[int]
    block_size: int
    tier: Tier | None  # None: unknown medium, credited nowhere
    lora_name: str = ""
    has_nameless_adapter: bool = False
    cache_salt: str = ""
    mm_hashes: Sequence[list[int]] | None = None  # per block; packed if the event is long
    opaque: Mapping[int, bytes] | None = None
    """By block, what else it depends on and no request can name."""
    group: int = 0
    attention: str | None = None  # kv_cache_spec_kind
    window: int | None = None  # kv_cache_spec_sliding_window, in tokens
    is_remote: bool = False

    @property
    def is_placeholder(self) -> bool:
        """An offload connector's "this block is here as well", without tokens."""
        return not self.token_ids and self.block_size == 0

    @property
    def is_whole(self) -> bool:
        """Whether all blocks of its tokens are named; windows and states may keep only some."""
        return len(self.token_ids) == len(self.block_hashes) * self.block_size


class BlockRemoved(Struct, frozen=True, gc=False, kw_only=True):
    """Blocks have left a tier."""

    kind: ClassVar[str] = "removed"

    block_hashes: Names
    tier: Tier | None
    group: int = 0
    is_remote: bool = False
    events: int = 1  # adjacent events of the batch that were joined into this one


class AllBlocksCleared(Struct, frozen=True, gc=False):
    """The rank no longer holds anything, on any tier."""

    kind: ClassVar[str] = "cleared"


class Ignored(Struct, frozen=True, gc=False):
    """An event without effect."""

    kind: ClassVar[str] = "ignored"


class BadEvent(Struct, frozen=True, gc=False):
    """An event that cannot be read."""

    kind: ClassVar[str] = "unreadable"

    reason: str  # unknown_tag | malformed


Event = BlockStored | BlockRemoved | AllBlocksCleared | Ignored | BadEvent


class EventBatch(Struct, frozen=True, gc=False):
    """One message: the events of one engine step, in order."""

    events: Sequence[Event]  # those of a long batch are created lazily
    ts: float | None  # the engine's wall clock, seconds; None: absent or nonsense
    dp_rank: int | None  # the rank the engine reports for itself; None: not reported
    form: str  # array | map | mixed
