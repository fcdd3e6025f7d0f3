"""Repeats the decisions of a recording with the code that made them.

A stage is a partition of the real core whose index and ledger answer as recorded; the recorded
candidates reflect eligibility, admission and everything before the choice. The choice itself
(projection, prices, preferences, ties, temperatures, pairs, batch plans) runs as it did, with the
recorded random draws, or with other weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias, cast

import numpy as np
from msgspec import UNSET
from msgspec.structs import replace

from select_service.core.admission.cache_hits import CacheHits
from select_service.core.batches.batch_plan import BatchMember, BatchPlan
from select_service.core.fleet.catalog import Worker
from select_service.core.fleet.roles import Legs
from select_service.core.partition import Partition
from select_service.core.pricing.pair import PairQuery, plan
from select_service.core.pricing.policy import default_policy
from select_service.core.pricing.prompt import Prompt, prompt_of
from select_service.core.pricing.weights import Weights, weights_in_force
from select_service.core.recording.decoder import BadRecording, hashes_of, slots_of
from select_service.core.recording.items import Asked
from select_service.core.routing.place import choose
from select_service.errors import NoEligibleWorker, NoWorkerForRole, WorkerDraining
from select_service.simulator.core.recorded_state import (
    RecordedIndex,
    RecordedLedger,
    RecordedSources,
    RecordedTrust,
    matches,
)
from select_service.types import (
    PinnedWorker,
    RouterConfig,
    RoutingConstraints,
    SelectPairRequest,
    SelectRequest,
)
from select_service.types.admission import AdmissionSettings

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from indexer.core.index import KvIndex
    from select_service.core.columns import Floats, Rows
    from select_service.core.decisions.trust_factors import Trust
    from select_service.core.ledger.ledger import Ledger
    from select_service.core.pricing.kv_sources import KvSources
    from select_service.core.recording.decoder import ScopeFleet
    from select_service.core.recording.items import (
        Decided,
        PlannedBatch,
        Prompted,
        RecordedMatches,
        Step,
    )

NOT_ELIGIBLE = "candidates that are not eligible"

_ORDINARY = Asked()
_FILTERED = frozenset({NoEligibleWorker.code, NoWorkerForRole.code, WorkerDraining.code})

Rank = tuple[int, int]
"""worker_id, dp_rank"""

WeightsFor: TypeAlias = "Callable[[list[float | bool], Asked], Weights]"
"""From the recorded weights and the options of a request to the weights to use."""


class ReplayChoice(NamedTuple):
    """The decision on a request."""

    kind: Literal["placed", "pair", "refused", "cache_threshold"]
    rank: Rank | None  # the rank that decodes
    prefill_rank: Rank | None = None  # of a pair
    code: str = ""  # of a refusal
    cost: float | None = None  # of the choice, in blocks
    prefill_tokens: int | None = None  # to be computed, as far as known

    @property
    def where(self) -> tuple[object, ...]:
        """What two choices must share to be the same decision."""
        return self.kind, self.rank, self.prefill_rank, self.code


class SlotTables(NamedTuple):
    """A batch's plan compared: recorded and newly planned ranks, by position."""

    recorded: dict[int, Rank]
    planned: dict[int, Rank]


class DecisionReplay:
    """One recorded scope, valid while its workers do not change."""

    def __init__(self, fleet: ScopeFleet, capacity: int, config: RouterConfig) -> None:
        """Attach all workers.

        Raises:
            BadRecording: a slot does not exist, or is taken twice.
        """
        self.fleet = fleet
        self.capacity = capacity
        self._index = RecordedIndex(fleet.block_size, capacity)
        self._ledger = RecordedLedger(capacity)
        self._trust = RecordedTrust()
        if fleet.block_size < 1:
            raise BadRecording("it does not say how long a block is")
        partition = self.partition = Partition(
            fleet.scope,
            cast("KvIndex", self._index),
            default_policy(config.queue_threshold).root,
            prefill_tokens_per_s=1.0,
            config=config,
        )
        partition.ledger = cast("Ledger", self._ledger)
        partition.trust = cast("Trust", self._trust)
        taken: set[int] = set()
        for attached in fleet.workers.values():
            worker = Worker(attached.spec)
            worker.slots, worker.drain = dict(attached.slots), attached.drain
            for slot in worker.slots.values():
                if not 0 <= slot < capacity or slot in taken:
                    raise BadRecording(f"worker {worker.worker_id} on slot {slot} of {capacity}")
                taken.add(slot)
            partition.update_selectable(worker)
        self._attached = taken
        partition.ensure_columns()

    def rank_at(self, slot: int) -> Rank:
        """Return the rank on a slot.

        Raises:
            BadRecording: it is empty.
        """
        if slot not in self._attached:
            raise BadRecording(f"no rank has slot {slot}")
        worker, dp_rank = self.partition.fleet_slots.rank_at(slot)
        return worker.worker_id, dp_rank

    def _planned_at(self, slot: int) -> Rank:
        """Return the planned rank; (-1, slot) if it has gone since the prompts were read."""
        return self.rank_at(slot) if slot in self._attached else (-1, slot)

    def rows(self, candidates: int | bytes) -> Rows:
        """Return candidates.

        Raises:
            BadRecording: they do not exist.
        """
        if isinstance(candidates, int):
            if not 0 <= candidates <= self.capacity:
                raise BadRecording(f"{candidates} candidates of {self.capacity}")
            return slice(0, candidates)
        return slots_of(candidates, self.capacity)

    def show(
        self,
        found: RecordedMatches | None,
        shared: list[tuple[int, bytes]] | None,
        trust: bytes | None,
    ) -> None:
        """Answer with these matches, slots of booked beginnings and trust from now on."""
        self._index.found = matches(found, self.capacity)
        self.partition.kv_sources = None
        if found is not None and found.pulls is not None:
            sources = RecordedSources(found.pulls, self._attached, self.capacity)
            self.partition.kv_sources = cast("KvSources", sources)
        self._ledger.share(
            None
            if shared is None
            else [(blocks, slots_of(one, self.capacity)) for blocks, one in shared]
        )
        # the column grows ahead of the ranks: its end belongs to none
        self._trust.column = None if trust is None else np.frombuffer(trust)[: self.capacity]
        if self._trust.column is not None and len(self._trust.column) < self.capacity:
            raise BadRecording("trust in fewer ranks than there are")

    def set_loads(self, step: Step) -> None:
        """Carry the loads of a batch's step from now on."""
        self._ledger.load(step.load.whole)
        requests = _whole(step.requests.whole, self.capacity)
        self._ledger.loads.requests[:] = np.frombuffer(requests, dtype=np.int64)

    # -- one decision --------------------------------------------------------------------------

    def choose(self, item: Decided, weights: Weights, rng: random.Random) -> ReplayChoice:
        """Repeat a decision; a refusal at a gate or by a queue stays one.

        Args:
            item: from a `RecordedFile`.
            weights: to use.
            rng: replays the recorded draws.

        Raises:
            BadRecording: the inputs are inconsistent.
        """
        asked = item.asked or _ORDINARY
        if not item.is_pair and (item.refused is None or item.refused in _FILTERED):
            refused = self._filter(item, asked)
            if refused is not None:
                return refused
        if item.refused is not None or item.rows is None:
            return ReplayChoice("refused", None, code=item.refused or "")
        self._ledger.load(item.load.whole)
        self.show(item.found, item.shared, None if item.trust is None else item.trust.whole)
        prompt, rows = _prompt(item.prompt), self.rows(item.rows)
        if item.pair is not None:
            return self._pair(item, asked, prompt, weights, rng)
        request = _request(SelectRequest, asked)
        partition = self.partition
        if item.is_threshold:
            hits = _cache_hits(item)
            seen = self._index.found
            found = hits.filter(partition, request, prompt, rows, seen)
            if found.refused is not None:
                return ReplayChoice("cache_threshold", None)
            rows = found.rows
        return self._place(request, prompt, rows, weights, rng, item.at)

    def _filter(self, item: Decided, asked: Asked) -> ReplayChoice | None:
        """Return a refusal if no rank is eligible, or if not all recorded candidates are.

        A gate, a cache threshold, a batch or a session may have removed eligible ones.
        """
        partition = self.partition
        partition.holds_to_cache = item.thresholds is not None and item.thresholds[0] > 0.0
        try:
            eligible = partition.candidates(_request(SelectRequest, asked))
        except NoEligibleWorker as none:
            return ReplayChoice("refused", None, code=none.code)
        if item.refused in _FILTERED:
            return ReplayChoice("placed", None)
        if item.rows is None:
            return None
        rows = self.rows(item.rows)
        if isinstance(rows, slice) and isinstance(eligible, slice):
            is_within = rows.stop <= eligible.stop
        else:
            every = np.arange(self.capacity)
            is_within = bool(np.isin(every[rows], every[eligible]).all())
        if is_within:
            return None
        return ReplayChoice("refused", None, code=NOT_ELIGIBLE)

    def _place(
        self,
        request: SelectRequest,
        prompt: Prompt,
        rows: Rows,
        weights: Weights,
        rng: random.Random,
        now: float,
    ) -> ReplayChoice:
        count = rows.stop if isinstance(rows, slice) else len(rows)
        if not count:
            raise BadRecording("a choice among none")
        chosen = choose(self.partition, request, prompt, rows, weights, rng, now)
        return ReplayChoice(
            "placed",
            self.rank_at(chosen.slot),
            cost=chosen.cost,
            prefill_tokens=chosen.effective_prefill_tokens,
        )

    def _pair(
        self, item: Decided, asked: Asked, prompt: Prompt, weights: Weights, rng: random.Random
    ) -> ReplayChoice:
        assert item.pair is not None
        masks = item.pair.whole, item.pair.prefill, item.pair.decode
        legs = Legs(*(slots_of(one, self.capacity) for one in masks))
        request, hits = _request(SelectPairRequest, asked), _cache_hits(item)
        partition = self.partition
        size, present = self._index.block_size, self.partition.at_present(weights)
        question = PairQuery(partition.fleet_slots, request, prompt, present, size)
        held = partition.pulling(request, partition.found(prompt), prompt, present)
        found = plan(
            question,
            legs,
            lambda slots: partition.terms(prompt, slots, weights, item.at, held),
            held,
            rng,
            lambda slots, terms: hits.holders(request, prompt, partition, slots, terms),
        )
        if found.mode == "aggregated":
            if not len(found.whole):
                return ReplayChoice("refused", None, code=NoEligibleWorker.code)
            return self._place(request, prompt, found.whole, weights, rng, item.at)
        couple = found.couple
        assert couple is not None
        ranks = self.rank_at(couple.decode_slot), self.rank_at(couple.prefill_slot)
        tokens = couple.effective_prefill_tokens
        return ReplayChoice("pair", *ranks, cost=couple.cost, prefill_tokens=tokens)

    # -- a batch --------------------------------------------------------------------------------

    def plan(
        self,
        batch: PlannedBatch,
        weights: WeightsFor,
        rng: Callable[[Step], random.Random],
    ) -> SlotTables:
        """Repeat the plan of a batch, every step with its recorded loads.

        Args:
            batch: from a `RecordedFile`.
            weights: of a member, from the recorded ones and its options.
            rng: replays the recorded draws of a step.
        """
        members = []
        for one in batch.members:
            if not 0 <= one.prompt < len(batch.prompts):
                raise BadRecording(f"prompt {one.prompt} of {len(batch.prompts)}")
            asked = one.asked or _ORDINARY
            request = _request(SelectRequest, asked)
            prompt, rows = _prompt(batch.prompts[one.prompt]), self.rows(one.rows)
            members.append(
                BatchMember(one.number, request, prompt, weights(one.weights, asked), rows)
            )
        recorded: dict[int, Rank] = {}
        planned: dict[int, Rank] = {}
        for step in batch.steps:
            recorded |= {number: self._planned_at(slot) for number, slot in step.planned_ranks}
        if not recorded.keys() <= {one.number for one in batch.members}:
            raise BadRecording("a slot without a rank")
        if batch.steps:
            self._ledger.sequence_blocks = batch.sequence_blocks
            made = _RecordedPlan(self, batch, members, rng)
            made.next_step()
            for piece in made.planned_ranks():
                planned |= {
                    fleet_worker.member.number: self._planned_at(fleet_worker.slot)
                    for fleet_worker in piece
                }
                if piece:
                    made.next_step()
        return SlotTables(recorded, planned)


class _RecordedPlan(BatchPlan):
    """A plan that is led through the recorded steps."""

    def __init__(
        self,
        replay: DecisionReplay,
        batch: PlannedBatch,
        members: list[BatchMember],
        rng: Callable[[Step], random.Random],
    ) -> None:
        super().__init__(
            replay.partition,
            members,
            load_limit=batch.load_limit,
            keep_together=batch.keep_together,
            now=batch.planned_at,
            rng=cast("random.Random", None),  # each step has its own
        )
        self._replay = replay
        self._rng_of = rng
        self._steps = iter(batch.steps)
        self._looked = {
            number: (found, shared, None if trust is None else trust.whole)
            for step in batch.steps
            for number, found, shared, trust in step.looked
        }

    def next_step(self) -> None:
        """Set the loads of the next step; a plan with more steps keeps those of the last."""
        step = next(self._steps, None)
        if step is None:
            return
        self._replay.set_loads(step)
        self._rng = self._rng_of(step)

    def _price(self, member: BatchMember) -> tuple[Floats, Floats]:
        """Price a member by its recorded matches."""
        lookup = self._looked.get(member.number)
        if lookup is None:
            raise BadRecording(f"no lookup of the prompt of member {member.number}")
        self._replay.show(*lookup)
        return super()._price(member)


def recorded_choice(decision_replay: DecisionReplay, item: Decided) -> ReplayChoice:
    """Return the recorded decision."""
    if item.refused is not None:
        return ReplayChoice("refused", None, code=item.refused)
    if item.is_threshold:
        return ReplayChoice("cache_threshold", None)
    if item.rows is None or item.slot < 0:
        raise BadRecording("a decision for no rank, and no refusal")
    if item.pair is not None and item.pair.couple is not None:
        prefill, decode = item.pair.couple
        return ReplayChoice(
            "pair", decision_replay.rank_at(decode), decision_replay.rank_at(prefill)
        )
    return ReplayChoice("placed", decision_replay.rank_at(item.slot))


def changed_weights(config: RouterConfig, changes: dict[str, object]) -> WeightsFor:
    """Return modified weights: a request's override applies on top of the changed configuration.

    Raises:
        TypeError: there is no such weight.
    """
    if not changes:
        return _as_recorded
    other = replace(config, **changes)
    return lambda _, asked: weights_in_force(other, asked.override)


_LATER_WEIGHTS: Final = 4
"""The last so many weights came after the first recordings: pace, interference, that of each active
request, and slowness. 0 is without."""


def _as_recorded(recorded: list[float | bool], _: Asked) -> Weights:
    count = len(Weights._fields)
    missing = count - len(recorded)
    if 0 < missing <= _LATER_WEIGHTS:
        recorded = [*recorded, *[0.0] * missing]
    if len(recorded) != count:
        raise BadRecording(f"{len(recorded)} weights, where this version has {count}")
    return Weights._make(recorded)


def _whole(column: bytes | None, values: int) -> bytes:
    if column is None or len(column) != 8 * values:
        raise BadRecording("a column of another length than it has ranks")
    return column


def _prompt(prompted: Prompted) -> Prompt:
    """Return a prompt; its sequence hashes, meant for the ledger, are not looked up."""
    hashes = hashes_of(prompted)
    return prompt_of(hashes, hashes, prompted.isl_tokens)


def _request(kind: type[SelectRequest], asked: Asked) -> SelectRequest:
    if asked is _ORDINARY:
        return kind()
    constraints = RoutingConstraints(asked.required_taints, asked.preferred_taints)
    return kind(
        pinned_worker=None if asked.pinned is None else PinnedWorker(*asked.pinned),
        allowed_worker_ids=asked.allowed,
        routing_constraints=constraints if asked.has_constraints else UNSET,
        cache_hit_threshold=asked.cache_hit_threshold,
        cache_hit_scope=asked.cache_hit_scope,  # type: ignore[arg-type]
        cache_hit_basis=asked.cache_hit_basis,  # type: ignore[arg-type]
        on_cache_threshold=asked.on_cache_threshold,  # type: ignore[arg-type]
        attempt=asked.attempt,
    )


def _cache_hits(item: Decided) -> CacheHits:
    if item.thresholds is None:
        return CacheHits(AdmissionSettings())
    threshold, attempts, basis, scope = item.thresholds
    return CacheHits(
        AdmissionSettings(
            cache_hit_threshold=threshold,
            cache_hit_attempts_max=attempts,
            cache_hit_basis=basis,  # type: ignore[arg-type]
            cache_hit_scope=scope,  # type: ignore[arg-type]
        )
    )
