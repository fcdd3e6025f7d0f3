"""What ranks probably have cached, judged by the prompts that were computed there lately.

It stands in for KV events. A prompt enters with its chain of sequence hashes once it is computed;
the tries that count the blocks of live reservations (`active_blocks.py`) hold the chains, here
without the reservations. A rank keeps what its cache has room for, least recently used first out,
ends of prompts before their beginnings, and nothing beyond a time to live. `partition.py` merges
the estimate into what the index finds; `cached_tokens.py` corrects it by what engines report.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from heapq import heappop, heappush
from itertools import islice
from typing import TYPE_CHECKING, Final

import numpy as np

from indexer.types import HASH_BYTES
from select_service.core.ledger.active_blocks import ActiveBlocks, check, positions_of
from select_service.types import CoreLimits

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Sized

    from indexer.types import PackedHashes
    from select_service.core.columns import Slots
    from select_service.core.ledger.active_blocks import ChainNode
    from select_service.core.tenancy.shares import Bound

CORRECTED_MAX: Final = 64
"""Prompts forgotten at most for one report of an engine; some µs each."""

LOOKED_AT_MAX: Final = 256
"""Prompts of the rank looked at for that, a µs each: the one reported, and those that came first to
the tries."""

PASSED_MAX: Final = 2048
"""Nodes passed on the way, most of them of other ranks; a fifth of a µs each."""

_ROWS: Final = 16
"""Generations for which the column of slots grows at a time, at least."""


class _Rank:
    """One slot's prompts, as a generation of the tries."""

    __slots__ = ("capacity", "in_force", "number", "prompts")

    def __init__(self, number: int) -> None:
        self.number = number
        self.capacity = 0
        self.in_force = False
        # by the last node of the chain, when it was last computed; least recent first
        self.prompts: OrderedDict[ChainNode, float] = OrderedDict()


class CacheEstimate:
    """The estimate of one partition.

    Attributes:
        in_force: Generations whose estimate counts in matches, as a mask; 0: none.
        first_blocks: The first blocks of all its prompts: others match nothing.
        followed: The slots that are estimated.
    """

    def __init__(
        self,
        limits: CoreLimits | None = None,
        *,
        bound: Bound | None = None,
        tenant_id: str = "",
    ) -> None:
        """Begin without ranks.

        `limits`, read each time: capacity of ranks that report none, and the time to live.
        `bound` is of the blocks of all partitions together.
        """
        self._limits = limits or CoreLimits()
        self._bound = bound
        self._tenant_id = tenant_id
        self._tries = ActiveBlocks()
        self._ranks: dict[int, _Rank] = {}  # by slot
        self._left: deque[_Rank] = deque()  # of ranks that have gone; `sweep` empties them
        self._free_numbers: list[int] = []
        self._slots: Slots = np.full(0, -1, dtype=np.int64)  # by generation; -1: none
        self._due: deque[int] = deque()  # slots whose prompts may be too old
        self.in_force = 0
        self.first_blocks: Container[bytes] = self._tries.root.children
        self.followed: Container[int] = self._ranks

    # -- whose ---------------------------------------------------------------------------------

    def follow(self, slot: int, capacity: int | None, *, in_force: bool) -> None:
        """Estimate a rank from now on, or change how; its prompts stay.

        `capacity` is in blocks; None or 0: unknown. Matches count the estimate if it is
        `in_force`.
        """
        rank = self._ranks.get(slot)
        if rank is None:
            rank = self._ranks[slot] = self._open(slot)
        rank.capacity, rank.in_force = capacity or 0, in_force
        bit = 1 << rank.number
        self.in_force = self.in_force | bit if in_force else self.in_force & ~bit
        self._trim(rank)

    def drop(self, slot: int) -> None:
        """Estimate a rank no longer, and forget its prompts. O(1); `sweep` frees the memory."""
        rank = self._ranks.pop(slot, None)
        if rank is None:
            return
        self.in_force &= ~(1 << rank.number)
        self._slots[rank.number] = -1
        self._give(self._tries.counts.count(rank.number))
        self._left.append(rank)

    def clear(self, slot: int) -> None:
        """Forget the prompts of a rank whose cache is empty; it is estimated on as before."""
        rank = self._ranks.get(slot)
        if rank is not None and rank.prompts:
            self.drop(slot)
            self.follow(slot, rank.capacity, in_force=rank.in_force)

    def is_in_force(self, slot: int) -> bool:
        """Whether what matches say of a rank may be an estimate."""
        rank = self._ranks.get(slot)
        return rank is not None and rank.in_force

    def blocks_of(self, slot: int) -> int:
        """Return how many blocks a rank is thought to hold."""
        rank = self._ranks.get(slot)
        return 0 if rank is None else self._tries.counts.count(rank.number)

    @property
    def blocks(self) -> int:
        """Blocks of all ranks."""
        return sum(map(self.blocks_of, self._ranks))

    @property
    def ranks(self) -> int:
        """How many ranks have an estimate that counts. O(1)."""
        return self.in_force.bit_count()

    def _open(self, slot: int) -> _Rank:
        if self._free_numbers:
            number = heappop(self._free_numbers)
        else:
            number = len(self._ranks) + len(self._left)
            self._tries.counts.ensure(number + 1)
            if number >= len(self._slots):
                more = np.full(max(_ROWS, number), -1, dtype=np.int64)
                self._slots = np.concatenate([self._slots, more])
        self._slots[number] = slot
        return _Rank(number)

    # -- prompts -------------------------------------------------------------------------------

    def computed(self, slot: int, chain: PackedHashes, now: float) -> None:
        """Note that a rank has computed a prompt, or had it; most of it may be known already."""
        rank = self._ranks.get(slot)
        if rank is None:
            return
        capacity = self._capacity(rank)
        chain = chain[: capacity * HASH_BYTES]
        if not chain:
            return
        counts, number = self._tries.counts, rank.number
        before = counts.count(number)
        end = self._tries.acquire(chain, number)
        if end in rank.prompts:
            self._tries.release(end, number)
        node = end.parent
        while node is not None:  # beginnings of this prompt need no entry of their own
            above = node.parent
            if node in rank.prompts:
                del rank.prompts[node]
                self._tries.release(node, number)
            node = above
        rank.prompts[end] = now
        rank.prompts.move_to_end(end)
        more = counts.count(number) - before
        if more > 0 and self._bound is not None and not self._bound.has_room(self._tenant_id, more):
            self._bound.refuse(self._tenant_id)
            self._shorten(rank, before)
        self._shorten(rank, capacity)
        self._give(before - counts.count(number))

    def correct(self, slot: int, chain: PackedHashes, found: int, since: float, now: float) -> None:
        """Apply an engine's report that it found so many blocks of a prompt, and not the next one.

        What other prompts have behind them is gone as well, unless it was computed since.

        `found` are blocks of the prompt's `chain`, which was given to the rank at `since`.
        """
        rank = self._ranks.get(slot)
        if rank is None:
            return
        self._give(self._forget_behind(rank, chain, found, since))
        held = 0
        for blocks, mask in self._tries.shared_prefix(chain):
            if mask >> rank.number & 1:
                held = blocks
        if held < found:
            self.computed(slot, chain[: found * HASH_BYTES], now)

    def _forget_behind(self, rank: _Rank, chain: PackedHashes, found: int, since: float) -> int:
        """Forget prompts with the block after the first `found`; return how many blocks went."""
        tries, number = self._tries, rank.number
        before = tries.counts.count(number)
        node, position = tries.root, 0
        while position <= found * HASH_BYTES:  # to the node with the block
            child = node.children.get(chain[position : position + HASH_BYTES])
            if child is None or not child.mask >> number & 1:
                return 0
            common = min(len(child.edge), (found + 1) * HASH_BYTES - position)
            if not chain.startswith(child.edge[:common], position):
                return 0
            node, position = child, position + len(child.edge)
        own = _path(node, chain[position:], number)
        looked_at = islice(dict.fromkeys((*own, *_walk(node, number))), LOOKED_AT_MAX)
        found_old = (one for one in looked_at if rank.prompts.get(one, since + 1.0) <= since)
        for end in list(islice(found_old, CORRECTED_MAX)):
            del rank.prompts[end]
            tries.release(end, number)
        return before - tries.counts.count(number)

    def _capacity(self, rank: _Rank) -> int:
        return rank.capacity or self._limits.kv_estimate_rank_blocks

    def _trim(self, rank: _Rank) -> None:
        before = self._tries.counts.count(rank.number)
        self._shorten(rank, self._capacity(rank))
        self._give(before - self._tries.counts.count(rank.number))

    def _shorten(self, rank: _Rank, most: int) -> None:
        """Forget the ends of the least recent prompts until a rank holds `most` blocks."""
        tries, number = self._tries, rank.number
        while (excess := tries.counts.count(number) - most) > 0 and rank.prompts:
            end, at = next(iter(rank.prompts.items()))
            alone, node = 0, end  # blocks that no other prompt needs
            while node.parent is not None and node.refs[number] == 1:
                alone += len(node.edge) // HASH_BYTES
                node = node.parent
            kept = tries.chain(end)[: -excess * HASH_BYTES] if excess < alone else b""
            del rank.prompts[end]
            shorter = tries.acquire(kept, number) if kept else None
            tries.release(end, number)
            if shorter is not None:
                rank.prompts[shorter] = at
                rank.prompts.move_to_end(shorter, last=False)

    def _give(self, blocks: int) -> None:
        if blocks and self._bound is not None:
            self._bound.give(self._tenant_id, blocks)

    # -- time ----------------------------------------------------------------------------------

    def keep(self, now: float, limit: int) -> bool:
        """Forget up to `limit` prompts that are too old, or of ranks that have gone.

        Returns:
            Whether more are left.
        """
        tries, left = self._tries, self._left
        while left and limit:
            rank = left[0]
            if rank.prompts:
                tries.release(rank.prompts.popitem()[0], rank.number)
                limit -= 1
            else:
                heappush(self._free_numbers, left.popleft().number)
        if not self._due:
            self._due.extend(self._ranks)
        oldest = now - self._limits.kv_estimate_ttl_s
        for _ in range(min(limit, len(self._due))):
            found = self._ranks.get(self._due.popleft())
            if found is None:
                continue
            before = tries.counts.count(found.number)
            while limit and found.prompts and next(iter(found.prompts.values())) < oldest:
                tries.release(found.prompts.popitem(last=False)[0], found.number)
                limit -= 1
            self._give(before - tries.counts.count(found.number))
        return bool(left) or not limit

    # -- reading -------------------------------------------------------------------------------

    def find(self, chain: PackedHashes) -> list[tuple[int, Slots]]:
        """Return how much of a prompt ranks probably have: (blocks, slots), disjoint."""
        found = []
        for blocks, mask in self._tries.shared_prefix(chain):
            if mask := mask & self.in_force:
                found.append((blocks, self._slots[np.frombuffer(positions_of(mask), np.int64)]))
        return found

    def tables(self) -> Iterator[Sized]:
        """Yield the dicts that grow with prompts; see `dict_compaction.py`."""
        yield self._tries.root.children
        yield from [rank.prompts for rank in self._ranks.values()]

    def check(self) -> None:
        """Assert all invariants. O(everything)."""
        check(self._tries)
        by_number = {rank.number: slot for slot, rank in self._ranks.items()}
        for number, slot in enumerate(self._slots.tolist()):
            assert by_number.get(number, -1) == slot
        used = [*by_number, *(rank.number for rank in self._left), *self._free_numbers]
        assert sorted(used) == list(range(len(used))), "one number a generation"
        assert self.in_force == sum(1 << r.number for r in self._ranks.values() if r.in_force)
        for rank in (*self._ranks.values(), *self._left):
            assert all(node.refs.get(rank.number) for node in rank.prompts)
        for rank in self._ranks.values():
            assert self._tries.counts.count(rank.number) <= self._capacity(rank)
            assert list(rank.prompts.values()) == sorted(rank.prompts.values())


def _path(node: ChainNode, rest: PackedHashes, number: int) -> Iterator[ChainNode]:
    """Yield the nodes below one that a generation has of the rest of a chain, the last one last."""
    at = 0
    while (child := node.children.get(rest[at : at + HASH_BYTES])) is not None:
        if not child.mask >> number & 1 or not rest.startswith(child.edge, at):
            return
        yield child
        node, at = child, at + len(child.edge)


def _walk(top: ChainNode, number: int) -> Iterator[ChainNode]:
    """Yield those of a node and all below it that a generation has; pass `PASSED_MAX`."""
    open_nodes: list[Iterator[ChainNode]] = [iter((top,))]
    for _ in range(PASSED_MAX):
        node = next(open_nodes[-1], None)
        if node is None:
            open_nodes.pop()
            if not open_nodes:
                return
        elif node.mask >> number & 1:
            yield node
            if node.children:
                open_nodes.append(iter(node.children.values()))
