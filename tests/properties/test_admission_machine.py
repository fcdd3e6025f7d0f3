"""The service with a gate, whatever happens in whatever order, against plain counting.

Requests of all classes and tenants ask, wait, give up, move on and end; workers come with other
caps, change and go; operators change policies and thresholds while requests wait; engines tell
loads. After every step every request ever asked is in exactly one place, nobody is on a worker
beyond its N, the token bucket holds what the admitted have left in it, nothing is booked that was
not answered, and nobody waits for a worker that has room.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from indexer.core.registry import StreamRegistry
from indexer.types import Scope
from select_service.core.admission.partition_admission import PartitionAdmission
from select_service.core.admission.queue import Ticket
from select_service.core.effects import Effects
from select_service.core.operations.waiting_requests import next_at_gate
from select_service.core.service import SelectionCore
from select_service.errors import AdmissionRefused, ServiceError
from select_service.types import (
    CacheThreshold,
    CoreLimits,
    PinnedWorker,
    ReservationRequest,
    RouterConfig,
    SelectAndReserveRequest,
    Selection,
    WorkerSpec,
)
from select_service.types.admission import (
    AdmissionChange,
    AdmissionSettings,
    BusyThresholdChange,
    RankMetrics,
    WorkerMetrics,
)
from tests.effort import examples, share_of
from tests.sliced import put_in_force

CAPACITY, RATE = 300, 40
POLICIES: dict[str, dict[str, Any]] = {
    "always-admit": {},
    "token-bucket": {"capacity": CAPACITY, "refill_rate": RATE},
    "tier-shed": {"threshold": 3},
    "gaie-legacy": {"queue_depth": 2},
    "reject-all": {},
    "slo-shed": {"quotas": {"batch": 2, "sheddable": 1, "background": 0}, "budget_tokens": 200},
}
BUDGETS: dict[str, Any] = {"tenant_budgets": {"abuser": 0.5}, "seats_per_instance": 4}
CLASSES = ("critical", "standard", "batch", "sheddable", "background", "", "unheard-of")
DEFAULT = Scope("default", "default")

worker_ids = st.integers(1, 3)
wishes = st.fixed_dictionaries(
    {},
    optional={
        "slo_class": st.sampled_from(CLASSES),
        "fairness_id": st.sampled_from(["abuser", "good"]),
        "slo_ttft_ms": st.sampled_from([50.0, 5000.0]),
        "cache_hit_threshold": st.sampled_from([0.0, 0.5]),
        "on_cache_threshold": st.sampled_from(["reject", "fallback"]),
        "attempt": st.sampled_from([0, 3]),
        "pinned_worker": st.builds(PinnedWorker, worker_ids, st.just(0)),
    },
)


class AdmissionMachine(RuleBasedStateMachine):
    """One scope behind a gate, and what every request has become."""

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        mode=st.sampled_from(["none", "token-capacity"]),
        deadline_s=st.sampled_from([None, 4.0]),
        queue_threshold=st.sampled_from([16.0, 1.0]),
    )
    def begin(
        self, policy: str, mode: Any, deadline_s: float | None, queue_threshold: float
    ) -> None:
        self.mode = mode
        self.core = SelectionCore(
            StreamRegistry(),
            RouterConfig(use_kv_events=False, queue_threshold=queue_threshold),
            random.Random(1),
            limits=CoreLimits(judged_per_turn_max=3),
            admission=AdmissionSettings(
                mode=mode,
                policy=policy,
                policy_config=POLICIES[policy],
                max_inflight=4,
                max_queued=2,
                queue_deadline_s=deadline_s,
                return_slots_max=4,
            ),
        )
        self.policy = policy
        self.now = 10.0
        self.number = 0
        self.asked = 0
        self.tickets: dict[str, Ticket] = {}
        self.live: set[str] = set()
        self.caps: dict[int, int] = {}
        self.worker(1, 2)

    def later(self) -> float:
        self.now += 0.01
        return self.now

    @property
    def keeper(self) -> PartitionAdmission:
        keeper = self.core.partitions[DEFAULT].admission
        assert keeper is not None
        return keeper

    def follow(self, effects: Effects) -> None:
        """Who waited has an answer: booked, or refused, and then nothing is booked."""
        for ticket in effects.answered:
            name = ticket.reservation_id or ""
            assert self.tickets.pop(name) is ticket
            self.answered(name, ticket.answer)

    def answered(self, name: str, answer: object) -> None:
        if isinstance(answer, Selection):
            assert answer.reservation_id == name
            self.live.add(name)
        else:
            assert isinstance(answer, CacheThreshold | ServiceError)
            assert self.core.lifecycle.bookings.live(name) is None, (
                "refused, and booked all the same"
            )

    # -- workers -------------------------------------------------------------------------------

    @rule(worker_id=worker_ids, cap=st.integers(1, 3))
    def worker(self, worker_id: int, cap: int) -> None:
        spec = WorkerSpec(
            worker_id=worker_id,
            endpoint="http://w",
            block_size=16,
            max_inflight=cap,
            max_num_batched_tokens=64,
            total_kv_blocks=40,
        )
        self.caps[worker_id] = cap
        _, effects = self.core.workers.upsert_worker(spec, self.later())
        self.follow(effects)

    @precondition(lambda self: len(self.caps) > 1)
    @rule(data=st.data())
    def worker_goes(self, data: st.DataObject) -> None:
        worker_id = data.draw(st.sampled_from(sorted(self.caps)))
        del self.caps[worker_id]
        before = set(self.live)
        _, effects = self.core.workers.delete_worker(worker_id, self.later())
        self.live = {name for name in before if self.core.lifecycle.bookings.live(name) is not None}
        self.follow(effects)

    @rule(worker_id=worker_ids, used=st.sampled_from([0.0, 39.0]), waits=st.none() | st.just(9))
    def engine_tells(self, worker_id: int, used: float, waits: int | None) -> None:
        if worker_id in self.caps:
            told = RankMetrics(kv_used_blocks=used, num_requests_waiting=waits)
            answer, effects = self.core.admission.report(
                worker_id, WorkerMetrics(ranks=[told]), self.later()
            )
            assert answer.accepted == [0]
            self.follow(effects)

    # -- requests ------------------------------------------------------------------------------

    @rule(blocks=st.integers(1, 6), shared=st.booleans(), wish=wishes)
    def ask(self, blocks: int, *, shared: bool, wish: dict[str, Any]) -> None:
        self.number += 1
        name = f"r{self.number}"
        first = 0 if shared else self.number * 100
        hashes = list(range(first, first + blocks))
        request = SelectAndReserveRequest(
            reservation_id=name,
            block_hashes=hashes,
            sequence_hashes=hashes,
            isl_tokens=blocks * 16,
            **wish,
        )
        now = self.later()
        self.asked += 1
        refused = ""
        answer: Any = None
        try:
            answer, effects = self.core.selection.select_and_reserve(request, now)
            self.follow(effects)
        except ServiceError as refusal:
            refused = refusal.code
            assert self.core.lifecycle.bookings.live(name) is None
        if isinstance(answer, Ticket):
            self.tickets[name] = answer
        elif answer is not None:
            self.answered(name, answer)
        if refused in {"", "cache_threshold"} and not isinstance(answer, CacheThreshold):
            again, _ = self.core.selection.select_and_reserve(request, now)
            assert isinstance(again, type(answer)), "a repeat is what it was"
            if isinstance(again, Ticket):
                assert again is answer
                assert not self.core.waiting_requests.withdraw(again), "another caller still waits"

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def hang_up(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.tickets)))
        assert self.core.waiting_requests.withdraw(self.tickets.pop(name))

    @rule(worker_id=worker_ids)
    def book(self, worker_id: int) -> None:
        """Explicitly: N holds, policies do not, and it is no offer."""
        if worker_id not in self.caps:
            return
        self.number += 1
        name = f"b{self.number}"
        request = ReservationRequest(
            reservation_id=name, worker_id=worker_id, sequence_hashes=[self.number], isl_tokens=16
        )
        full = self.on_worker(worker_id) >= self.caps[worker_id]
        if full:
            with pytest.raises(AdmissionRefused):
                self.core.reservations.reserve(request, self.later())
            return
        _, effects = self.core.reservations.reserve(request, self.later())
        self.live.add(name)
        self.follow(effects)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), ends=st.booleans())
    def goes_on(self, data: st.DataObject, *, ends: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        if ends:
            self.live.remove(name)
            self.follow(self.core.reservations.free(name, self.later()))
        else:
            self.follow(self.core.reservations.prefill_complete(name, self.later()))

    # -- operators and time --------------------------------------------------------------------

    @rule(policy=st.sampled_from(sorted(POLICIES)), budgets=st.booleans())
    def another_policy(self, policy: str, *, budgets: bool) -> None:
        config = POLICIES[policy] | (BUDGETS if budgets else {})
        change = AdmissionChange(policy=policy, config=config)
        effects = put_in_force(self.core, change, self.later())
        self.policy = policy
        for one in effects:
            self.follow(one)

    @rule(tokens=st.none() | st.sampled_from([0, 100]), share=st.none() | st.sampled_from([0.2, 1]))
    def thresholds(self, tokens: int | None, share: float | None) -> None:
        if self.mode == "none":
            return
        change = BusyThresholdChange(
            model="default",
            active_prefill_tokens_threshold=tokens,
            active_decode_blocks_threshold=share,
            clear=[] if tokens is not None else ["active_prefill_tokens_threshold"],
        )
        _, effects = self.core.admission.change_threshold(change, self.later())
        self.follow(effects)

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 31.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        more = True
        while more:
            more, effects = self.core.tick(self.now)
            self.follow(effects)
        while self.core.next_deadline() <= self.now:
            self.follow(self.core.refuse_late(self.now))
        self.live = {
            name for name in self.live if self.core.lifecycle.bookings.live(name) is not None
        }
        assert not self.keeper.displaced

    # -- what is always true -------------------------------------------------------------------

    def on_worker(self, worker_id: int) -> int:
        rows = self.core.queries.loads()[0].loads
        return sum(row.active_requests for row in rows if row.worker_id == worker_id)

    @invariant()
    def promises_hold(self) -> None:
        self.core.check()

    @invariant()
    def every_request_is_in_one_place(self) -> None:
        total = self.keeper.gate.tallies.total()
        total.check()
        assert total.offered == self.asked
        assert total.waiting == len(self.tickets)
        assert sum(scope.pending_count for scope in self.core.queries.loads()) == len(self.tickets)
        booked = {name for name in self.live if self.core.lifecycle.bookings.live(name) is not None}
        assert booked == self.live
        assert len(self.core.lifecycle.bookings) == len(self.live), "nothing is booked unanswered"

    @invariant()
    def nobody_waits_for_a_worker_that_has_room(self) -> None:
        keeper = self.keeper
        keeper.refresh(self.now)
        if self.policy == "slo-shed" or keeper.displaced:
            return
        partition = self.core.partitions[DEFAULT]
        assert next_at_gate(partition) is None

    @invariant()
    def no_worker_has_more_than_its_cap(self) -> None:
        """Unless the cap was lowered below what it had: then nobody is added."""
        self.keeper.refresh(self.now)
        for worker_id, cap in self.caps.items():
            held = self.keeper.caps[worker_id]
            assert held.max_inflight == cap
            assert held.full == (self.on_worker(worker_id) >= cap)
            assert held.queued <= max(held.max_queued, 0)

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        for name in list(self.tickets):
            assert self.core.waiting_requests.withdraw(self.tickets.pop(name))
        for name in list(self.live):
            self.core.reservations.free(name, self.later())
        keeper = self.keeper
        keeper.refresh(self.now)
        assert keeper.pool.prefill_backlog == 0
        assert keeper.caps.waiting == keeper.waiting_isl_tokens == 0
        assert keeper.gate.tallies.total().waiting == 0
        self.core.check()


def test_the_gate_loses_nobody() -> None:
    run_state_machine_as_test(
        AdmissionMachine,
        settings=settings(max_examples=examples(60), stateful_step_count=40, deadline=None),
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_gate_loses_nobody_for_long() -> None:
    run_state_machine_as_test(
        AdmissionMachine,
        settings=settings(max_examples=share_of(800), stateful_step_count=80, deadline=None),
    )
