"""Which hash values occur at more than one place of the trie of active chains.

D counts hash *values*, the trie knows *positions*. Chained hashes occur at one place only, but a
client may send any numbers: a value at several places becomes a `Repeat` with its own counts, and
its nodes count only their `plain` blocks. `active_blocks.py` is the only caller.

Detecting repeats costs one set operation in C per new block; the repeats themselves cost a Python
step each.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, Final

from indexer.compiled import usable
from indexer.core.packing import unpack_native
from indexer.types import HASH_BYTES
from select_service.core.ledger.chain_nodes import Repeat

if not TYPE_CHECKING and usable("select_service.core._value_set", 1):
    from select_service.core._value_set import ValueSet
else:
    from select_service.core.ledger.plain_value_set import ValueSet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from indexer.types import PackedHashes
    from select_service.core.ledger.chain_nodes import ChainNode

_KEEPS_RUNS: Final[bool] = hasattr(ValueSet, "enter_run")
"""Whether runs are kept as Python objects, which halves the cost of removing them. The compiled
kernel keeps none."""


class BlockPlaces:
    """The values of all nodes of a trie, with the repeats among them."""

    __slots__ = (
        "_home",
        "_home_dues",
        "_repeats",
        "_values",
        "_walk",
    )

    def __init__(self, walk: Callable[[], Iterable[ChainNode]]) -> None:
        self._walk = walk  # iterates over the nodes entered so far
        self._values = ValueSet()  # of all nodes
        self._repeats: dict[int, Repeat] = {}
        # The home of every value that is not a repeat. Only needed to find where a new repeat was
        # before, so it is built when the first one appears and dropped when no longer needed.
        self._home: dict[int, ChainNode] | None = None
        self._home_dues = 0  # values still to be entered before dropping it pays off

    @property
    def indexed(self) -> bool:
        """Whether the home of every value is recorded."""
        return self._home is not None

    def enter(self, node: ChainNode) -> None:
        """Add a node that no slot holds yet and that is not in the trie yet."""
        blocks = len(node.edge) // HASH_BYTES
        self._home_dues -= blocks
        if _KEEPS_RUNS:
            node.run = run = unpack_native(node.edge)
            fresh = self._values.enter_run(run)
        else:
            fresh = self._values.enter(node.edge)
        if fresh != blocks:
            self._enter_repeats(node, fresh)
        if self._home is not None:
            self._rehome(node)

    def leave(self, node: ChainNode) -> None:
        """Remove a node that no slot holds any more."""
        if self._home is None and not node.repeats:
            self._leave_whole(node)  # nearly all of them go this way
            return
        if self._home is not None:
            deque(map(self._home.__delitem__, self._plain_values(node)), 0)
        if not node.repeats:
            self._leave_whole(node)
        else:
            for value in self._plain_values(node):
                self._values.discard(value)
        for repeat in node.repeats or ():
            del repeat.homes[node]
            self._settle(repeat)
        # Building the index costs about as much as entering every value. Keeping it until that many
        # have been entered again makes a client with occasional repeats cost double, not n-fold.
        if not self._values or (not self._repeats and self._home_dues <= 0):
            self._home = None

    def _leave_whole(self, node: ChainNode) -> None:
        if node.run is None:
            self._values.leave(node.edge)
        else:
            self._values.leave_run(node.run)

    def split(self, upper: ChainNode, lower: ChainNode) -> None:
        """Divide the values of `lower` after a split; `upper` is new, with the same slots."""
        lower.run = None
        if not lower.repeats:
            lower.plain -= upper.plain
        else:
            counts = Counter(_unpack(upper.edge))
            repeats, upper.repeats = lower.repeats, set()
            for repeat in tuple(repeats):
                if above := counts[repeat.value]:
                    self._move_up(repeat, above, upper, lower)
            lower.plain -= upper.plain
        self._rehome(upper)

    def join(self, upper: ChainNode, lower: ChainNode) -> None:
        """Undo a split; `upper` must still have its edge, the edge of `lower` does not matter."""
        lower.run = None
        self._rehome(upper, lower)
        lower.plain += upper.plain
        if not upper.repeats:
            return
        for repeat in upper.repeats:
            if lower in repeat.homes:
                for slot in upper.refs:
                    repeat.held[slot] -= 1
            repeat.homes[lower] = repeat.homes.get(lower, 0) + repeat.homes.pop(upper)
        lower.repeats = upper.repeats | (lower.repeats or set())

    # -- repeats -------------------------------------------------------------------------------

    def _enter_repeats(self, node: ChainNode, fresh: int) -> None:
        counts = Counter(_unpack(node.edge))
        known = counts.keys() & self._repeats.keys()
        if fresh != len(counts) - len(known) and self._home is None:
            self._home = {}
            self._home_dues = len(self._values)
            for home in self._walk():
                self._rehome(home)
        elsewhere = counts.keys() & self._home.keys() if self._home is not None else set()
        node.repeats = set()
        for value, count in counts.items():
            if value in known:
                repeat = self._repeats[value]
            elif value in elsewhere:
                repeat = self._take_out(value)
            elif count > 1:
                repeat = self._repeats[value] = Repeat(value)
            else:
                continue
            repeat.homes[node] = count
            node.repeats.add(repeat)
            node.plain -= count

    def _take_out(self, value: int) -> Repeat:
        """Turn a plain value into a repeat, keeping its fraction."""
        assert self._home is not None
        home = self._home.pop(value)
        home.plain -= 1
        repeat = self._repeats[value] = Repeat(value)
        repeat.homes[home] = 1
        repeat.held = dict.fromkeys(home.refs, 1)
        repeat.faded = home.faded.copy()
        if home.repeats is None:
            home.repeats = set()
        home.repeats.add(repeat)
        return repeat

    def _settle(self, repeat: Repeat) -> None:
        """Remove a repeat without a home; make it plain again if its only home fits.

        Otherwise a popular prompt that some client once sent backwards would stay slow for ever.
        """
        if not repeat.homes:
            del self._repeats[repeat.value]
            self._values.discard(repeat.value)
            return
        (home, count), *others = repeat.homes.items()
        if others or count > 1 or repeat.faded != home.faded:
            return
        assert home.repeats is not None
        home.repeats.discard(repeat)
        home.plain += 1
        del self._repeats[repeat.value]
        if self._home is not None:
            self._home[repeat.value] = home

    def _move_up(self, repeat: Repeat, above: int, upper: ChainNode, lower: ChainNode) -> None:
        assert upper.repeats is not None
        assert lower.repeats is not None
        upper.plain -= above
        upper.repeats.add(repeat)
        repeat.homes[upper] = above
        if repeat.homes[lower] > above:
            repeat.homes[lower] -= above
            for slot in upper.refs:
                repeat.held[slot] += 1
        else:
            del repeat.homes[lower]
            lower.repeats.discard(repeat)

    # -- plain values --------------------------------------------------------------------------

    def _rehome(self, source: ChainNode, home: ChainNode | None = None) -> None:
        if self._home is not None:
            self._home.update(dict.fromkeys(self._plain_values(source), home or source))

    def _plain_values(self, node: ChainNode) -> list[int]:
        values = _unpack(node.edge)
        if node.repeats:
            return [value for value in values if value not in self._repeats]
        return values

    def check(self, nodes: list[ChainNode]) -> None:
        """Assert all invariants, given all nodes of the trie; O(everything)."""
        homes: dict[int, dict[ChainNode, int]] = {}
        for node in nodes:
            for value, count in Counter(_unpack(node.edge)).items():
                homes.setdefault(value, {})[node] = count
            plain = self._plain_values(node)
            assert node.plain == len(plain), "plain adds up"
            assert node.run is None or list(node.run) == _unpack(node.edge), "a run is the edge's"
            assert len({repeat.value for repeat in node.repeats or ()}) == len(node.repeats or ())
            assert all(self._home is None or self._home[value] is node for value in plain)
        assert set(self._values) == homes.keys(), "the set of values is the trie's"
        assert len(self._values) == len(homes)
        assert self._home is None or len(self._home) == len(homes) - len(self._repeats)
        for value, places in homes.items():
            assert value in self._repeats or sum(places.values()) == 1, "a repeat is known as such"
        for value, repeat in self._repeats.items():
            assert repeat.value == value
            assert repeat.homes == homes[value], "a repeat knows all its places"
            assert all(repeat in (home.repeats or ()) for home in repeat.homes)
            held = Counter(slot for home in repeat.homes for slot in home.refs)
            assert repeat.held == held, "a repeat knows who holds it"
            assert repeat.faded.keys() <= held.keys(), "a fraction dies with its block"


def _unpack(edge: PackedHashes) -> list[int]:
    # In native byte order: the values only need to be told apart.
    return memoryview(edge).cast("Q").tolist()
