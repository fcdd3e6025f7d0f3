"""Plans a batch: shared prefixes are computed once, and no rank is overloaded.

Prompts of one partition with a common prefix form a group. Groups are placed largest first, each on
the rank where it costs least by the formula of single requests (`pricing/cost.py`), including the
load of the batch so far. A rank takes no more than its share of the batch's requests; the rest of a
group goes on elsewhere. Nothing is changed here: `batch_selection.py` carries the plan out.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from msgspec import UNSET

from indexer.core import runs
from indexer.types import HASH_BYTES
from select_service.core.pricing.pick import pick

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from select_service.core.columns import Floats, Rows, Slots
    from select_service.core.partition import Partition
    from select_service.core.pricing.prompt import Prompt
    from select_service.core.pricing.weights import Weights
    from select_service.types import SelectRequest

_PART_IN_COMMON: Final = 2
"""Prompts form a group if they share at least 1/this of the longer one's blocks: then computing the
shared part twice costs more than all that differs."""

_ROUNDING: Final = 1e-9
_MEMBERS_PER_STEP: Final = 64
"""Visited in one step; a µs each."""


class BatchMember(NamedTuple):
    """One sample of a batch."""

    number: int  # its position in the batch
    request: SelectRequest
    prompt: Prompt
    weights: Weights
    rows: Rows


class Group(NamedTuple):
    """Members with a common prefix, sorted so that those with the most in common are adjacent."""

    members: list[BatchMember]
    common: list[int]  # blocks in common with the previous member; 0 for the first

    @property
    def isl_tokens(self) -> int:
        """The total length of its prompts."""
        return sum(member.prompt.isl_tokens for member in self.members)


class PlannedRank(NamedTuple):
    """Where a member should go."""

    member: BatchMember
    slot: int
    mate: int  # batch position of the member there with the longest common prefix; -1: none
    shared_blocks: int  # blocks of that prefix
    group: int  # the number of its group in the plan


def common_blocks(one: Prompt, other: Prompt, least: int = 0) -> int:
    """Return the length of the common prefix in blocks, or 0 if it is below `least`."""
    common = runs.common_blocks(one.block_hashes, 0, other.block_hashes, 0)
    return common if common >= least else 0


def groups_of(members: Iterable[BatchMember]) -> list[Group]:
    """Sort members with equal wishes into groups. O(n log n) comparisons."""
    groups: list[Group] = []
    ordered = sorted(members, key=lambda one: one.prompt.block_hashes)
    last: Prompt | None = None
    for member in ordered:
        common, prompt = 0, member.prompt
        if last is not None:
            least = -(-max(last.blocks, prompt.blocks) // _PART_IN_COMMON)
            common = common_blocks(last, prompt, max(1, least))
        if common:
            groups[-1].members.append(member)
            groups[-1].common.append(common)
        else:
            groups.append(Group([member], [0]))
        last = prompt
    return groups


def _wishes(member: BatchMember) -> tuple[object, ...]:
    """Return what two members must have in common to be placed together."""
    rows, constraints = member.rows, member.request.routing_constraints
    preferred = () if constraints is UNSET else sorted(constraints.preferred_taints.items())
    here = rows.stop.to_bytes(8) if isinstance(rows, slice) else b"-" + rows.tobytes()
    return here, tuple(preferred), member.weights


def even_share(standing: Sequence[int] | Slots, arriving: int) -> float:
    """Return the requests per rank if spread as evenly as possible.

    Ranks above that level keep what they have: the level L with Σ max(0, L - standing) = arriving.
    """
    level, below = 0.0, 0
    ordered = sorted(int(one) for one in standing)
    for position, one in enumerate(ordered):
        below += one
        level = (arriving + below) / (position + 1)
        if position + 1 == len(ordered) or level <= ordered[position + 1]:
            break
    return level


class BatchPlan:
    """The plan of a batch in one partition.

    `load_limit` is the most requests a rank may get to, as a multiple of its even share;
    `keep_together` members of a group go to one rank whatever its share. Planning takes several
    turns of the loop, and queues count as of `now`.
    """

    def __init__(
        self,
        partition: Partition,
        members: Sequence[BatchMember],
        *,
        load_limit: float,
        keep_together: int,
        now: float,
        rng: random.Random,
    ) -> None:
        self.partition = partition
        self.members = members
        self.load_limit = load_limit
        self.keep_together = keep_together
        self.now = now
        self._rng = rng
        self.groups: list[Group] = []
        self.prices: Callable[[BatchMember], None] | None = None
        """Called with each member before its candidates are priced; for a recorder."""
        size = len(partition.ledger.loads.requests)  # the index may have ranks of no worker
        self._placed = np.zeros(size, dtype=np.int64)  # requests of the batch, by slot
        self._prefill = np.zeros(size)  # tokens to compute for them
        self._decode = np.zeros(size)  # their distinct blocks
        self._context = np.zeros(size)  # what they add to the context
        self._share = self._limit = 0  # requests: the even share, and the limit of a rank

    def planned_ranks(self) -> Iterator[list[PlannedRank]]:
        """Yield the plan piece by piece: members of one group that go to one rank.

        Each piece is O(ranks), except for one that sorts all members: O(members).
        """
        kinds: dict[tuple[object, ...], int] = {}
        used = np.zeros(len(self._placed), dtype=bool)
        alike: dict[tuple[int, bytes], list[BatchMember]] = {}  # by wishes and first block
        for count, member in enumerate(self.members, 1):
            kind = kinds.setdefault(_wishes(member), len(kinds))
            if kind == len(kinds) - 1:
                used[member.rows] = True
            first = member.prompt.block_hashes[:HASH_BYTES]
            alike.setdefault((kind, first), []).append(member)
            if not count % _MEMBERS_PER_STEP:
                yield []
        for count, members in enumerate(alike.values(), 1):
            self.groups += groups_of(members)
            if not count % _MEMBERS_PER_STEP:
                yield []
        self.groups.sort(key=lambda group: (-group.isl_tokens, group.members[0].number))
        yield []
        standing = self.partition.ledger.loads.requests[: len(used)][used]
        level = even_share(standing, len(self.members))
        self._share = math.ceil(level - _ROUNDING)
        self._limit = math.floor(self.load_limit * level + _ROUNDING)
        for number, group in enumerate(self.groups):
            yield from self._place_group(number, group)

    def _place_group(self, number: int, group: Group) -> Iterator[list[PlannedRank]]:
        first = group.members[0]
        rows = first.rows
        base, cached = self._price(first)
        left, last_at = 0, dict[int, int]()  # position of the group's last member, by slot
        while left < len(group.members):
            remaining = len(group.members) - left
            load = self.partition.ledger.loads.requests[rows] + self._placed[rows]
            room = self._share - load
            is_open = room > 0
            if not is_open.any():
                is_open = load == load.min()
            fits = np.maximum(room, self._limit - load) >= remaining
            prices = self._with_batch(base, rows, first)
            # splitting the group would compute its prefix once more elsewhere
            prices = prices + np.where(fits, 0.0, self._prefix_price(group, left, first))
            among = np.flatnonzero(is_open)
            at = int(among[pick(prices[among], first.weights.temperature, self._rng)])
            most = max(int(room[at]), self.keep_together)
            count = remaining if fits[at] else min(remaining, most)
            slot = at if isinstance(rows, slice) else int(rows[at])
            yield self._take(number, left, count, slot, float(cached[at]), last_at)
            left += count

    def _price(self, member: BatchMember) -> tuple[Floats, Floats]:
        """Return a prompt's cost on its rows without the batch, and its tokens there or pulled."""
        if self.prices is not None:
            self.prices(member)
        partition, prompt, rows = self.partition, member.prompt, member.rows
        present = partition.at_present(member.weights)
        found = partition.pulling(member.request, partition.found(prompt), prompt, present)
        terms = partition.terms(prompt, rows, member.weights, self.now, found)
        preference = partition.preference(member.request, rows)
        cost = terms.cost if preference is None else terms.cost * preference
        return cost, terms.cached_tokens + terms.pulled * partition.index.block_size

    def _with_batch(self, base: Floats, rows: Rows, member: BatchMember) -> Floats:
        weights = member.weights
        prices: Floats = base + weights.decode_load_scale * self._decode[rows]
        if weights.context_load_scale:
            prices += weights.context_load_scale * self._context[rows]
        if weights.track_prefill_tokens:
            size = self.partition.index.block_size
            prices += weights.prefill_load_scale / size * self._prefill[rows]
        return prices

    def _prefix_price(self, group: Group, left: int, first: BatchMember) -> float:
        if left + 1 >= len(group.members):
            return 0.0
        return first.weights.prefill_load_scale * min(group.common[left + 1 :])

    def _take(
        self,
        number: int,
        left: int,
        count: int,
        slot: int,
        cached_tokens: float,
        last_at: dict[int, int],
    ) -> list[PlannedRank]:
        planned_ranks, size, group = [], self.partition.index.block_size, self.groups[number]
        for position in range(left, left + count):
            member, mate, shared = group.members[position], -1, 0
            before = last_at.get(slot)
            if before is not None:
                mate = group.members[before].number
                shared = min(group.common[before + 1 : position + 1])
            last_at[slot] = position
            prompt = member.prompt
            known = max(float(shared * size), cached_tokens)
            self._prefill[slot] += max(0.0, prompt.isl_tokens - known)
            self._decode[slot] += prompt.blocks - shared
            self._context[slot] += prompt.blocks + self.partition.ledger.sequence_blocks
            planned_ranks.append(PlannedRank(member, slot, mate, shared, number))
        self._placed[slot] += count
        return planned_ranks
