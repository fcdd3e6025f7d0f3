"""What each tenant is said to hold is what there is, whatever happens in whatever order.

Workers come, move between tenants, change, drain and go; requests book, wait, repeat and end, alone
and in batches; leases open, close and expire; tenants enter the token file and leave it.
`SelectionCore.check` counts everything again after each step.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from select_service.core.admission.queue import Ticket
from select_service.core.tenancy.shares import prefix_of
from select_service.errors import ServiceError
from select_service.types import (
    CoreLimits,
    LeaseRequest,
    ReservationRequest,
    RouterConfig,
    SelectAndReserveRequest,
)
from select_service.types.batches import SelectBatchItem, SelectBatchRequest
from tests.effort import examples
from tests.select_service.core.whole_fleet import Fleet

TENANTS = ("acme", "rival", "stranger", "default")
tenants = st.sampled_from(TENANTS)
prefixes = st.sampled_from(("", *map(prefix_of, TENANTS)))
names = st.builds(lambda prefix, name: prefix + name, prefixes, st.sampled_from("abcdef"))
workers = st.integers(1, 9)
ASKED: dict[str, Any] = {"block_hashes": [1, 2], "sequence_hashes": [1, 2], "isl_tokens": 32}
ENDPOINT = "tcp://127.0.0.1:500{}"
BOUNDED = ("leases_max", "workers_max", "scopes_max", "event_sources_max", "reservations_max")


class Machine(RuleBasedStateMachine):
    """One core and its tenants."""

    @initialize(wait=st.booleans())
    def start(self, *, wait: bool) -> None:
        limits = CoreLimits(
            leases_max=7,
            workers_max=7,
            scopes_max=5,
            event_sources_max=8,
            reservations_max=8,
            freed_ids_max=6,
            ended_leases_max=6,
            sessions_max=6,
            decision_ring=32,
            dropped_per_turn_max=1,
            expired_per_turn_max=2,
            lease_reopen_s=0.0,
        )
        config = RouterConfig(queue_threshold=1.0) if wait else None
        self.fleet = Fleet(config, limits=limits)
        self.fleet.core.keep_changes()
        self.tickets: list[Ticket] = []
        self.name_tenants({"acme", "rival"}, others=True)
        self.is_first_file = True
        for worker_id, tenant in enumerate(TENANTS, 1):
            self.put_worker(worker_id, tenant, "m", 1, ENDPOINT, 16 if wait else None)

    def teardown(self) -> None:
        if not hasattr(self, "fleet"):
            return
        self.name_tenants({"acme", "rival"}, others=False)
        for worker_id in range(1, 10):
            if self.fleet.core.catalog.find(worker_id) is not None:
                self.fleet.delete(worker_id)
        for _ in range(4):
            self.fleet.tick(10_000.0)
        for name in ("leases_max", "workers_max", "event_sources_max", "reservations_max"):
            assert self.fleet.core.shares.bounds[name].total == 0, name

    def judge(self) -> None:
        """Everything is recounted; nobody has what is kept for another."""
        core = self.fleet.core
        core.check()
        if not self.is_first_file:
            return
        for name in BOUNDED:
            bound = core.shares.bounds[name]
            assert sum(max(held, bound.kept) for _, held in bound.rows()) <= bound.most, name

    @rule(chosen=st.sets(tenants), others=st.booleans())
    def name_tenants(self, chosen: set[str], *, others: bool) -> None:
        self.is_first_file = False
        self.fleet.core.name_tenants(sorted(chosen), others=others)
        self.fleet.core.check()

    @rule(
        worker_id=workers,
        tenant=tenants,
        model=st.sampled_from("mmn"),
        size=st.integers(1, 3),
        endpoint=st.sampled_from((None, ENDPOINT, "not an address")),
        capacity=st.sampled_from((None, 16)),
    )
    def put_worker(
        self,
        worker_id: int,
        tenant: str,
        model: str,
        size: int,
        endpoint: str | None,
        capacity: int | None,
    ) -> None:
        base = {} if endpoint is None else {
            "kv_events_endpoints": {
                str(rank): endpoint.format(rank) for rank in range(size)
            },
        }  # fmt: skip
        self.tries(
            lambda: self.fleet.worker(
                worker_id,
                tenant_id=tenant,
                model_name=model,
                data_parallel_size=size,
                kv_events_endpoint=None,
                max_num_batched_tokens=capacity,
                **base,
            )
        )

    @rule(worker_id=workers, size=st.integers(1, 3))
    def patch_worker(self, worker_id: int, size: int) -> None:
        self.tries(lambda: self.fleet.patch(worker_id, data_parallel_size=size))

    @rule(worker_id=workers, what=st.sampled_from(("delete", "drain", "undrain", "undrain")))
    def change_worker(self, worker_id: int, what: str) -> None:
        self.tries(lambda: getattr(self.fleet, what)(worker_id))

    @rule(name=names, worker_id=workers, lease=st.none() | st.none() | names)
    def book(self, name: str, worker_id: int, lease: str | None) -> None:
        worker = self.fleet.core.catalog.find(worker_id)
        if worker is None:
            return
        request = ReservationRequest(
            reservation_id=name,
            worker_id=worker_id,
            model_name=worker.scope.model_name,
            tenant_id=worker.scope.tenant_id,
            lease_id=lease,
            sequence_hashes=[1, 2],
            isl_tokens=32,
        )
        self.tries(lambda: self.fleet.core.reservations.reserve(request, self.fleet.now))

    @rule(
        name=st.none() | names,
        tenant=tenants,
        lease=st.none() | st.none() | names,
        second=st.none() | names,
        session=st.none() | st.sampled_from("xy"),
    )
    def take(
        self,
        name: str | None,
        tenant: str,
        lease: str | None,
        second: str | None,
        session: str | None,
    ) -> None:
        request = SelectAndReserveRequest(
            reservation_id=name,
            model_name="m",
            tenant_id=tenant,
            lease_id=lease,
            selection_id=second,
            session_id=session,
            **ASKED,
        )
        answer = self.tries(
            lambda: self.fleet.core.selection.select_and_reserve(request, self.fleet.now)
        )
        if answer is not None and isinstance(answer[0], Ticket):
            self.tickets.append(answer[0])

    @rule(name=names, tenant=tenants, count=st.integers(1, 12), atomic=st.booleans())
    def batch(self, name: str, tenant: str, count: int, *, atomic: bool) -> None:
        item = SelectBatchItem(
            reservation_id=name, model_name="m", tenant_id=tenant, n=count, **ASKED
        )
        request = SelectBatchRequest(requests=[item], reserve=True, atomic=atomic)
        steps = self.fleet.core.batch_selection.begin(request, [(item, b"")]).steps(self.fleet.now)
        self.tries(lambda: list(_all_of(steps, self.fleet.now)))

    @rule(at=st.integers(0, 99))
    def withdraw(self, at: int) -> None:
        if self.tickets:
            self.fleet.core.waiting_requests.withdraw(self.tickets.pop(at % len(self.tickets)))
            self.judge()

    @rule(name=names)
    def free(self, name: str) -> None:
        self.tries(lambda: self.fleet.free(name))

    @rule(name=names, owner=st.sampled_from("op"))
    def open_lease(self, name: str, owner: str) -> None:
        request = LeaseRequest(owner=owner, ttl_s=60.0, lease_id=name)
        self.tries(lambda: self.fleet.core.reservations.open_lease(request, self.fleet.now))

    @rule(name=names)
    def close_lease(self, name: str) -> None:
        self.tries(lambda: self.fleet.core.reservations.close_lease(name, self.fleet.now))

    @rule(seconds=st.sampled_from((0.0, 1.0, 30.0, 100.0, 1000.0)))
    def tick(self, seconds: float) -> None:
        self.fleet.now += seconds
        self.fleet.core.tick(self.fleet.now)  # one turn: there may be more to do
        self.judge()

    def tries(self, what: Any) -> Any:
        try:
            return what()
        except ServiceError:
            return None
        finally:
            self.judge()


def _all_of(steps: Any, now: float) -> Any:
    try:
        yield next(steps)
        while True:
            yield steps.send(now)
    except StopIteration:
        return


def test_what_each_holds_is_what_there_is() -> None:
    chosen = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)
    run_state_machine_as_test(Machine, settings=chosen)
