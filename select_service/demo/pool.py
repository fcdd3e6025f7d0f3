"""The KV block pool of one simulated engine: prefix cache, reference counts, eviction, events.

It behaves as vLLM's pool does where a consumer of its events can tell: blocks are named by a hash
chain, a prompt never hits its own last token, two requests that compute one block at the same time
both cache it, free blocks stay cached until the least recently used one is taken for something new.
Pure: no clock, no socket; `engine.py` drives it, `encoding.py` puts its events on the wire.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "BlockPool",
    "Cleared",
    "PoolEvent",
    "Removed",
    "RequestOpen",
    "RequestTooLarge",
    "Stored",
]


class RequestOpen(ValueError):
    """(request id): a request of this name is running."""


class RequestTooLarge(ValueError):
    """(request id, blocks needed, blocks of the pool)."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Consecutive blocks became reusable; `parent` is the hash before the first, None at a root."""

    hashes: tuple[int, ...]
    parent: int | None
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Removed:
    """One copy of each of these blocks left the cache."""

    hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cleared:
    """The whole cache was dropped."""


PoolEvent = Stored | Removed | Cleared


@dataclass(slots=True, eq=False)
class _Block:
    index: int
    block_hash: int | None = None  # None: its content is not reusable
    references: int = 0


@dataclass(slots=True, eq=False)
class _Sequence:
    token_ids: list[int]
    hashes: list[int]  # of the whole blocks of `token_ids`
    digest: bytes  # of the last whole block, the parent of the next
    blocks: list[_Block]
    cached_blocks: int  # leading blocks whose content is in the cache under this sequence
    promised: int  # blocks this request may still take; kept free for it


class BlockPool:
    """A pool of `capacity` blocks of `block_size` tokens, shared by the requests of one engine.

    Admission is preemption-free: `open` promises a request every block it can ever need, so a
    running request is never pushed out. `hash_seed` colours the hashes, as each start of a real
    engine may.
    """

    def __init__(self, capacity: int, block_size: int, *, hash_seed: int = 0) -> None:
        if capacity < 1 or block_size < 1:
            raise ValueError("a pool needs at least one block of at least one token")
        self.capacity = capacity
        self.block_size = block_size
        self.evictions = 0
        self._root = hashlib.sha256(hash_seed.to_bytes(8, "little", signed=True)).digest()
        # insertion order is eviction order: never used first, then least recently freed
        self._free: OrderedDict[int, _Block] = OrderedDict((i, _Block(i)) for i in range(capacity))
        self._cached: dict[int, dict[int, _Block]] = {}  # hash → its copies by block index
        self._open: dict[str, _Sequence] = {}
        self._promised = 0
        self._events: list[PoolEvent] = []

    # -- what a consumer of the events should be able to tell ------------------------------------

    def match(self, token_ids: Sequence[int]) -> int:
        """How many leading whole blocks of `token_ids` the cache holds."""
        hashes, _ = self._chain(token_ids, self._root)
        return self._leading(hashes)

    @property
    def blocks_held(self) -> int:
        """Blocks with reusable content, copies counted."""
        return sum(len(copies) for copies in self._cached.values())

    @property
    def blocks_in_use(self) -> int:
        """Blocks referenced by open requests."""
        return self.capacity - len(self._free)

    def take_events(self) -> list[PoolEvent]:
        """Everything that happened since the last call, in order."""
        events, self._events = self._events, []
        return events

    # -- life of a request -----------------------------------------------------------------------

    def open(self, request_id: str, token_ids: Sequence[int], output_tokens_max: int) -> int | None:
        """Admit a prompt and return its cached leading blocks, or None if it must wait.

        Raises:
            RequestOpen: the id is open already.
            RequestTooLarge: the whole pool would not do.
        """
        if request_id in self._open:
            raise RequestOpen(request_id)
        total = -(-(len(token_ids) + output_tokens_max) // self.block_size)
        if total > self.capacity:
            raise RequestTooLarge(request_id, total, self.capacity)
        hashes, digest = self._chain(token_ids, self._root)
        # the last token is always computed: its logits are what the first output comes from
        reusable = max(0, len(token_ids) - 1) // self.block_size
        hits = self._leading(hashes[:reusable])
        reused = [self._copy_of(value) for value in hashes[:hits]]
        taken_from_free = sum(1 for block in reused if block.references == 0)
        if len(self._free) - taken_from_free - self._promised < total - hits:
            return None
        for block in reused:
            self._reference(block)
        self._promised += total - hits
        self._open[request_id] = _Sequence(
            token_ids=list(token_ids),
            hashes=hashes,
            digest=digest,
            blocks=reused,
            cached_blocks=hits,
            promised=total - hits,
        )
        return hits

    def compute(self, request_id: str, tokens: int) -> None:
        """The first `tokens` tokens of the request now have their KV; whole blocks are cached."""
        sequence = self._open[request_id]
        tokens = min(tokens, len(sequence.token_ids))
        while len(sequence.blocks) * self.block_size < tokens:
            sequence.blocks.append(self._take(sequence))
        first, last = sequence.cached_blocks, tokens // self.block_size
        if last <= first:
            return
        for position in range(first, last):
            block = sequence.blocks[position]
            block.block_hash = sequence.hashes[position]
            self._cached.setdefault(block.block_hash, {})[block.index] = block
        sequence.cached_blocks = last
        self._events.append(
            Stored(
                hashes=tuple(sequence.hashes[first:last]),
                parent=sequence.hashes[first - 1] if first else None,
                token_ids=tuple(
                    sequence.token_ids[first * self.block_size : last * self.block_size]
                ),
            )
        )

    def append(self, request_id: str, token_id: int) -> bool:
        """Add one generated token, computed at once; true when it filled a block."""
        sequence = self._open[request_id]
        sequence.token_ids.append(token_id)
        length = len(sequence.token_ids)
        if length % self.block_size == 0:
            tail = sequence.token_ids[-self.block_size :]
            added, sequence.digest = self._chain(tail, sequence.digest)
            sequence.hashes += added
        self.compute(request_id, length)
        return length % self.block_size == 0

    def close(self, request_id: str) -> None:
        """End a request; its blocks stay cached until their room is needed."""
        sequence = self._open.pop(request_id)
        self._promised -= sequence.promised
        # the tail first, so that it is evicted before the prefix that more prompts share
        for block in reversed(sequence.blocks):
            block.references -= 1
            if block.references == 0:
                self._free[block.index] = block

    def clear(self) -> bool:
        """Drop the prefix cache, as an engine's reset does; refused while requests are open."""
        if self._open:
            return False
        for copies in self._cached.values():
            for block in copies.values():
                block.block_hash = None
        self._cached.clear()
        self._events.append(Cleared())
        return True

    def check(self) -> None:
        """Assert every invariant of the structure; tests call it after each step."""
        for value, copies in self._cached.items():
            assert copies, "a hash without a copy is not kept"
            assert all(b.block_hash == value for b in copies.values()), "copies carry their hash"
        for block in self._free.values():
            assert block.references == 0, "a free block is referenced by nobody"
        held = {b.index for s in self._open.values() for b in s.blocks}
        assert not held & self._free.keys(), "a block of an open request is not free"
        assert len(held) + len(self._free) == self.capacity, "no block is lost"
        assert self._promised == sum(s.promised for s in self._open.values()), "promises add up"
        assert self._promised <= len(self._free), "every promise can be kept"

    # -- below: hashing, references, eviction ----------------------------------------------------

    def _chain(self, token_ids: Sequence[int], digest: bytes) -> tuple[list[int], bytes]:
        """Hashes of the whole blocks after `digest`, as vLLM's sha256 with 64-bit event hashes."""
        packed = array("I", token_ids).tobytes()
        width = self.block_size * array("I").itemsize
        hashes = []
        for start in range(0, len(packed) - width + 1, width):
            digest = hashlib.sha256(digest + packed[start : start + width]).digest()
            hashes.append(int.from_bytes(digest[-8:], "big"))
        return hashes, digest

    def _leading(self, hashes: Sequence[int]) -> int:
        for count, value in enumerate(hashes):
            if value not in self._cached:
                return count
        return len(hashes)

    def _copy_of(self, value: int) -> _Block:
        return next(iter(self._cached[value].values()))

    def _reference(self, block: _Block) -> None:
        if block.references == 0:
            del self._free[block.index]
        block.references += 1

    def _take(self, sequence: _Sequence) -> _Block:
        """The least recently used free block, emptied; `open` promised that there is one."""
        _, block = self._free.popitem(last=False)
        sequence.promised -= 1
        self._promised -= 1
        if block.block_hash is not None:
            copies = self._cached[block.block_hash]
            del copies[block.index]
            if not copies:
                del self._cached[block.block_hash]
            self._events.append(Removed(hashes=(block.block_hash,)))
            block.block_hash = None
            self.evictions += 1
        block.references = 1
        return block
