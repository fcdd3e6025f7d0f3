"""One rank's names for its blocks, their places in the tree, and their reference counts.

The holder keeps names and counts; the nodes record which holder covers which position. It never
changes the shape of the tree: `radix_tree.py` does, and updates the holders when nodes move.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from indexer.core.cache_groups import LimitingGroups
from indexer.core.name_map import NameMap
from indexer.core.node import all_ones
from indexer.core.packing import numbers_in, pack_name
from indexer.types import HASH_BYTES, Tier

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from indexer.core.node import Node, OrphanRoot
    from indexer.types import WorkerRank

UNDECIDED_GROUP: Final = -1
"""Home group of dumped blocks, since a dump has no groups; the first live event decides it."""


class ReferenceCounts:
    """Reference counts of the blocks of one (rank, tier) that are not simply held once.

    A held block has `1 + copies.get(hash, 0)` references in the holder's home group and
    `foreign[hash][group]` in others. Nearly every block is in neither dict.
    """

    __slots__ = ("copies", "foreign")

    def __init__(self) -> None:
        self.copies: dict[int, int] = {}
        self.foreign: dict[int, dict[int, int]] = {}

    @property
    def more(self) -> int:
        """References besides the first of each block. O(these)."""
        return sum(self.copies.values()) + sum(sum(of.values()) for of in self.foreign.values())

    def are_plain(self, names: Sequence[int]) -> bool:
        """Say whether each of these blocks, if held at all, is held once and in the home group."""
        return self.copies.keys().isdisjoint(names) and self.foreign.keys().isdisjoint(names)

    def first(self, name: int, group: int) -> None:
        """Count the first reference to a block, in a group other than the home group."""
        self.copies[name] = -1
        self.foreign[name] = {group: 1}

    def again(self, name: int, group: int, home: int | None) -> None:
        """Count one more reference to a held block."""
        if group != home:
            groups = self.foreign.setdefault(name, {})
            groups[group] = groups.get(group, 0) + 1
            return
        more = self.copies.get(name, 0) + 1
        if more:
            self.copies[name] = more
        else:
            del self.copies[name]

    def drop(self, name: int, group: int, home: int | None) -> tuple[bool, bool]:
        """Drop one reference; return (whether it existed, whether it was the last of all)."""
        if group != home:
            return self._drop_foreign(name, group)
        copies = self.copies.get(name, 0)
        if copies < 0:
            return False, False
        if copies or name in self.foreign:
            if copies == 1:
                del self.copies[name]
            else:
                self.copies[name] = copies - 1
            return True, False
        return True, True

    def has(self, name: int, group: int, home: int | None) -> bool:
        """Say whether a held block has a reference of this group."""
        if group == home:
            return self.copies.get(name, 0) >= 0
        return group in self.foreign.get(name, ())

    def _drop_foreign(self, name: int, group: int) -> tuple[bool, bool]:
        groups = self.foreign.get(name)
        if groups is None or group not in groups:
            return False, False
        groups[group] -= 1
        if groups[group] == 0:
            del groups[group]
        if groups:
            return True, False
        del self.foreign[name]
        if self.copies.get(name, 0) < 0:
            del self.copies[name]
            return True, True
        return True, False

    def forget(self, name: int) -> None:
        """Drop all references."""
        self.copies.pop(name, None)
        self.foreign.pop(name, None)


class Holder:
    """One rank between its attachment, or last clear, and the next clear."""

    __slots__ = (
        "_others",
        "bit",
        "blocks",
        "counts",
        "hearsay",
        "holder_id",
        "home",
        "late",
        "limiting",
        "rank",
        "runs",
        "slot",
        "waiting",
        "where",
    )

    def __init__(
        self, rank: WorkerRank, slot: int, holder_id: int, others: Sequence[Holder | None] = ()
    ) -> None:
        """Make one that holds nothing; `others` are all holders of the tree by their ids."""
        self.rank = rank
        self.slot = slot
        self.holder_id = holder_id
        self.bit = 1 << holder_id
        self._others = others
        self.home: int | None = None  # group whose references need no entry in `counts`
        # engine hash → the node of its one content position, whatever the tier
        self.where: NameMap[Node] = NameMap()
        # node → this rank's engine hashes of it, aligned with the start of the edge. Beyond the
        # held positions it keeps each position's last name (0: none), because a dump needs it to
        # say where a block below a hole belongs. Engines that hash alike give a block the same
        # name: then their runs are one object.
        self.runs: dict[Node, bytes] = {}
        self.counts: list[ReferenceCounts | None] = [None] * len(Tier)
        self.blocks = [0] * len(Tier)  # held positions per tier
        self.waiting: dict[int, OrphanRoot] = {}  # unannounced engine hash → its orphans
        # names of blocks that arrived after their children, which have yet to be moved behind them
        self.late: list[int] = []
        # Per tier: names known from a dump that the engine has not announced since. A dump is one
        # moment of the history that a replay repeats: the first store of such a block is taken to
        # be the one in the dump, or the block would need one removal too many.
        self.hearsay: list[set[int]] | None = None
        # blocks of other cache groups than full attention; None: the engine reported none
        self.limiting: LimitingGroups | None = None

    @property
    def size(self) -> int:
        """Blocks that count towards the budget, those of all cache groups."""
        return len(self.where) + (len(self.limiting) if self.limiting is not None else 0)

    def references(self, tier: int) -> int:
        """Return how many blocks the engine reported on a tier, copies included."""
        counts = self.counts[tier]
        return self.blocks[tier] + (0 if counts is None else counts.more)

    def locate(self, node: Node, name: int) -> int:
        """Return the position inside `node` of a block that `where` locates there.

        O(1) for the last block of the run, otherwise a search at C speed over ≤ 4 KiB.
        """
        run = self.runs[node]
        key = pack_name(name)
        if node.full & self.bit:
            if node.aliases is None and run.endswith(key):
                return len(run) // HASH_BYTES - 1
            held = -1
        else:
            held = node.held_anywhere(self.holder_id)
        if node.aliases is not None:
            for position, names in (node.names_at(self.holder_id) or {}).items():
                if name in names:
                    return position
                held &= ~(1 << position)
        return self.find(run, key, held)

    def place_of(self, name: int) -> tuple[Node, int] | None:
        """Return where the block is that a name stands for."""
        node = self.where.get(name)
        return None if node is None else (node, self.locate(node, name))

    @staticmethod
    def find(run: bytes, key: bytes, held: int) -> int:
        """Return the position, among those in `held`, of a packed name in a run."""
        at = len(run) - HASH_BYTES if run.endswith(key) else run.rfind(key)
        while at % HASH_BYTES or not held >> (at // HASH_BYTES) & 1:
            # An unheld match is an old name; an unaligned match is coincidence.
            at = run.rfind(key, 0, at + HASH_BYTES - 1)
            assert at >= 0, "a name is in the run it is filed under"
        return at // HASH_BYTES

    def write(self, node: Node, position: int, packed: bytes) -> None:
        """Name the positions of `node` starting at `position`."""
        run = self.runs.get(node, b"")
        start = position * HASH_BYTES
        end = start + len(packed)
        if len(run) == start:
            run = run + packed if run else packed
        else:
            run = run[:start].ljust(start, b"\0") + packed + run[end:]
        others = node.members & ~self.bit
        if others:  # two are asked: where engines name blocks in many ways, some share nothing
            for one in {(others & -others).bit_length(), others.bit_length()}:
                other = self._others[one - 1]
                theirs = None if other is None else other.runs.get(node)
                if theirs == run:
                    run = theirs
                    break
        self.runs[node] = run
        node.members |= self.bit

    def names_held(self, node: Node, positions: int) -> Iterable[int]:
        """Return all engine hashes of the held positions among `positions`, aliases included."""
        names = numbers_in(self.runs[node])
        aliases = node.names_at(self.holder_id) or {}
        held = positions & node.held_anywhere(self.holder_id)
        if not aliases and held == all_ones(len(names)):
            return names
        found = [
            name
            for position, name in enumerate(names)
            if held >> position & 1 and position not in aliases
        ]
        for position, several in aliases.items():
            if positions >> position & 1:
                found.extend(several)
        return found

    def refile(self, names: Iterable[int], node: Node) -> None:
        """Record that the blocks with these names are now in `node`."""
        self.where.file(names, node)

    def name_at(self, node: Node, position: int) -> int | None:
        """Return this rank's name for a position, its last name if no longer held, None if unknown.

        A last name that now stands for another block is not returned.
        """
        aliases = node.names_at(self.holder_id)
        if aliases is not None and position in aliases:
            return next(iter(aliases[position]))
        name = self.last_name(node, position)
        if node.held_anywhere(self.holder_id) >> position & 1:
            return name
        return name if name and name not in self.where else None

    def last_name(self, node: Node, position: int) -> int:
        """Return the name written in the run; 0 means none where the position is no longer held."""
        start = position * HASH_BYTES
        return int.from_bytes(self.runs.get(node, b"")[start : start + HASH_BYTES], "little")

    def drop_reference(self, tier: int, name: int, group: int) -> tuple[bool, bool]:
        """Drop one reference to a held block; return (whether it existed, was it the last)."""
        counts = self.counts[tier]
        if counts is None:
            mine = group == self.home
            return mine, mine
        return counts.drop(name, group, self.home)

    def is_counted(self, tier: int, name: int, group: int) -> bool:
        """Say whether a block that is held on a tier has a reference of this group there."""
        counts = self.counts[tier]
        return group == self.home if counts is None else counts.has(name, group, self.home)

    def held(self, tier: int, group: int, names: Iterable[int]) -> int:
        """Return how many of the first of these blocks a group holds on a tier."""
        held = 0
        for name in names:
            if not (self.is_on(tier, name) and self.is_counted(tier, name, group)):
                break
            held += 1
        return held

    def is_sure(self, tier: int, group: int, name: int) -> bool:
        """Say whether the engine, and not only a dump, has reported that a group holds a block."""
        is_held = self.is_on(tier, name) and self.is_counted(tier, name, group)
        return is_held and (self.hearsay is None or name not in self.hearsay[tier])

    def is_on(self, tier: int, name: int) -> bool:
        """Say whether a block is held on a tier under this name."""
        node = self.where.get(name)
        if node is None or not (tier or any(self.blocks[1:])):
            return node is not None
        return self.holds(tier, (node, self.locate(node, name)), name)

    def holds(self, tier: int, place: tuple[Node, int], name: int) -> bool:
        """Say whether a block is held on a tier under this name, which is filed for the place."""
        node, position = place
        places = node.names_at(self.holder_id)
        if places is not None and position in places:
            return bool(places[position][name] >> tier & 1)
        return bool(node.held_on(self.holder_id, tier) >> position & 1)

    def counts_for_change(self, tier: int) -> ReferenceCounts:
        """Return the tier's counts, created on demand."""
        counts = self.counts[tier]
        if counts is None:
            counts = self.counts[tier] = ReferenceCounts()
        return counts

    def limiting_for_change(self) -> LimitingGroups:
        """Return the blocks of the groups that limit matches, created on demand."""
        if self.limiting is None:
            self.limiting = LimitingGroups()
        return self.limiting

    def note_hearsay(self, tier: int, names: Iterable[int]) -> None:
        """Record that these names come from a dump, not from the engine."""
        if self.hearsay is None:
            self.hearsay = [set() for _ in Tier]
        self.hearsay[tier].update(names)

    def confirm(self, tier: int, name: int) -> bool:
        """Note a store of a held block; return True if it only confirms what a dump said."""
        if self.hearsay is None or name not in self.hearsay[tier]:
            return False
        self.hearsay[tier].remove(name)
        return True

    def forget(self, name: int) -> None:
        """Drop the counts and hearsay of a name on every tier; `where` is unchanged."""
        for counts in self.counts:
            if counts is not None:
                counts.forget(name)
        for names in self.hearsay or ():
            names.discard(name)

    def group_of_store(self, group: int) -> int:
        """Return the group to count a store in; an empty holder makes it its home."""
        if not self.where or self.home is None or self.home == UNDECIDED_GROUP:
            self.home = group if group != UNDECIDED_GROUP or self.home is None else self.home
        return self.home if group == UNDECIDED_GROUP else group

    def group_of_removal(self, group: int) -> int:
        """Return the group to count a removal in; it decides the home of dumped blocks."""
        if self.home == UNDECIDED_GROUP:
            self.home = group
        return self.home if group == UNDECIDED_GROUP and self.home is not None else group
