"""The verb of a batch: many prompts placed together, independently or all-or-none.

A batch runs in steps, so that a thousand prompts do not block the loop: the caller drives a
generator, sends it the time and carries out the effects. `batch_plan.py` decides where each prompt
should go, and `routing/place.py` takes it there like any other request.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from msgspec import UNSET, Struct, UnsetType

from select_service.core.admission.gate import BUSY
from select_service.core.admission.policy_api import AdmissionRequest
from select_service.core.admission.queue import BatchSample, Planned
from select_service.core.batches.batch_plan import BatchMember, BatchPlan
from select_service.core.changes import Hold
from select_service.core.effects import NOTHING, Effects
from select_service.errors import (
    BatchNotPlaced,
    InvalidField,
    NoEligibleWorker,
    ServiceError,
    TooManyReservations,
    WouldWait,
    retry_after,
)
from select_service.types import CacheThreshold, SelectAndReserveRequest, Selection
from select_service.types.batches import (
    SelectBatchAnswer,
    SelectBatchItem,
    SelectBatchRank,
    SelectBatchResult,
)

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Generator, Iterator, Sequence
    from typing import TypeAlias

    from select_service.core.columns import Rows
    from select_service.core.counters import Counters
    from select_service.core.observers import BatchRecorder
    from select_service.core.partition import Partition
    from select_service.core.pricing.prompt import Prompt
    from select_service.core.pricing.weights import Weights
    from select_service.core.replication.claim import Claim
    from select_service.core.reservations.lifecycle import Lifecycle
    from select_service.core.routing.place import Placer
    from select_service.core.routing.read import RequestReader
    from select_service.types import CoreLimits, SelectRequest
    from select_service.types.batches import SelectBatchRequest

    Item: TypeAlias = tuple[SelectBatchItem, bytes] | ServiceError
    Steps: TypeAlias = Generator[Effects, float, SelectBatchAnswer]
    Read: TypeAlias = tuple[Partition, Prompt, Weights]

_SAMPLES_PER_STEP: Final = 16
"""Copied or planned in one step: some tens of microseconds."""


class _Sample(Struct, eq=False):
    """One sample in progress."""

    item: int  # index of its request
    request: SelectAndReserveRequest
    unknown: bytes
    read: Read | None = None
    rows: Rows | None = None  # None: not planned
    refusal: ServiceError | None = None  # why it has no candidates; a repeat needs none
    shared_tokens: int = 0
    placed_at: int = -1  # the slot it went to
    result: SelectBatchResult | None = None
    booked: str | None = None  # id of its booking, if this batch made it
    claim: Claim | None = None  # on it, if there are replicas


class BatchSelection:
    """Starts batches, and holds their collaborators."""

    def __init__(  # noqa: PLR0917 - collaborators
        self,
        reader: RequestReader,
        lifecycle: Lifecycle,
        placer: Placer,
        counters: Counters,
        rng: random.Random,
        limits: CoreLimits,
        free: Callable[[str, float], Effects],
        withdraw: Callable[[str, int, float], Effects],
        recorder: BatchRecorder | None = None,
    ) -> None:
        self.reader = reader
        self.lifecycle = lifecycle
        self.placer = placer
        self.counters = counters
        self.rng = rng
        self.free, self.withdraw = free, withdraw
        self.recorder = recorder
        self.limits = limits

    def begin(self, request: SelectBatchRequest, items: Sequence[Item]) -> RunningBatch:
        """Validate a batch as a whole; nothing is chosen yet.

        The `requests` of `request` are not read: `items` are these, each with the canonical
        bytes of its unknown members, or the error that made it unreadable.

        Raises:
            InvalidField: too many samples, or `atomic` without `reserve`.
        """
        most = self.limits.batch_samples_max
        samples = sum(1 if isinstance(one, ServiceError) else one[0].n for one in items)
        if samples > most:
            why = f"requests must be at most {most} samples"
            raise InvalidField(why, field="requests", limit="batch_samples_max")
        if request.atomic and not request.reserve:
            raise InvalidField("atomic needs reserve: nothing is booked without", field="atomic")
        self.counters.batches += 1
        self.counters.batch_samples += samples
        return RunningBatch(self, request, items)


class RunningBatch:
    """One batch in progress; no step awaits anything, and each takes about as long as a request."""

    def __init__(
        self, selection: BatchSelection, wants: SelectBatchRequest, items: Sequence[Item]
    ) -> None:
        self._selection = selection
        self._wants = wants
        self._items = items
        self._samples: list[_Sample] = []
        self._groups = 0  # of those placed now
        self._groups_before: set[int] = set()  # numbers of groups that repeats were placed in
        self._next_group = 0
        self._counted: set[str] = set()  # ids of booked samples
        self._computed = 0
        # values: requests, prefill tokens
        self._ranks: dict[tuple[str, str, int, int], list[int]] = {}
        self._hold = Hold(is_whole=wants.atomic)  # all-or-none is one commit

    def steps(self, now: float) -> Steps:
        """Place the batch, one step for each time sent to the generator.

        Raises:
            BatchNotPlaced: all-or-none was requested and a sample cannot be placed; all bookings of
                this batch are freed again.
        """
        for at, item in enumerate(self._items):
            for _ in self._read(at, item, now):
                now = yield NOTHING
        self._check_all()
        try:
            now = yield from self._repeats(now)
            by_partition: dict[Partition, list[int]] = {}
            for number, sample in enumerate(self._samples):
                if sample.rows is not None:
                    assert sample.read is not None
                    by_partition.setdefault(sample.read[0], []).append(number)
            self._check_all()
            for partition, numbers in by_partition.items():
                now = yield from self._place_planned(partition, numbers, now)
        except BatchNotPlaced:
            yield from self.undo(now)
            raise
        self._release()
        yield from self._publish_kept()
        return self._answer()

    def undo(self, now: float) -> Generator[Effects, float, None]:
        """End this batch's bookings one by one, except those already ended. Idempotent."""
        bookings = self._selection.lifecycle.bookings
        for sample in self._samples:
            if sample.booked is not None:
                name, sample.booked = sample.booked, None
                booking = bookings.live(name)
                is_held = booking is not None and booking.hold is self._hold
                claim = sample.claim  # booked anew, once that of another replica had ended
                is_again = claim is not None and claim.booked
                if booking is None or not (is_held or is_again):
                    # by now the id belongs to another booking, perhaps of a replica
                    self._selection.lifecycle.announcer.claims.give_up(claim, now)
                    continue
                try:
                    if self._hold.is_open and (is_held or booking.holders == 1):
                        effects = self._selection.free(name, now)
                    else:  # repeats of the request may have been answered
                        effects = self._selection.withdraw(name, booking.number, now)
                except ServiceError:  # its worker has gone, and the booking with it
                    continue
                now = yield effects
        self._release()
        yield from self._publish_kept()  # what is under a lease, or was published, stays

    def _release(self) -> None:
        """Make the bookings final: from now on replicas receive them, and the disk gets them."""
        self._hold.is_open = False
        changes = self._selection.lifecycle.bookings.changes
        if changes is not None:
            changes.release(self._hold)

    def _publish_kept(self) -> Iterator[Effects]:
        """Publish that nothing of it is taken back; until then the replicas let repeats wait."""
        claims = self._selection.lifecycle.announcer.claims
        held = (one.claim for one in self._samples if one.claim is not None)
        live = (claim for claim in held if claims.own.holds(claim) and not claim.growth.kept)
        while some := list(islice(live, self._selection.limits.replica_items_per_message_max)):
            yield Effects(published=[claims.keep(some)])

    # -- reading ---------------------------------------------------------------------------------

    def _read(self, at: int, item: Item, now: float) -> Generator[None, None, None]:
        """Read a prompt once for all its samples, and find its candidates."""
        if isinstance(item, ServiceError):
            self._samples.append(_Sample(at, SelectAndReserveRequest(), b""))
            self._refuse(self._samples[-1], item)
            return
        request, unknown = item
        read = rows = refusal = None
        try:
            read = self._selection.reader.selection(request)
            rows = read[0].candidates(request)
        except ServiceError as error:
            refusal = error
        for k in range(request.n):
            sample = _Sample(at, _alone(request, k), unknown, read, rows, refusal)
            self._samples.append(sample)
            if refusal is not None and not self._is_repeat(sample):
                self._refuse_unread(sample, refusal, now)
            if not (k + 1) % _SAMPLES_PER_STEP:
                yield
        yield

    def _is_repeat(self, sample: _Sample) -> bool:
        name = sample.request.reservation_id
        return (
            self._wants.reserve
            and name is not None
            and self._selection.lifecycle.repeats.is_known(name)
        )

    def _repeats(self, now: float) -> Generator[Effects, float, float]:
        """Answer repeats with their first answer, or the conflict; they add no load."""
        for sample in self._samples:
            if sample.result is not None:
                continue
            if self._is_repeat(sample):
                sample.rows = None
                now = yield self._place(sample, None, now)
            elif sample.refusal is not None:  # what it would have repeated has ended meanwhile
                self._refuse_unread(sample, sample.refusal, now)
        return now

    def _refuse_unread(self, sample: _Sample, refusal: ServiceError, now: float) -> None:
        self._selection.placer.other_answers.refuse(None, refusal, now)
        self._refuse(sample, refusal)

    # -- placing ---------------------------------------------------------------------------------

    def _place_planned(
        self, partition: Partition, numbers: list[int], now: float
    ) -> Generator[Effects, float, float]:
        """Plan and place the samples of one partition.

        Raises:
            BatchNotPlaced: as `_check_all`.
        """
        members = []
        for number in numbers:
            sample = self._samples[number]
            assert sample.read is not None
            assert sample.rows is not None
            members.append(BatchMember(number, sample.request, *sample.read[1:], sample.rows))
        plan = BatchPlan(
            partition,
            members,
            load_limit=self._wants.load_limit,
            keep_together=self._wants.keep_together,
            now=now,
            rng=self._selection.rng,
        )
        size = partition.index.block_size
        planned_ranks = []
        recorder = self._selection.recorder
        for piece in plan.planned_ranks() if recorder is None else recorder.steps_of(plan):
            planned_ranks += piece
            now = yield NOTHING
        first_group = self._next_group
        self._groups += len(plan.groups)
        self._next_group += len(plan.groups)
        # by number of a placed sample: its mate and shared blocks
        before: dict[int, tuple[int, int]] = {}
        for planned_rank in planned_ranks:  # plan everything first: bookings would count twice
            mate, shared = planned_rank.mate, planned_rank.shared_blocks
            if mate >= 0 and self._samples[mate].placed_at != planned_rank.slot:
                # refused, or elsewhere: its own mate has the prefix, too
                mate, common = before[mate]
                shared = min(shared, common)
            before[planned_rank.member.number] = mate, shared
            sample, tokens = (
                self._samples[planned_rank.member.number],
                shared * size if mate >= 0 else 0,
            )
            planned = Planned(planned_rank.slot, first_group + planned_rank.group, tokens)
            now = yield self._place(sample, planned, now)
            if not _is_placed(sample):
                # Give up at once: further bookings might take ids of an equal, earlier batch, which
                # would then be undone because of this one.
                self._check_all()
        return now

    def _place(self, sample: _Sample, planned: Planned | None, now: float) -> Effects:
        """Select for one sample, and book if wanted; a refusal becomes its result."""
        was_known = self._is_repeat(sample)
        bookings = self._selection.lifecycle.bookings
        bookings.hold = self._hold  # a booking is published when the batch is done
        try:
            answer, effects = self._selection.placer.select_and_reserve(
                sample.request,
                now,
                unknown=sample.unknown,
                sample=BatchSample(sample.read, planned),
                reserve=self._wants.reserve,
            )
        except ServiceError as refusal:
            self._refuse(sample, refusal)
            return NOTHING
        finally:
            bookings.hold = None
        shared_tokens = 0
        if isinstance(answer, Selection) and was_known:
            shared_tokens = self._count_repeat(answer)
        elif isinstance(answer, Selection):
            assert sample.read is not None
            partition = sample.read[0]
            sample.placed_at = partition.fleet_slots.workers[answer.worker_id].slots[answer.dp_rank]
            if planned is not None and sample.placed_at == planned.slot:
                shared_tokens = planned.shared_tokens
            if self._wants.reserve:
                sample.booked = str(answer.reservation_id)
                sample.claim = bookings.get(sample.booked).reservation.claim
                self._counted.add(sample.booked)
            self._count(answer, shared_tokens)
        if isinstance(answer, Selection):
            answer.sequence_hashes = UNSET  # a thousand of them would be megabytes
            sample.result = SelectBatchResult(
                sample.item, 200, selection=answer, shared_tokens=shared_tokens
            )
        else:
            assert isinstance(answer, CacheThreshold), "no request gets a pair unasked"
            sample.result = SelectBatchResult(sample.item, 200, cache_threshold=answer)
        return effects

    def _count_repeat(self, answer: Selection) -> int:
        """Count a repeat as its first batch did, once; return what it shared with others there.

        One that was booked alone is a group of its own.
        """
        name = str(answer.reservation_id)
        group, shared_tokens = self._selection.lifecycle.repeats.in_batch(name) or (None, 0)
        if name in self._counted:  # the id comes twice
            return shared_tokens
        self._counted.add(name)
        if group is None:
            self._groups += 1
        else:
            self._groups_before.add(group)
            self._next_group = max(self._next_group, group + 1)
        self._count(answer, shared_tokens)
        return shared_tokens

    def _count(self, answer: Selection, shared_tokens: int) -> None:
        self._computed += not shared_tokens
        place = answer.model_name, answer.tenant_id, answer.worker_id, answer.dp_rank
        rank = self._ranks.setdefault(place, [0, 0])
        rank[0] += 1
        rank[1] += answer.effective_prefill_tokens

    # -- results ---------------------------------------------------------------------------------

    def _refuse(self, sample: _Sample, refusal: ServiceError) -> None:
        field: str | UnsetType = UNSET
        if refusal.field is not None:
            field = f"requests[{sample.item}].{refusal.field}"
        again_s = retry_after(refusal)
        sample.rows = None
        sample.result = SelectBatchResult(
            sample.item,
            refusal.status,
            error=str(refusal),
            code=refusal.code,
            field=field,
            retry_after_s=UNSET if again_s is None else round(again_s, 3),
        )

    def _check_all(self) -> None:
        """Give up if all-or-none was requested and a sample was refused.

        Raises:
            BatchNotPlaced: naming the first of them.
        """
        if not self._wants.atomic:
            return
        for at, sample in enumerate(self._samples):
            if sample.result is not None and not _is_placed(sample):
                self._selection.counters.batches_undone += 1
                raise BatchNotPlaced(sample.result, at, exceeds=self._exceeds(sample))

    def _exceeds(self, refused: _Sample) -> str | None:
        """Return the code of the limit that the batch as a whole exceeds however long one waits.

        Where only the batch itself keeps the refused sample's ranks busy, there is nothing to wait
        for either.
        """
        if len(self._samples) > self._selection.limits.reservations_max:
            return TooManyReservations.code
        if refused.read is None or refused.result is None:
            return None
        partition = refused.read[0]
        try:
            rows = partition.candidates(refused.request)
        except NoEligibleWorker:
            return None
        admission = partition.admission
        if admission is not None:
            asks, alike = [], 0
            for sample in self._samples:
                if sample.read is None or sample.read[0] is not partition:
                    continue
                alike += _same_candidates(sample.request, refused.request)
                tenant = sample.request.fairness_id or partition.scope.tenant_id
                name = sample.request.slo_class or ""
                asks.append(AdmissionRequest(sample.read[1].isl_tokens, name, tenant))
            exceeded = admission.never_fit_together(asks, alike, rows)
            if exceeded is not None:
                return exceeded
        code = refused.result.code
        waits = code == WouldWait.code and (admission is None or admission.gate.queue is None)
        waits |= code == BUSY.code and admission is not None and not admission.is_reported(rows)
        return str(code) if waits and self._is_alone(partition, rows) else None

    def _is_alone(self, partition: Partition, rows: Rows) -> bool:
        """Tell whether these ranks carry nothing but what this batch has booked on them."""
        slots = set(range(rows.stop) if isinstance(rows, slice) else rows.tolist())
        own = sum(
            sample.booked is not None
            and sample.placed_at in slots
            and sample.read is not None
            and sample.read[0] is partition
            for sample in self._samples
        )
        return int(partition.ledger.loads.requests[rows].sum()) == own

    def _answer(self) -> SelectBatchAnswer:
        results = []
        for sample in self._samples:
            assert sample.result is not None
            results.append(sample.result)
        ranks = [SelectBatchRank(*rank, *brought) for rank, brought in sorted(self._ranks.items())]
        placed = sum(_is_placed(sample) for sample in self._samples)
        groups = self._groups + len(self._groups_before)
        return SelectBatchAnswer(results, placed, groups, self._computed, ranks)


def _is_placed(sample: _Sample) -> bool:
    result = sample.result
    return result is not None and result.selection is not UNSET


def _same_candidates(one: SelectRequest, other: SelectRequest) -> bool:
    """Tell whether two requests of one scope may be placed on the same workers."""
    return (
        one.allowed_worker_ids == other.allowed_worker_ids
        and one.pinned_worker == other.pinned_worker
        and one.routing_constraints == other.routing_constraints
    )


def _alone(item: SelectBatchItem, k: int) -> SelectAndReserveRequest:
    """Return sample k as a single request."""
    fields = {name: getattr(item, name) for name in SelectAndReserveRequest.__struct_fields__}
    if item.n > 1:
        for name in ("reservation_id", "selection_id"):
            if fields[name] is not None:
                fields[name] = f"{fields[name]}.{k}"
    return SelectAndReserveRequest(**fields)
