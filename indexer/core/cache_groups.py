"""One rank's blocks in cache groups that limit a match: sliding windows and Mamba states.

A hybrid model has several KV-cache groups. Full attention needs every block of a prefix, and its
blocks are in the tree. A sliding-window layer needs the last few blocks before the point where
computing goes on, a Mamba layer the state there. An engine calls a block the same in all its
groups, so that names are enough here: content and place follow from the full-attention blocks.
`group_matches` shortens matches by them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec import Struct

from indexer.core.name_map import NameMap
from indexer.core.packing import numbers_in, pack_names
from indexer.types import HASH_BYTES, Tier

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Iterable, Iterator, Sequence

    from indexer.types import Namespace, PackedHashes

SLIDING_KINDS: Final = frozenset({"sliding_window", "sliding_window_mla"})
"""Attention kinds of groups that need the last window of a prefix."""

MAMBA_KIND: Final = "mamba"
"""Kind of groups that need the state at the end of a prefix."""

GROUPS_MAX: Final = 64
"""Such groups of one rank; hybrid models have a handful."""

FROZEN_NAMES_MAX: Final = 512
"""Names in one piece of a frozen group."""

_WINDOW_MAX: Final = 1 << 31


class GroupRule(NamedTuple):
    """What a group must hold of a prefix that is to be reused.

    A prefix of n blocks can be reused if n is a multiple of `stride` and the group holds its last
    `blocks` blocks of that stride, or all of them if it has fewer.
    """

    blocks: int
    stride: int = 1  # blocks of the partition in one block of the group


def rule_of(
    attention: str, window: int | None, group_block_size: int, block_size: int
) -> GroupRule | None:
    """Return the rule of a group; None if its blocks do not limit a match, as far as is known.

    Args:
        attention: the group's kind.
        window: its sliding window, in tokens.
        group_block_size: tokens in one of its blocks.
        block_size: tokens in a block of the partition.
    """
    if attention == MAMBA_KIND:
        # a state is named after the block that ends where it was taken, whatever its block size
        return GroupRule(1)
    if attention not in SLIDING_KINDS or window is None or not 0 < window < _WINDOW_MAX:
        return None
    if group_block_size <= 0:
        return None
    if group_block_size % block_size == 0:
        blocks, stride = -(-(window - 1) // group_block_size), group_block_size // block_size
    elif block_size % group_block_size == 0:
        # only the group's blocks that end with one of the partition's can be found
        blocks, stride = -(-(window - 1) // block_size), 1
    else:
        return None
    return GroupRule(max(blocks, 1), stride)


class FrozenGroups(Struct, frozen=True, array_like=True):
    """Some blocks that the same groups hold on one tier, as plain values."""

    groups: list[int]
    rule: GroupRule
    tier: int
    names: bytes  # packed, each once
    more: dict[int, dict[int, int]] = {}  # group → name → references besides the first
    hearsay: dict[int, bytes] = {}  # group → names that only a dump has, packed
    is_in_force: bool = True  # see `LimitingGroups`
    is_all: bool = False  # whether the engine has no group of full attention


class _Mask:
    """The groups that hold a block, one bit each; one object per mask and `_Blocks`."""

    __slots__ = ("bits",)

    def __init__(self, bits: int) -> None:
        self.bits = bits


class _Blocks:
    """The blocks of all groups with the same rule, on one tier.

    Groups with one rule mostly hold the same blocks. An entry per block says which of them hold it,
    and a lookup compares it with `everyone`.
    """

    __slots__ = ("_masks", "bit_of", "counts", "everyone", "hearsay", "held", "more")

    def __init__(self) -> None:
        self.bit_of: dict[int, int] = {}  # group → its bit
        self.counts: dict[int, int] = {}  # group → blocks held; only groups that hold some
        self.everyone = _Mask(0)  # the groups that hold some
        self.held: NameMap[_Mask] = NameMap()
        self.more: dict[int, dict[int, int]] = {}  # group → name → references besides the first
        self.hearsay: dict[int, set[int]] = {}  # group → names that only a dump has
        self._masks = {0: self.everyone}

    def _mask(self, bits: int) -> _Mask:
        mask = self._masks.get(bits)
        if mask is None:
            mask = self._masks[bits] = _Mask(bits)
        return mask

    def bits(self, name: int) -> int:
        """Return the mask of the groups that hold a block."""
        mask = self.held.get(name)
        return 0 if mask is None else mask.bits

    def store(self, group: int, names: Sequence[int]) -> None:
        """Add one reference to each block."""
        bit = self.bit_of.setdefault(group, 1 << len(self.bit_of))
        if self.held.file_new(names, self._mask(bit)):
            self._count(group, len(names))
            return
        hearsay, new = self.hearsay.get(group), 0
        for name in names:
            bits = self.bits(name)
            if not bits & bit:
                self.held[name] = self._mask(bits | bit)
                new += 1
            elif hearsay is not None and name in hearsay:
                hearsay.remove(name)
            else:
                more = self.more.setdefault(group, {})
                more[name] = more.get(name, 0) + 1
        self._count(group, new)

    def remove(self, group: int, names: Iterable[int]) -> int:
        """Drop one reference to each block; return how many there were."""
        bit, more, hearsay = self.bit_of[group], self.more.get(group), self.hearsay.get(group)
        found = gone = 0
        for name in names:
            bits = self.bits(name)
            if not bits & bit:
                continue
            found += 1
            if hearsay is not None:
                hearsay.discard(name)
            if more is not None and name in more:
                more[name] -= 1
                if not more[name]:
                    del more[name]
                continue
            gone += 1
            if bits == bit:
                del self.held[name]
            else:
                self.held[name] = self._mask(bits ^ bit)
        self._count(group, -gone)
        return found

    def _count(self, group: int, change: int) -> None:
        count = self.counts.get(group, 0) + change
        was_there = group in self.counts
        if count:
            self.counts[group] = count
        else:
            self.counts.pop(group, None)
        if was_there != bool(count):
            self.everyone = self._mask(self.everyone.bits ^ self.bit_of[group])

    def names_of(self, group: int) -> list[int]:
        """Return the names of the blocks that a group holds. O(all)."""
        bit = self.bit_of[group]
        return [name for name in self.held if self.bits(name) & bit]

    def by_groups(self, names: Sequence[int]) -> dict[tuple[int, ...], list[int]]:
        """Return these blocks by the groups that hold them."""
        found: dict[int, list[int]] = {}
        for name in names:
            bits = self.bits(name)
            if bits:
                found.setdefault(bits, []).append(name)
        return {
            tuple(group for group, bit in self.bit_of.items() if bits & bit): some
            for bits, some in found.items()
        }

    def more_of(self, groups: Iterable[int], names: list[int]) -> dict[int, dict[int, int]]:
        """Return the references besides the first that groups have to these blocks."""
        more = {group: self.more[group] for group in groups if self.more.get(group)}
        found = {
            group: {name: of[name] for name in names if name in of} for group, of in more.items()
        }
        return {group: some for group, some in found.items() if some}

    def hearsay_of(self, groups: Iterable[int], names: list[int]) -> dict[int, bytes]:
        """Return those of the blocks, packed, that only a dump has."""
        dump_only = {group: self.hearsay[group] for group in groups if self.hearsay.get(group)}
        found = {
            group: pack_names([name for name in names if name in of])
            for group, of in dump_only.items()
        }
        return {group: some for group, some in found.items() if some}

    def first_missing(self, names: Sequence[int]) -> int | None:
        """Return the place of the first of these blocks that not all groups hold."""
        everyone = self.everyone
        if self.held.is_filed(names, everyone):
            return None
        get = self.held.get
        return next(at for at, name in enumerate(names) if get(name) is not everyone)


class LimitingGroups:
    """The groups of one rank that limit matches, and their blocks on each tier."""

    __slots__ = ("_tiers", "is_in_force", "prefixes", "rules")

    def __init__(self) -> None:
        self.is_in_force = False  # whether it is known that they belong to the blocks of matches
        # not None: the engine has no other groups, and what the tree has are these prefixes
        self.prefixes: SparsePrefixes | None = None
        self.rules: dict[int, GroupRule] = {}
        # A group that holds nothing on a tier does not limit matches there: not every connector
        # moves, or reports, all groups.
        self._tiers: list[dict[GroupRule, _Blocks]] = [{} for _ in Tier]

    def __len__(self) -> int:
        """Return the number of blocks, each counted once per tier and rule."""
        return sum(len(blocks.held) for tier in self._tiers for blocks in tier.values())

    def _expect(self, group: int, rule: GroupRule) -> bool:
        """Note the rule of a group; False: there are too many groups."""
        known = self.rules.get(group)
        if known == rule:
            return True
        if known is not None:
            self.forget(group)
        elif len(self.rules) >= GROUPS_MAX:
            return False
        self.rules[group] = rule
        return True

    def forget(self, group: int) -> None:
        """Forget a group, and the blocks of all groups with the same rule."""
        rule = self.rules.pop(group, None)
        if rule is not None:
            for tier in self._tiers:
                tier.pop(rule, None)

    def store(
        self,
        tier: int,
        group: int,
        names: Sequence[int],
        rule: GroupRule,
    ) -> int:
        """Add one reference to each block; return their number, 0 if there are too many groups."""
        if not names or not self._expect(group, rule):
            return 0
        by_rule = self._tiers[tier]
        blocks = by_rule.get(rule)
        if blocks is None:
            blocks = by_rule[rule] = _Blocks()
        blocks.store(group, names)
        return len(names)

    def remove(self, tier: int, group: int, names: Iterable[int]) -> int:
        """Drop one reference to each block; return how many there were."""
        rule = self.rules.get(group)
        blocks = None if rule is None else self._tiers[tier].get(rule)
        if blocks is None or group not in blocks.bit_of:
            return 0
        return blocks.remove(group, names)

    def note_hearsay(self, tier: int, group: int, names: Iterable[int]) -> None:
        """Record that these blocks of a group come from a dump, not from the engine."""
        self._tiers[tier][self.rules[group]].hearsay.setdefault(group, set()).update(names)

    def is_sure(self, tier: int, group: int, name: int) -> bool:
        """Say whether the engine has reported that a group holds a block on a tier."""
        rule = self.rules.get(group)
        blocks = None if rule is None else self._tiers[tier].get(rule)
        return (
            blocks is not None
            and bool(blocks.bits(name) & blocks.bit_of.get(group, 0))
            and name not in blocks.hearsay.get(group, ())
        )

    def all_hold_some(self, tier: int) -> bool:
        """Say whether every group holds a block on a tier."""
        held = {group for blocks in self._tiers[tier].values() for group in blocks.counts}
        return self.rules.keys() <= held

    def knows(self, tier: int, name: int) -> bool:
        """Say whether any group holds a block on a tier."""
        return any(blocks.bits(name) for blocks in self._tiers[tier].values())

    def holds(self, name: int) -> bool:
        """Say whether any group holds a block on any tier."""
        return any(self.knows(tier, name) for tier in Tier)

    def reusable(self, tier: int, names: Sequence[int], low: int) -> int:
        """Return the longest reusable prefix of blocks whose names these are, on one tier.

        Blocks before `low` were found on the tiers before: they count as held, and `low` is the
        least that is returned.
        """
        limits = [(rule, held) for rule, held in self._tiers[tier].items() if held.counts]
        if self.prefixes is not None and not limits:
            return low
        n = len(names)
        while n > low:
            before = n
            for rule, blocks in limits:
                n = _longest(rule, blocks, names, n, low)
            if n == before:
                break
        return n

    def frozen(self) -> Iterator[FrozenGroups]:
        """Yield all blocks, in pieces; those that go meanwhile may be left out."""
        for tier, by_rule in enumerate(self._tiers):
            for rule, blocks in [*by_rule.items()]:
                names = [*blocks.held]
                for at in range(0, len(names), FROZEN_NAMES_MAX):
                    some = names[at : at + FROZEN_NAMES_MAX]
                    for groups, held in blocks.by_groups(some).items():
                        yield FrozenGroups(
                            [*groups],
                            rule,
                            tier,
                            pack_names(held),
                            blocks.more_of(groups, held),
                            blocks.hearsay_of(groups, held),
                            self.is_in_force,
                            self.prefixes is not None,
                        )

    def thaw(self, frozen: FrozenGroups) -> None:
        """Take in a piece."""
        names, tier = numbers_in(frozen.names), frozen.tier
        self.is_in_force = frozen.is_in_force
        if frozen.is_all and self.prefixes is None:
            self.prefixes = SparsePrefixes()
        for group in frozen.groups:
            if not self.store(tier, group, names, frozen.rule):
                continue
            more, hearsay = frozen.more.get(group), frozen.hearsay.get(group)
            if more:
                self._tiers[tier][frozen.rule].more.setdefault(group, {}).update(more)
            if hearsay:
                self.note_hearsay(tier, group, numbers_in(hearsay))

    @property
    def nbytes(self) -> int:
        """Size in bytes, apart from what is rare."""
        return sum(blocks.held.nbytes for tier in self._tiers for blocks in tier.values())

    def check(self) -> None:
        """Assert the invariants. O(everything)."""
        assert len(self.rules) <= GROUPS_MAX
        for by_rule in self._tiers:
            for rule, blocks in by_rule.items():
                assert all(self.rules.get(group) == rule for group in blocks.bit_of), (
                    "groups are filed under their rule"
                )
                counts = {group: len(blocks.names_of(group)) for group in blocks.bit_of}
                assert {group: n for group, n in counts.items() if n} == blocks.counts, (
                    "blocks are counted per group"
                )
                here = sum(blocks.bit_of[group] for group in blocks.counts)
                assert blocks.everyone.bits == here, "every group with blocks has to hold a block"
                for name in blocks.held:
                    assert blocks.bits(name), "no group, no entry"
                for group, more in blocks.more.items():
                    for name, count in more.items():
                        assert count > 0, "no reference, no entry"
                        assert blocks.bits(name) & blocks.bit_of[group], "only held blocks count"


def _longest(rule: GroupRule, blocks: _Blocks, names: Sequence[int], n: int, low: int) -> int:
    """Return the longest prefix of at most `n` blocks that one rule allows, at least `low`."""
    count, stride = rule
    n -= n % stride
    while n > low:
        start = max(n - count * stride, 0)
        # the last block of each stride names it; those before `low` are known to be there
        first = max(start, low // stride * stride) + stride - 1
        missing = blocks.first_missing(names[first:n:stride])
        if missing is None:
            return n
        # no prefix that is longer than up to the missing block can do without it
        n = first - stride + 1 + missing * stride
    return low


class SparseStore(NamedTuple):
    """A store event: all blocks that it spans, and the names of some of them, in order."""

    batch: int | None  # number of its batch: one step of the engine
    group: int
    need: int  # blocks at its end that a match needs
    stride: int  # blocks of the partition in one block of the group
    parent: int | None
    local: PackedHashes
    names: Sequence[int]
    namespace: Namespace

    @property
    def span(self) -> int:
        """Blocks of the group that the event spans."""
        return len(self.local) // HASH_BYTES // self.stride

    def is_next(self, before: SparseStore) -> bool:
        """Say whether an event may go on with a prompt of the step before."""
        if self.batch is None or before.batch is None:
            return True
        return self.batch - before.batch <= 1


class SparsePrefixes:
    """What is known of one rank's prompts besides the blocks that its engine named."""

    __slots__ = ("chunks", "short", "unsure")

    def __init__(self) -> None:
        # per group: prompts of which the last steps computed a chunk without naming a block
        self.chunks: dict[int, deque[SparseStore]] = {}
        # per group: the last event with names that were taken for the first of its blocks
        self.short: dict[int, SparseStore] = {}
        # last name of an event → all its names, which may belong one block further up
        self.unsure: dict[int, Sequence[int]] = {}
