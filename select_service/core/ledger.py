"""The book of active load of one partition: reservations, and P, D and requests per slot.

The only writer of load. It does not decide who gets a request, knows no HTTP and reads no clock;
`partition.py` books and frees here, `projection.py` reads the columns and the shared prefixes, and
`active_blocks.py` below counts distinct blocks. Contract section 4.
"""

from __future__ import annotations

from collections import Counter
from heapq import heapify, heappop, heappush
from math import inf
from typing import TYPE_CHECKING, Final

import numpy as np

from select_service.core.active_blocks import ActiveBlocks, ChainNode
from select_service.core.decode_blocks import DecodeBlocks

if TYPE_CHECKING:
    from collections.abc import Collection

    from numpy.typing import NDArray

    from indexer.types import PackedHashes

_ALARMS_SPARE: Final = 64
"""Alarms of freed reservations that may pile up beyond as many as are live, before a clean-up."""


class Reservation:
    """One booked request. Written by the ledger, but for the plain facts at the end."""

    __slots__ = (
        "alarm",
        "chain",
        "created",
        "expected_output_tokens",
        "faded_outputs",
        "fingerprint",
        "isl_tokens",
        "live",
        "lora_name",
        "origin",
        "output_fraction",
        "prefill_done",
        "prefill_tokens",
        "reservation_id",
        "selection_id",
        "slot",
        "touched",
        "track_prefill_tokens",
        "ttl_s",
        "whole_outputs",
    )

    def __init__(
        self, reservation_id: str, slot: int, chain: ChainNode, prefill_tokens: int, now: float
    ) -> None:
        self.reservation_id = reservation_id
        self.slot = slot
        self.chain = chain
        self.prefill_tokens = prefill_tokens  # as booked; see prefill_done
        self.prefill_done = False
        self.live = True
        self.whole_outputs = 0  # output blocks of weight 1
        self.faded_outputs = 0  # output blocks of weight output_fraction
        self.output_fraction = 1.0
        self.created = now
        self.touched = now  # last lifecycle call; the service may move it on by itself
        self.ttl_s = 0.0  # 0: never expires. Change it through Ledger.touch
        self.alarm = 0  # number of its valid entry in the heap of deadlines, 0: none
        # Facts the ledger only keeps:
        self.isl_tokens = 0
        self.selection_id: str | None = None
        self.lora_name: str | None = None
        self.expected_output_tokens: int | None = None
        self.track_prefill_tokens = True
        self.fingerprint: bytes | None = None  # of the request, to recognise a repeat (D14)
        self.origin: str | int = "local"  # or the router id of the replica it was learnt from

    @property
    def output_blocks(self) -> int:
        """Output blocks so far, whatever their fraction."""
        return self.whole_outputs + self.faded_outputs


class Ledger:
    """Active load per slot, kept up with every booking and lifecycle call.

    The columns are replaced, not resized, by `ensure`; read them through the ledger every time.
    """

    def __init__(self) -> None:
        self.prefill: NDArray[np.float64] = np.zeros(0)
        """P: booked prefill tokens of reservations whose prefill is not complete."""
        self.decode: NDArray[np.float64] = np.zeros(0)
        """D: weight of the distinct live blocks, rounded half up."""
        self.requests: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        """Live reservations."""
        self._prefill_tokens: list[int] = []  # P again; doubles would drift beyond 2^53
        self._weights = DecodeBlocks()
        self.blocks = ActiveBlocks(self._weights)
        self._by_slot: list[dict[str, Reservation]] = []
        self.live = 0  # reservations
        self._alarms: list[tuple[float, int, Reservation]] = []
        self._alarm_number = 0

    def ensure(self, capacity: int) -> None:
        """Make room for slots below `capacity`; never shrinks."""
        missing = capacity - len(self._by_slot)
        if missing <= 0:
            return
        self.prefill = np.concatenate([self.prefill, np.zeros(missing)])
        self.decode = np.concatenate([self.decode, np.zeros(missing)])
        self.requests = np.concatenate([self.requests, np.zeros(missing, dtype=np.int64)])
        self._prefill_tokens += [0] * missing
        self._by_slot += [{} for _ in range(missing)]
        self._weights.ensure(capacity)

    # -- lifecycle -----------------------------------------------------------------------------

    def book(  # noqa: PLR0913 - the facts of a booking, no more
        self,
        reservation_id: str,
        slot: int,
        sequence_hashes: PackedHashes,
        prefill_tokens: int,
        now: float,
        *,
        isl_tokens: int = 0,
        ttl_s: float = 0.0,
    ) -> Reservation:
        """Book a request on a slot below the capacity; the id must not be live in this ledger.

        `sequence_hashes` may hold any values in any order. O(nodes on the path of the chain), plus
        some tens of nanoseconds for each block that nobody has booked on any slot.
        """
        of_slot = self._by_slot[slot]
        assert reservation_id not in of_slot
        chain = self.blocks.acquire(sequence_hashes, slot)
        reservation = Reservation(reservation_id, slot, chain, prefill_tokens, now)
        reservation.isl_tokens = isl_tokens
        of_slot[reservation_id] = reservation
        self.live += 1
        self.requests[slot] = len(of_slot)
        self.decode[slot] = self._weights.count(slot)
        self._add_prefill(slot, prefill_tokens)
        if ttl_s:
            reservation.ttl_s = ttl_s
            self._set_alarm(reservation)
        return reservation

    def prefill_complete(self, reservation: Reservation, now: float) -> None:
        """The prompt is computed: its tokens leave P, its blocks stay. Repeatable."""
        assert reservation.live
        reservation.touched = now
        if not reservation.prefill_done:
            reservation.prefill_done = True
            self._add_prefill(reservation.slot, -reservation.prefill_tokens)

    def output_block(
        self, reservation: Reservation, decay_fraction: float | None, now: float
    ) -> None:
        """Add a private block; with a fraction, all blocks of this reservation alone get it.

        `decay_fraction` in [0, 1] is absolute, not cumulative; without it the fractions stay as
        they are and the new block weighs 1.
        """
        assert reservation.live
        reservation.touched = now
        slot = reservation.slot
        if decay_fraction is None:
            reservation.whole_outputs += 1
            self._weights.whole[slot] += 1
        else:
            outputs = reservation.output_blocks + 1
            self._drop_outputs(reservation)
            reservation.output_fraction = decay_fraction
            if decay_fraction == 1.0:
                reservation.whole_outputs = outputs
            else:
                reservation.faded_outputs = outputs
            self._weights.add(slot, outputs, decay_fraction)
            self.blocks.fade(reservation.chain, slot, decay_fraction)
        self.decode[slot] = self._weights.count(slot)

    def free(self, reservation: Reservation) -> None:
        """Take a live reservation out of the book."""
        assert reservation.live
        slot = reservation.slot
        of_slot = self._by_slot[slot]
        del of_slot[reservation.reservation_id]
        self.live -= 1
        reservation.live = False
        reservation.alarm = 0
        self.blocks.release(reservation.chain, slot)
        reservation.chain = self.blocks.root  # who still holds the reservation holds no blocks
        self._drop_outputs(reservation)
        self.requests[slot] = len(of_slot)
        self.decode[slot] = self._weights.count(slot)
        if not reservation.prefill_done:
            self._add_prefill(slot, -reservation.prefill_tokens)

    def drop_slot(self, slot: int) -> list[Reservation]:
        """Free everything on a slot whose rank has vanished; returns what was dropped."""
        dropped = list(self._by_slot[slot].values())
        for reservation in dropped:
            self.free(reservation)
        return dropped

    # -- expiry --------------------------------------------------------------------------------

    def touch(self, reservation: Reservation, now: float, ttl_s: float | None = None) -> None:
        """Note a sign of life, and a new time to live if one is given (0: never expires).

        Assigning `reservation.touched` does as well when the time to live stays. O(1): a deadline
        that moves away is noticed when the old one comes.
        """
        reservation.touched = now
        if ttl_s is not None and ttl_s != reservation.ttl_s:
            reservation.ttl_s = ttl_s
            reservation.alarm = 0
            if ttl_s:
                self._set_alarm(reservation)

    def expired(self, now: float, limit: int) -> list[Reservation]:
        """Live reservations whose time has passed since they were last touched.

        Looks at no more than `limit` deadlines; `next_expiry() <= now` tells that there is more to
        look at. Frees nothing: what is returned will be returned again until it is freed.
        """
        due: list[tuple[float, int, Reservation]] = []
        for _ in range(limit):
            if not self._alarms or self._alarms[0][0] > now:
                break
            entry = heappop(self._alarms)
            reservation = entry[2]
            if entry[1] != reservation.alarm:
                continue
            if reservation.touched + reservation.ttl_s > now:
                self._set_alarm(reservation)
            else:
                due.append(entry)
        for entry in due:
            heappush(self._alarms, entry)
        return [reservation for _, _, reservation in due]

    def next_expiry(self) -> float:
        """When `expired` may have something to do next; infinity if nothing can expire."""
        alarms = self._alarms
        while alarms and alarms[0][1] != alarms[0][2].alarm:
            heappop(alarms)
        return alarms[0][0] if alarms else inf

    # -- reading -------------------------------------------------------------------------------

    def shared_prefix(self, sequence_hashes: PackedHashes) -> list[tuple[int, int]]:
        """The m of contract 3.2 as groups (m > 0, mask of slots), m ascending, masks disjoint."""
        return self.blocks.shared_prefix(sequence_hashes)

    def chain_of(self, reservation: Reservation) -> PackedHashes:
        """The sequence hashes a live reservation was booked with."""
        assert reservation.live
        return self.blocks.chain(reservation.chain)

    def prefill_tokens(self, slot: int) -> int:
        """P as an exact integer, for answers."""
        return self._prefill_tokens[slot]

    def reservations_on(self, slot: int) -> Collection[Reservation]:
        """Live reservations of a slot, oldest booking first; a view."""
        return self._by_slot[slot].values()

    @property
    def alarms(self) -> int:
        """Deadlines in the heap, those of freed reservations included."""
        return len(self._alarms)

    # -- inside --------------------------------------------------------------------------------

    def _add_prefill(self, slot: int, tokens: int) -> None:
        if tokens:
            self._prefill_tokens[slot] += tokens
            self.prefill[slot] = self._prefill_tokens[slot]

    def _drop_outputs(self, reservation: Reservation) -> None:
        self._weights.whole[reservation.slot] -= reservation.whole_outputs
        if reservation.faded_outputs:
            self._weights.add(
                reservation.slot, -reservation.faded_outputs, reservation.output_fraction
            )
        reservation.whole_outputs = reservation.faded_outputs = 0

    def _set_alarm(self, reservation: Reservation) -> None:
        self._alarm_number += 1
        reservation.alarm = self._alarm_number
        deadline = reservation.touched + reservation.ttl_s
        heappush(self._alarms, (deadline, self._alarm_number, reservation))
        # Entries of the freed stay behind; at most half the heap may be such, or a busy service
        # with a long time to live would keep everything it has ever booked in that time.
        if len(self._alarms) > 2 * self.live + _ALARMS_SPARE:
            self._alarms = [alarm for alarm in self._alarms if alarm[1] == alarm[2].alarm]
            heapify(self._alarms)

    def check(self) -> None:
        """Assert every promise of the ledger; O(everything)."""
        self.blocks.check()
        assert self.live == sum(len(of_slot) for of_slot in self._by_slot)
        for slot, of_slot in enumerate(self._by_slot):
            assert self.requests[slot] == len(of_slot)
            waiting = sum(r.prefill_tokens for r in of_slot.values() if not r.prefill_done)
            assert self.prefill_tokens(slot) == waiting, "P is the sum of what is not complete"
            assert self.prefill[slot] == float(waiting)
            assert self.decode[slot] == self._weights.count(slot)
            if not of_slot:
                assert self.decode[slot] == 0, "an idle slot carries nothing, exactly"
        live = [r for of_slot in self._by_slot for r in of_slot.values()]
        assert all(r.live for r in live)
        alarms = Counter(entry[2] for entry in self._alarms if entry[1] == entry[2].alarm)
        assert alarms == Counter(r for r in live if r.ttl_s), "who can expire has one alarm"
