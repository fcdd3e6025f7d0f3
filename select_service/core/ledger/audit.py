"""Whether the book of active load adds up: its columns against its reservations.

Every booking and lifecycle call changes the columns incrementally. Here the load of each slot is
recomputed from its reservations. Nothing is changed, and nothing runs unless an audit is requested.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from indexer.core.packing import unpack_native
from indexer.types import HASH_BYTES
from select_service.core.ledger.exact_sums import rounded, rounded_sum, units

if TYPE_CHECKING:
    from collections.abc import Iterator

    from select_service.core.ledger.active_blocks import ActiveBlocks
    from select_service.core.ledger.ledger import Ledger
    from select_service.core.ledger.reservation import LedgerReservation

STEPS_PER_TURN: Final = 256
"""Reservations, runs of their blocks, and `BLOCKS_PER_STEP` each visited in one go: some 100 µs."""

BLOCKS_PER_STEP: Final = 16
"""Blocks that cost about as much to visit as one reservation."""


Column = Literal["requests", "computing", "prefill", "decode", "context"]


class LedgerDifference(NamedTuple):
    """A value that does not add up."""

    slot: int | None  # None: over all slots
    what: Column
    carried: int
    recomputed: int


class _Sums:
    """The load of the reservations of one generation."""

    def __init__(self, blocks: ActiveBlocks, generation: int) -> None:
        self.steps = 0
        self._blocks, self._generation = blocks, generation
        self._whole = self._faded = 0
        self._nodes: set[int] = set()  # of chains: a node shared by several is visited once
        self._values: set[int] = set()
        self._requests = self._computing = self._prefill = self._context = 0

    def add(self, reservation: LedgerReservation) -> None:
        self._requests += 1
        self._context += _attended(reservation)
        if not reservation.prefill_done:
            self._computing += 1
            self._prefill += reservation.prefill_tokens
        self._whole += reservation.whole_outputs
        self._faded += reservation.faded_outputs * units(reservation.output_fraction)
        self.steps += 1
        node, counts = reservation.chain, self._blocks.counts
        while node.parent is not None and id(node) not in self._nodes:
            self._nodes.add(id(node))
            fresh = set(unpack_native(node.edge)) - self._values
            self._values |= fresh
            self._whole += len(fresh)
            weights = counts.weights(self._generation, node.edge)
            for value in fresh & weights.keys():
                self._whole -= 1
                self._faded += units(weights[value])
            self.steps += 1 + len(node.edge) // HASH_BYTES // BLOCKS_PER_STEP
            node = node.parent

    def load(self, max_num_seqs: int, wait: int) -> dict[Column, int]:
        """Return the load by column; the context includes what the next request waits for."""
        return {
            "requests": self._requests,
            "computing": self._computing,
            "prefill": self._prefill,
            "decode": rounded_sum(self._whole, self._faded),
            "context": self._context + wait * max(0, self._requests + 1 - max_num_seqs),
        }


def _attended(reservation: LedgerReservation) -> int:
    """The blocks a request attends to, plus its fixed weight; see `SlotLoads.context`."""
    blocks, fraction = reservation.prompt_blocks, reservation.output_fraction
    blocks += reservation.output_blocks
    return blocks if fraction == 1.0 else rounded(fraction * blocks)


def audit(ledger: Ledger) -> Iterator[LedgerDifference | None]:
    """Yield what does not add up, and None whenever others may have a turn.

    Changes during such a turn are not differences: a slot that seems to differ is checked once more
    without a break, at a µs for each of its reservations and runs, and for sixteen of its blocks.
    """
    for slot in range(len(ledger.loads.prefill_left)):
        sums = _Sums(ledger.blocks, ledger.generation_of(slot))
        for reservation in tuple(ledger.reservations_on(slot)):
            if sums.steps >= STEPS_PER_TURN:
                sums.steps = 0
                yield None
            sums.add(reservation)
        if _load(ledger, slot, sums) != _carried(ledger, slot):
            yield from _differences(ledger, slot)
        yield None
    yield from _totals(ledger)


def _differences(ledger: Ledger, slot: int) -> list[LedgerDifference]:
    sums = _Sums(ledger.blocks, ledger.generation_of(slot))
    for reservation in ledger.reservations_on(slot):
        sums.add(reservation)
    carried, recomputed = _carried(ledger, slot), _load(ledger, slot, sums)
    return [
        LedgerDifference(slot, what, carried[what], recomputed[what])
        for what in carried
        if carried[what] != recomputed[what]
    ]


def _load(ledger: Ledger, slot: int, sums: _Sums) -> dict[Column, int]:
    loads = ledger.loads
    return sums.load(int(loads.max_num_seqs[slot]), int(loads.wait[slot]))


def _carried(ledger: Ledger, slot: int) -> dict[Column, int]:
    loads = ledger.loads
    return {
        "requests": int(loads.requests[slot]),
        "computing": int(loads.computing[slot]),
        "prefill": loads.prefill_left[slot],
        "decode": int(loads.decode[slot]),
        "context": int(loads.context[slot]),
    }


def _totals(ledger: Ledger) -> list[LedgerDifference]:
    """Compare the totals over all slots with the sums of the columns. O(slots)."""
    loads = ledger.loads
    totals: tuple[tuple[Column, int, int], ...] = (
        ("requests", ledger.live, int(loads.requests.sum())),
        ("computing", loads.prefilling, int(loads.computing.sum())),
        ("prefill", loads.prefill_backlog, sum(loads.prefill_left)),
    )
    return [
        LedgerDifference(None, what, kept, slots) for what, kept, slots in totals if kept != slots
    ]
