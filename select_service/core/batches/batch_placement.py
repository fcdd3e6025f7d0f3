"""Takes one request of a wave to its planned rank, judged like any other request.

Unlike for a single request, its prompt is already read, its planned rank is chosen if it may be,
prefixes that others of the wave compute there count as cached, and it never waits. The caller
starts nothing before the whole wave is answered, so whatever it would wait for might come after it.
`batch_selection.py` calls this for each sample.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NoReturn, cast

import numpy as np

from indexer.core.tiers import Matches
from select_service.core.admission.queue import Ticket
from select_service.core.effects import NOTHING
from select_service.core.operations.selection import SelectionCalls
from select_service.core.operations.waiting_requests import endpoint_of
from select_service.errors import NoEligibleWorker, WouldWait
from select_service.types import CacheThreshold

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from indexer.core.tiers import SlotTable
    from select_service.core.admission.controller import AdmissionController
    from select_service.core.admission.partition_admission import PartitionAdmission
    from select_service.core.admission.policy_api import Ask
    from select_service.core.admission.queue import Planned
    from select_service.core.columns import Rows
    from select_service.core.effects import Effects
    from select_service.core.operations.waiting_requests import WaitingRequests
    from select_service.core.partition import Partition
    from select_service.core.pricing.prompt import Prompt
    from select_service.core.pricing.weights import Weights
    from select_service.core.reservations.lifecycle import Lifecycle
    from select_service.core.routing.place import Placer
    from select_service.core.routing.read import RequestReader
    from select_service.types import (
        Answer,
        PairSelection,
        SelectAndReserveRequest,
        Selection,
        SelectRequest,
    )
    from select_service.types.admission import AdmissionSettings

    Read = tuple[Partition, Prompt, Weights]

__all__ = ["BatchPlacement", "expecting"]


class BatchPlacement:
    """Places the samples of waves, one by one."""

    def __init__(
        self,
        reader: RequestReader,
        desk: Lifecycle,
        admitting: AdmissionController,
        placing: Placer,
        room: WaitingRequests,
        rng: random.Random,
    ) -> None:
        self._known = _KnownPrompt(reader)
        self._placing = _Guided(placing, admitting.settings)
        self._selecting = _Guiding(
            reader=cast("RequestReader", self._known),
            desk=desk,
            admitting=admitting,
            placing=cast("Placer", self._placing),
            room=room,
            rng=rng,
        )

    def choose(
        self, request: SelectRequest, read: Read | None, planned: Planned | None, now: float
    ) -> tuple[Answer, Effects]:
        """Select a worker for one sample.

        Args:
            request: the sample's.
            read: its prompt; None: it is read now.
            planned: where it should go; None: wherever.
            now: monotonic seconds.

        Raises:
            ServiceError: as /select, and `WouldWait`.
        """
        self._expect(read, planned)
        return cast("tuple[Answer, Effects]", self._selecting.select(request, now))

    def book(
        self,
        request: SelectAndReserveRequest,
        unknown: bytes,
        read: Read | None,
        planned: Planned | None,
        now: float,
    ) -> tuple[Answer, Effects]:
        """Select a worker for one sample, and book it.

        Raises:
            ServiceError: as /select_and_reserve, and `WouldWait`.
        """
        self._expect(read, planned)
        self._selecting.now = now
        reserve = self._selecting.select_and_reserve
        return cast("tuple[Answer, Effects]", reserve(request, now, unknown=unknown))

    def _expect(self, read: Read | None, planned: Planned | None) -> None:
        self._known.read = read
        self._selecting.planned = planned
        self._placing.slot = -1 if planned is None else planned.slot
        self._placing.shared_tokens = 0 if planned is None else planned.shared_tokens


class _KnownPrompt:
    """Replaces the reader: the prompt of a sample was read along with its request."""

    def __init__(self, reader: RequestReader) -> None:
        self._reader = reader
        self.draining = reader.draining
        self.read: Read | None = None

    def selection(self, request: SelectRequest) -> Read:
        return self._reader.selection(request) if self.read is None else self.read


class _Guided:
    """Replaces placing: adds the prefix that others of the wave compute on the sample's rank."""

    def __init__(self, placing: Placer, settings: AdmissionSettings) -> None:
        self._placing = placing
        self._settings = settings
        self.refuse = placing.refuse
        self.repeated = placing.repeated
        self.slot = -1
        self.shared_tokens = 0

    def place(
        self,
        ticket: Ticket,
        rows: Rows,
        now: float,
        effects: Effects,
        matches: Matches | None = None,
    ) -> tuple[Answer, Effects]:
        if not self.shared_tokens:
            return self._placing.place(ticket, rows, now, effects, matches)
        index = ticket.partition.index
        matches = index.find_matches(ticket.prompt.block_hashes)
        blocks = self.shared_tokens // index.block_size
        asked = ticket.request.cache_hit_threshold
        if asked is None and not self._settings.cache_hit_threshold > 0.0:
            matches = expecting(matches, self.slot, blocks)
            return self._placing.place(ticket, rows, now, effects, matches)
        # the threshold applies to what is cached now
        self._placing.expects = partial(expecting, slot=self.slot, blocks=blocks)
        try:
            return self._placing.place(ticket, rows, now, effects, matches)
        finally:
            self._placing.expects = None


class _Guiding(SelectionCalls):
    """Selects as always, but prefers a rank, and refuses requests that would wait."""

    planned: Planned | None = None
    now = 0.0

    def _enter(self, ticket: Ticket, now: float) -> tuple[Answer, Effects]:
        partition, request = ticket.partition, ticket.request
        ticket.in_wave, ticket.planned = True, self.planned
        if request.priority is not None:
            self._admitting.class_of(request)
        keeper = partition.admission
        if keeper is not None:
            return self._pass_gate(ticket, keeper, now)
        number, rows = self._candidates(ticket)
        if partition.queues.must_wait(number, rows):
            raise WouldWait(partition.queues.return_s(now))
        return self._placing.place(ticket, self._guide(rows, partition), now, NOTHING)

    def _again(
        self, request: SelectAndReserveRequest, known: Selection | PairSelection | Ticket
    ) -> Answer:
        """Return the earlier answer; a wave does not wait with a request that has none yet."""
        if isinstance(known, Ticket):
            known.holders -= 1
            raise WouldWait(known.partition.queues.return_s(self.now))
        return cast("Answer", super()._again(request, known))

    def _guide(self, rows: Rows, partition: Partition) -> Rows:
        """Return only the planned rank, if it may be chosen."""
        slot = -1 if self.planned is None else self.planned.slot
        keeper = partition.admission
        there = 0 <= slot < rows.stop if isinstance(rows, slice) else bool((rows == slot).any())
        if not there:
            return rows
        alone = np.array([slot], dtype=np.int64)
        return alone if keeper is None or keeper.can_take(alone) else rows

    def _pass_gate(
        self, ticket: Ticket, keeper: PartitionAdmission, now: float
    ) -> tuple[Answer, Effects]:
        """Pass the gate as single requests do, except that none gives way and none waits."""
        partition, gate = ticket.partition, keeper.gate
        keeper.now = now
        if keeper.changes.look:
            keeper.refresh(now)
        ask = self._admitting.ask(ticket)
        try:
            number, rows = self._candidates(ticket)
        except NoEligibleWorker as none:
            refused = keeper.refuse(ask, "unavailable", str(none), none.code, now)
            none.retry_after_s = refused.retry_after_s
            raise
        ask, decision = keeper.judge(ticket, ask, rows, now)
        if decision.outcome == "refuse":
            keeper.settle(decision, ask, now, endpoint_of(ticket))
            raise self._admitting.refusal(partition, decision, rows)
        if decision.outcome == "wait":
            self._turn_away(keeper, ask, now)
        rows = keeper.usable(rows)
        if gate.queue is None and partition.queues.must_wait(number, rows):
            self._turn_away(keeper, ask, now)
        answer, effects = self._placing.place(ticket, self._guide(rows, partition), now, NOTHING)
        if type(answer) is CacheThreshold:
            refusal = gate.admitted._replace(
                outcome="refuse", code="cache_threshold", gate="cache_hit"
            )
            gate.settle(refusal, ask, now)
        else:
            gate.admit(ask, now)
        return answer, effects

    def _turn_away(self, keeper: PartitionAdmission, ask: Ask, now: float) -> NoReturn:
        refusal = WouldWait(0.0)
        refused = keeper.refuse(ask, "waiting", str(refusal), refusal.code, now)
        refusal.retry_after_s = refused.retry_after_s
        raise refusal


class _OneSlotMore:
    """The slots of masks without one slot, which has a mask of its own."""

    def __init__(self, matches: Matches, slot: int) -> None:
        self._matches = matches
        self._slot = slot
        self._alone = np.array([slot], dtype=np.int64)

    def slots(self, mask: int) -> NDArray[np.int64]:
        """Return the slots of a mask; -1 is the mask of the one slot."""
        if mask == _ALONE:
            return self._alone
        slots = self._matches.slots(mask)
        others: NDArray[np.int64] = slots[slots != self._slot]
        return others


_ALONE = -1


def expecting(matches: Matches, slot: int, blocks: int) -> Matches:
    """Return the matches once a slot holds the prompt's first blocks; at least the present ones."""
    if sum(matches.rows().get(slot, (0,))) >= blocks:
        return matches
    table = _OneSlotMore(matches, slot)
    groups = [*matches.groups, (blocks, _ALONE)]
    below: Sequence[list[tuple[int, int]]] = (matches.host, matches.disk)
    return Matches(cast("SlotTable", table), groups, *map(list, below))
