"""Whether the book of active load adds up: its columns against its reservations.

Every booking and lifecycle call changes the columns incrementally. Here the load of each slot is
recomputed from its reservations. Nothing is changed, and nothing runs unless an audit is requested.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from select_service.core.ledger.decode_blocks import DecodeBlocks, rounded

if TYPE_CHECKING:
    from collections.abc import Iterator

    from select_service.core.ledger.ledger import Ledger
    from select_service.core.ledger.reservation import Reservation

__all__ = ["Difference", "audit"]

STEPS_PER_TURN: Final = 256
"""Reservations, and runs of their blocks, visited in one go: some 100 µs."""


Column = Literal["requests", "computing", "prefill", "decode", "context"]


class Difference(NamedTuple):
    """A value that does not add up."""

    slot: int | None  # None: over all slots
    what: Column
    carried: int
    recomputed: int


class _Sums:
    """The load of the reservations of one lane."""

    def __init__(self, lane: int) -> None:
        self.steps = 0
        self._lane = lane
        self._weights = DecodeBlocks()
        self._weights.ensure(1)
        self._seen: set[int] = set()  # nodes of chains: a node shared by several counts once
        self._requests = self._computing = self._prefill = self._context = 0

    def add(self, reservation: Reservation) -> None:
        self._requests += 1
        self._context += _attended(reservation)
        if not reservation.prefill_done:
            self._computing += 1
            self._prefill += reservation.prefill_tokens
        self._weights.add(0, reservation.whole_outputs, 1.0)
        self._weights.add(0, reservation.faded_outputs, reservation.output_fraction)
        node = reservation.chain
        self.steps += 1
        while node.parent is not None and id(node) not in self._seen:
            self._seen.add(id(node))
            self._weights.add(0, node.plain, node.faded.get(self._lane, 1.0))
            for repeat in node.repeats or ():  # values that also occur elsewhere: once each
                if id(repeat) not in self._seen:
                    self._seen.add(id(repeat))
                    self._weights.add(0, 1, repeat.faded.get(self._lane, 1.0))
                    self.steps += 1
            node = node.parent
            self.steps += 1

    def load(self, seats: int, wait: int) -> dict[Column, int]:
        """Return the load by column; the context includes what the next request waits for."""
        return {
            "requests": self._requests,
            "computing": self._computing,
            "prefill": self._prefill,
            "decode": self._weights.count(0),
            "context": self._context + wait * max(0, self._requests + 1 - seats),
        }


def _attended(reservation: Reservation) -> int:
    """The blocks a request attends to, plus its fixed weight; see `SlotLoads.context`."""
    blocks, fraction = reservation.prompt_blocks, reservation.output_fraction
    blocks += reservation.output_blocks
    return blocks if fraction == 1.0 else rounded(fraction * blocks)


def audit(ledger: Ledger) -> Iterator[Difference | None]:
    """Yield what does not add up, and None whenever others may have a turn.

    Changes during such a turn are not differences: a slot that seems to differ is checked once more
    without a break, at a µs for each of its reservations and runs.
    """
    for slot in range(len(ledger.loads.prefill_left)):
        sums = _Sums(ledger.lane_of(slot))
        for reservation in tuple(ledger.reservations_on(slot)):
            if sums.steps >= STEPS_PER_TURN:
                sums.steps = 0
                yield None
            sums.add(reservation)
        if _load(ledger, slot, sums) != _carried(ledger, slot):
            yield from _differences(ledger, slot)
        yield None
    yield from _totals(ledger)


def _differences(ledger: Ledger, slot: int) -> list[Difference]:
    sums = _Sums(ledger.lane_of(slot))
    for reservation in ledger.reservations_on(slot):
        sums.add(reservation)
    carried, recomputed = _carried(ledger, slot), _load(ledger, slot, sums)
    return [
        Difference(slot, what, carried[what], recomputed[what])
        for what in carried
        if carried[what] != recomputed[what]
    ]


def _load(ledger: Ledger, slot: int, sums: _Sums) -> dict[Column, int]:
    loads = ledger.loads
    return sums.load(int(loads.seats[slot]), int(loads.wait[slot]))


def _carried(ledger: Ledger, slot: int) -> dict[Column, int]:
    loads = ledger.loads
    return {
        "requests": int(loads.requests[slot]),
        "computing": int(loads.computing[slot]),
        "prefill": loads.prefill_left[slot],
        "decode": int(loads.decode[slot]),
        "context": int(loads.context[slot]),
    }


def _totals(ledger: Ledger) -> list[Difference]:
    """Compare the totals over all slots with the sums of the columns. O(slots)."""
    loads = ledger.loads
    totals: tuple[tuple[Column, int, int], ...] = (
        ("requests", ledger.live, int(loads.requests.sum())),
        ("computing", loads.prefilling, int(loads.computing.sum())),
        ("prefill", loads.prefill_backlog, sum(loads.prefill_left)),
    )
    return [Difference(None, what, kept, slots) for what, kept, slots in totals if kept != slots]
