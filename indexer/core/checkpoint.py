"""The blocks of one rank as plain values, exactly, and back into a tree.

A dump (`dump.py`) is for peers: it contains what can be matched and omits counts, old names and
groups. A frozen rank contains everything that decides what the next event will do to it, so that a
rank which is thawed and then fed the batches after the freeze equals one that was never
interrupted.

The freeze is therefore a checkpoint of one moment, not a fuzzy one: while it runs, no event of
*this* rank may be applied (its stream is held for some milliseconds). A fuzzy walk would get
membership right too, because the last event of a block decides; but references are counted, and a
store that the walk has seen would count again when replayed. Other ranks continue meanwhile. All
they do to shared nodes is split them, which keeps the upper part's identity; merges are put off
while `KvIndex.freeze` runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec import Struct

from indexer.core.cache_groups import FrozenGroups
from indexer.core.holdings import mark
from indexer.core.node import Node, OrphanRoot, all_ones, bits
from indexer.core.packing import numbers_in, pack_name
from indexer.types import BASE_NAMESPACE, HASH_BYTES, Namespace, Tier

if TYPE_CHECKING:
    from collections.abc import Iterator

    from indexer.core.holder import Holder
    from indexer.core.radix_tree import RadixTree

ROOT: Final = -1
"""Parent number of the first block of a prompt."""

CHAIN_AT_ONCE: Final = 64
"""Ancestor nodes frozen in a row before other work gets its turn."""


class Several(Struct, frozen=True, array_like=True):
    """A position with several names in its engine: name and tier mask of each."""

    position: int
    names: list[tuple[int, int]]


class Counted(Struct, frozen=True, array_like=True):
    """A block that is not simply held once in the home group, see `holder.ReferenceCounts`."""

    tier: int
    name: int
    copies: int
    foreign: dict[int, int]


class CheckpointRun(Struct, frozen=True, array_like=True, omit_defaults=True):
    """A rank's share of one node. Masks of positions are little-endian bytes."""

    number: int  # from 0, parents before children
    parent: int  # number of the preceding run, or ROOT
    edge: bytes
    names: bytes
    device: bytes | None = None  # None: all positions
    lower: list[bytes] | None = None  # host, disk, external
    several: list[Several] | None = None
    counted: list[Counted] | None = None
    hearsay: list[bytes] | None = None  # per tier: names known from a dump only
    namespace: Namespace | None = None  # only for a run without a parent
    waits_for: int | None = None  # name of the missing block that such a run waits for
    limiting: FrozenGroups | None = None  # blocks of other cache groups, in a run without others


def freeze(holder: Holder) -> Iterator[CheckpointRun]:
    """Yield everything a holder has, parents first, some microseconds each.

    Copying the list of nodes is the one step that is not cut into slices: 10 ns per node.
    """
    work = _Freezer(holder)
    yield from work.freeze([*holder.runs])
    # other ranks may have split our nodes meanwhile; the lower parts were appended
    while len(holder.runs) > work.looked_at:
        added = len(holder.runs) - work.looked_at
        yield from work.freeze([*reversed([*_last(holder.runs, added)])])
    if holder.limiting is not None:
        for number, piece in enumerate(holder.limiting.frozen(), work.frozen_runs):
            yield CheckpointRun(number, ROOT, b"", b"", limiting=piece)


def _last(runs: dict[Node, bytes], count: int) -> Iterator[Node]:
    for _, node in zip(range(count), reversed(runs), strict=False):
        yield node


class _Freezer:
    def __init__(self, holder: Holder) -> None:
        self.looked_at = 0
        self._holder = holder
        self._done: dict[Node, tuple[int, int]] = {}  # node → (number, size when it was frozen)

    @property
    def frozen_runs(self) -> int:
        """Runs frozen so far."""
        return len(self._done)

    def freeze(self, nodes: list[Node]) -> Iterator[CheckpointRun]:
        self.looked_at += len(nodes)
        for node in nodes:
            while (runs := self._freeze_down_to(node)) is not None:
                yield from runs

    def _freeze_down_to(self, node: Node) -> list[CheckpointRun] | None:
        """Freeze the topmost unfrozen ancestors of `node`; None if nothing is left to freeze.

        No state is kept between two calls: the path may have been split meanwhile.
        """
        chain: list[Node] = []
        above: Node | None = node
        while above is not None and above.edge and above not in self._done:
            chain.append(above)
            above = above.parent
        if above is None or not chain:
            return None  # done, or no longer in the tree
        number, frozen = self._done.get(above, (ROOT, 0))
        reached = above.size
        runs: list[CheckpointRun] = []
        for below in reversed(chain):
            if reached < frozen:  # split off from a node that was frozen whole
                reached += below.size
                continue
            run = self._freeze(below, number)
            runs.append(run)
            number, frozen = self._done[below] = (run.number, below.size)
            reached = below.size
            if len(runs) == CHAIN_AT_ONCE:
                break
        return runs or None

    def _freeze(self, node: Node, parent: int) -> CheckpointRun:
        holder = self._holder
        me = holder.holder_id
        edge, names = node.edge, holder.runs.get(node, b"")
        ones = all_ones(node.size)
        device = node.held(me, ones)
        held = node.held_anywhere(me)
        if held != ones and holder.runs.keys().isdisjoint(node.children.values()):
            reach = held.bit_length()  # the rest belongs to others, or is old names only
            edge, names, ones = (
                edge[: reach * HASH_BYTES],
                names[: reach * HASH_BYTES],
                all_ones(reach),
            )
        lower = None
        if held != device or node.lower is not None:
            lower = [_mask(node.held_on(me, tier)) for tier in Tier if tier]
        top = node.parent if parent == ROOT else None
        return CheckpointRun(
            number=len(self._done),
            parent=parent,
            edge=edge,
            names=names,
            device=None if device == ones else _mask(device),
            lower=lower if lower and any(lower) else None,
            several=_several(node, me),
            counted=_counted(holder, node, held),
            hearsay=_hearsay(holder, node, held),
            namespace=node.namespace if parent == ROOT else None,
            waits_for=top.parent_hash if isinstance(top, OrphanRoot) else None,
        )


def _mask(positions: int) -> bytes:
    return positions.to_bytes((positions.bit_length() + 7) // 8, "little")


def _several(node: Node, holder_id: int) -> list[Several] | None:
    places = node.names_at(holder_id)
    if not places:
        return None
    return [Several(position, [*names.items()]) for position, names in places.items()]


def _counted(holder: Holder, node: Node, held: int) -> list[Counted] | None:
    if not any(counts and (counts.copies or counts.foreign) for counts in holder.counts):
        return None
    names = [*holder.names_held(node, held)]
    found = [
        Counted(tier, name, counts.copies.get(name, 0), counts.foreign.get(name, {}).copy())
        for tier, counts in enumerate(holder.counts)
        if counts is not None
        for name in names
        if name in counts.copies or name in counts.foreign
    ]
    return found or None


def _hearsay(holder: Holder, node: Node, held: int) -> list[bytes] | None:
    if holder.hearsay is None or not any(holder.hearsay):
        return None
    names = [*holder.names_held(node, held)]
    return [
        b"".join(pack_name(name) for name in names if name in known) for known in holder.hearsay
    ]


class _Place(NamedTuple):
    """Where a run ends: a held block, and the unheld positions behind it."""

    anchor: int | None  # its name; None: before all blocks
    waits_for: int | None
    namespace: Namespace
    edge: bytes
    names: bytes


class RankChanged(Exception):
    """The rank was cleared or detached while it was being frozen."""


class BadCheckpoint(ValueError):
    """The input is not the frozen runs of one rank in order."""


class CheckpointRestore:
    """Fills an empty holder with frozen runs; nothing else may write to it meanwhile."""

    def __init__(self, tree: RadixTree, holder: Holder) -> None:
        assert not holder.where
        assert not holder.waiting
        self.holder = holder
        self._tree = tree
        self._places: list[_Place] = []  # by number of the run

    def add(self, run: CheckpointRun) -> None:
        """Add the next run. O(blocks), some 15 µs plus 0.1 µs per block.

        Raises:
            BadCheckpoint: its parent run has not been added.
        """
        if run.number != len(self._places) or not ROOT <= run.parent < run.number:
            raise BadCheckpoint("runs are not in order")
        if run.limiting is not None:
            self.holder.limiting_for_change().thaw(run.limiting)
        if run.parent == ROOT:
            start = _Place(None, run.waits_for, run.namespace or BASE_NAMESPACE, b"", b"")
        else:
            start = self._places[run.parent]
        shift = len(start.edge) // HASH_BYTES
        edge = start.edge + run.edge
        names = start.names + run.names
        size = len(run.edge) // HASH_BYTES
        masks = [0] * len(Tier)
        masks[0] = (1 << size) - 1 if run.device is None else int.from_bytes(run.device, "little")
        for tier, mask in enumerate(run.lower or (), 1):
            masks[tier] = int.from_bytes(mask, "little")
        masks = [mask << shift for mask in masks]
        reach = (masks[0] | masks[1] | masks[2] | masks[3]).bit_length()
        if reach * HASH_BYTES > min(len(edge), len(names)):
            raise BadCheckpoint("more is held than there is")
        several = {
            place.position + shift: {name: tiers for name, tiers in place.names}  # noqa: C416
            for place in run.several or ()
        }
        if not reach:
            self._places.append(start._replace(edge=edge, names=names.ljust(len(edge), b"\0")))
            return
        cut = reach * HASH_BYTES
        self._lay(start, edge[:cut], names[:cut], masks, several)
        last = several.get(reach - 1)
        anchor = (
            next(iter(last)) if last else int.from_bytes(names[cut - HASH_BYTES : cut], "little")
        )
        rest = edge[cut:]
        old = names[cut:].ljust(len(rest), b"\0")
        self._places.append(_Place(anchor, None, start.namespace, rest, old))
        self._count(run)

    def _origin(self, start: _Place) -> tuple[Node, int]:
        # by name, because other ranks may have split or merged the node since
        holder = self.holder
        if start.anchor is None and start.waits_for is not None:
            root = holder.waiting.get(start.waits_for)
            return root or self._tree.expect(holder, start.waits_for, start.namespace), 0
        place = self._tree.place_behind(holder, start.anchor)
        if place is None:
            raise BadCheckpoint("a run follows nothing")
        return place

    def _lay(
        self,
        start: _Place,
        edge: bytes,
        names: bytes,
        masks: list[int],
        several: dict[int, dict[int, int]],
    ) -> None:
        holder, tree = self.holder, self._tree
        done = 0
        for node, position, count in tree.make_path(
            *self._origin(start), edge, start.namespace, holder
        ):
            ones = all_ones(count)
            held = 0
            piece = names[done * HASH_BYTES : (done + count) * HASH_BYTES]
            holder.write(node, position, piece)
            for tier, mask in enumerate(masks):
                some = mask >> done & ones
                if some:
                    mark(holder, tier, node, some << position)
                    held |= some
            here = (
                {at: several[at + done] for at in range(count) if at + done in several}
                if several
                else {}
            )
            filed = numbers_in(piece)
            if held == ones and not here:
                holder.refile(filed, node)
            else:
                holder.refile((filed[at] for at in bits(held) if at not in here), node)
                for at, own in here.items():
                    holder.refile(own, node)
                    node.put_names(holder.holder_id, position + at, own)
            tree.note_dust(node)
            done += count

    def _count(self, run: CheckpointRun) -> None:
        holder = self.holder
        for one in run.counted or ():
            counts = holder.counts_for_change(one.tier)
            if one.copies:
                counts.copies[one.name] = one.copies
            if one.foreign:
                counts.foreign[one.name] = one.foreign
        for tier, names in enumerate(run.hearsay or ()):
            holder.note_hearsay(tier, numbers_in(names))
