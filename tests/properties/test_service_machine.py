"""The whole core against its twin, whatever happens in whatever order.

Workers come, change and go; engines publish; requests select, book, wait, move on, end, repeat and
expire, now and then behind a gate that keeps nobody out. After every step loads are the sum of the
live reservations, overlaps are what the engines hold, and the core's own promises are true; every
choice is an arg-min of the formula; at the end everything is freed and all loads are zero. Some
reservations live under leases, which are renewed by whatever happens to one of them, closed, or
missed.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from indexer.core.hashing import block_hashes, sequence_hashes
from indexer.core.packing import pack_u64, unpack_u64
from indexer.core.registry import StreamRegistry
from select_service.core.admission.queue import Ticket
from select_service.core.instrumentation.instrumented import CoreObservers
from select_service.core.pricing.placement import Placement
from select_service.core.service import SelectionCore
from select_service.errors import (
    LeaseConflict,
    LeaseNotFound,
    LeaseReopened,
    NoEligibleWorker,
    NoSchedulableWorker,
    ReservationConflict,
    ReservationNotFound,
    ServiceError,
    WorkerDraining,
    WorkerNotFound,
)
from select_service.types import (
    BatchFree,
    BatchOutputBlock,
    BatchPrefillComplete,
    CoreLimits,
    LeaseRenewal,
    LeaseRequest,
    OverlapScoresRequest,
    PinnedWorker,
    PotentialLoadsRequest,
    ReservationRequest,
    RouterConfig,
    RoutingConstraints,
    SelectAndReserveRequest,
    Selection,
    SelectRequest,
    TrustSettings,
    WorkerSpec,
)
from select_service.types.admission import AdmissionSettings
from select_service.types.workers import DrainRequest
from tests.effort import examples, share_of
from tests.models.service_twin import (
    Rank,
    ServiceTwin,
    TwinConfig,
    TwinLease,
    TwinPrompt,
    TwinReservation,
    TwinTicket,
    TwinWorker,
    Wish,
)

BLOCK_SIZE = 4
THRESHOLD = 4.0
CAPACITY = 2  # tokens; times the threshold: a rank is busy above 8
TAINTS = ("gpu", "spot")
MEDIA = (None, None, "CPU", "DISK")
TOLERANCE = 1e-9
LETTERS = 3
CHAINS = ((0, 1, 2, 0, 1), (0, 1, 0, 0), (2,))  # few, so that prompts share prefixes often

worker_ids = st.integers(1, 3)
letters = st.builds(
    lambda chain, cut: chain[:cut], st.sampled_from(CHAINS), st.sampled_from([5, 3, 2, 1, 0])
)
taints = st.frozensets(st.sampled_from(TAINTS))
wishes = st.builds(
    Wish,
    allowed=st.none() | st.frozensets(worker_ids),
    pinned=st.none() | st.tuples(worker_ids, st.integers(0, 2)),
    required=st.just(frozenset()) | taints,
    preferred=st.dictionaries(
        st.sampled_from(TAINTS), st.sampled_from([-1.0, 0.5, 5.0]), max_size=2
    ).map(lambda chosen: tuple(chosen.items())),
)
REOPEN_S = CoreLimits().lease_reopen_s
lease_ids = st.sampled_from("kl")
lease_ttls = st.sampled_from([80.0, 160.0, 500.0])
terms = st.sampled_from(  # how long a booking is to live
    [{}, {}, {"lease_id": "k"}, {"lease_id": "l"}, {"ttl_s": 100.0}, {"ttl_s": 1000.0}]
)
fractions = st.none() | st.sampled_from([0.0, 0.25, 0.5, 1.0])
free_wishes = st.sampled_from([Wish()] * 3) | wishes


def tokens_of(blocks: tuple[int, ...], tail: int = 0) -> list[int]:
    """Each letter is one block of equal tokens; a tail never fills a block."""
    return [letter for letter in blocks for _ in range(BLOCK_SIZE)] + [99] * tail


def engine_hash(prefix: tuple[int, ...]) -> int:
    """What an engine calls the block at the end of this prefix."""
    number = 1
    for letter in prefix:
        number = number * (LETTERS + 1) + letter + 1
    return number


class ServiceMachine(RuleBasedStateMachine):
    """The core and its twin, side by side."""

    reservations = Bundle("reservations")

    @initialize(
        credit=st.sampled_from([1.0, 0.5]),
        decay=st.sampled_from([0.0, 1.0]),
        scale=st.sampled_from([1.0, 2.0]),
        track=st.sampled_from([True, True, False]),
        workers=st.integers(0, 2),
        gate=st.sampled_from([None, None, {}, {"queue_deadline_s": 1e9}]),
    )
    def start(
        self,
        credit: float,
        decay: float,
        scale: float,
        workers: int,
        *,
        track: bool,
        gate: dict[str, Any] | None,
    ) -> None:
        self.now = 1000.0
        self.names = 0
        self.endpoints = 0
        self.streams: dict[Rank, Any] = {}
        self.sequence: dict[Rank, int] = {}
        self.tickets: list[Ticket] = []
        config = RouterConfig(
            overlap_score_credit=credit,
            overlap_score_credit_decay=decay,
            prefill_load_scale=scale,
            track_prefill_tokens=track,
            queue_threshold=THRESHOLD,
        )
        self.core = SelectionCore(
            StreamRegistry(),
            config,
            random.Random(7),
            # what a rank leaves stays for a while; who waits is looked at in one turn
            limits=CoreLimits(dropped_per_turn_max=1, judged_per_turn_max=1000),
            watch=CoreObservers(trace_decisions=True),
            # the twin knows of caches what events say; estimates have tests of their own
            trust=TrustSettings(estimate_after_s=0.0),
            # a gate that keeps nobody out changes nothing
            admission=None if gate is None else AdmissionSettings(max_inflight=1000, **gate),
        )
        self.twin = ServiceTwin(
            TwinConfig(
                BLOCK_SIZE,
                credit,
                decay,
                scale,
                track,
                THRESHOLD,
                self.core.limits.reservation_ttl_s,
            )
        )
        self.twin.now = self.now
        self.core.tick(self.now)
        self.closed: dict[str, float] = {}
        self.open_lease("k", "x", 80.0)
        self.open_lease("l", "x", 160.0)
        for worker_id in range(1, workers + 1):
            self.put_worker(
                worker_id, size=1, start=0, taints=frozenset(), limited=True, moved=False
            )

    def later(self) -> float:
        self.now += 1.0
        self.twin.now = self.now
        return self.now

    # -- workers -------------------------------------------------------------------------------

    @rule(
        worker_id=worker_ids,
        size=st.integers(1, 2),
        start=st.integers(0, 1),
        taints=taints,
        limited=st.sampled_from([True, True, False]),
        moved=st.booleans(),
    )
    def put_worker(
        self,
        worker_id: int,
        size: int,
        start: int,
        taints: frozenset[str],
        *,
        limited: bool,
        moved: bool,
    ) -> None:
        old = self.twin.workers.get(worker_id)
        before = old.sources if old else {}
        sources = {
            rank: before[rank] if rank in before and not moved else self.new_endpoint()
            for rank in range(start, start + size)
        }
        spec = WorkerSpec(
            worker_id=worker_id,
            endpoint=f"http://{worker_id}",
            block_size=BLOCK_SIZE,
            data_parallel_start_rank=start,
            data_parallel_size=size,
            kv_events_endpoints={str(rank): at for rank, at in sources.items()},
            max_num_batched_tokens=CAPACITY if limited else None,
            taints=sorted(taints),
        )
        record, effects = self.core.workers.upsert_worker(spec, self.later())
        drains = worker_id in self.twin.drained
        assert record.lifecycle == ("draining" if drains else "schedulable")
        twin = TwinWorker(taints, spec.max_num_batched_tokens, sources)
        if worker_id in self.twin.held_back:  # whoever registers it says that it is there
            self.twin.put_worker(worker_id, twin)
            self.heard_of_drain(effects)
            return
        self.follow(effects)
        self.twin.put_worker(worker_id, twin)

    def new_endpoint(self) -> str:
        self.endpoints += 1
        return f"tcp://127.0.0.1:{self.endpoints}"

    @rule(worker_id=worker_ids, meant=st.sampled_from([False, False, True]))
    def delete_worker(self, worker_id: int, *, meant: bool) -> None:
        if worker_id not in self.twin.workers:
            with pytest.raises(ServiceError, match=f"worker {worker_id} not found"):
                self.core.workers.delete_worker(worker_id, self.later())
            return
        if not meant:
            return
        _, effects = self.core.workers.delete_worker(worker_id, self.later())
        self.follow(effects)
        self.twin.delete_worker(worker_id)

    @rule(worker_id=worker_ids, undone=st.sampled_from([False, True, True]))
    def drain_worker(self, worker_id: int, *, undone: bool) -> None:
        """Take a worker out, or put it back: whom nobody can serve any more is told at once."""
        now = self.later()
        if worker_id not in self.twin.workers:
            with pytest.raises(WorkerNotFound):
                self.core.drains.undrain(worker_id, now)
            return
        drained = self.twin.drained
        is_news = (worker_id in drained) is undone and worker_id not in self.twin.held_back
        if undone:
            status, effects = self.core.drains.undrain(worker_id, now)
            drained.discard(worker_id)
        else:
            status, effects = self.core.drains.drain(worker_id, DrainRequest(), now)
            drained.add(worker_id)
        if not is_news:
            assert not effects.answered
        else:
            self.heard_of_drain(effects)
        ranks = [rank for rank in self.twin.ranks() if rank[0] == worker_id]
        assert status.reservations == sum(len(self.twin.on_rank(rank)) for rank in ranks)
        assert status.prefill_tokens == sum(map(self.twin.prefill, ranks))
        assert status.decode_blocks == sum(map(self.twin.decode, ranks))
        assert status.safe_to_terminate is (not undone and not status.reservations)

    @rule(worker_id=worker_ids, undone=st.sampled_from([False, True, True]))
    def hold_back(self, worker_id: int, *, undone: bool) -> None:
        """A worker's source says that it is not ready, or that it is: no drain is undone by it."""
        twin = self.twin
        before = twin.closed
        if worker_id in twin.workers:
            (twin.held_back.discard if undone else twin.held_back.add)(worker_id)
        why = None if undone else "not ready"
        effects = self.core.drains.hold_back(worker_id, "api", why, self.later())
        if twin.closed == before:
            assert not effects.answered
        else:
            self.heard_of_drain(effects)

    def heard_of_drain(self, effects: Any) -> None:
        """Those that nobody can serve leave, wherever they stand; then those go that may."""
        queue = self.twin.queue
        lost = [at for at, one in enumerate(queue) if not self.twin.eligible(one.wish)]
        told, effects.answered = effects.answered[: len(lost)], effects.answered[len(lost) :]
        assert told == [self.tickets[at] for at in lost]
        assert all(isinstance(ticket.answer, NoEligibleWorker) for ticket in told)
        for at in reversed(lost):
            del queue[at], self.tickets[at]
        self.follow(effects)
        assert not self.twin.head_may_go()

    def follow(self, effects: Any) -> None:
        """Open and close streams as the driver would; hand answers to who waited."""
        for stream in effects.unlisten:
            rank = (stream.rank.worker_id, stream.rank.dp_rank)
            if self.streams.get(rank) is stream:
                del self.streams[rank]
        for listen in effects.listen:
            rank = (listen.stream.rank.worker_id, listen.stream.rank.dp_rank)
            self.streams[rank] = listen.stream
            self.sequence[rank] = 0
        decided = (placement for placement, _ in effects.decided)
        for ticket in effects.answered:
            self.settle(ticket, decided)

    # -- events --------------------------------------------------------------------------------

    @precondition(lambda self: self.twin.workers)
    @rule(
        data=st.data(),
        blocks=letters.filter(bool),
        medium=st.sampled_from(MEDIA),
        skipped=st.sampled_from([0, 0, 0, 1, 2]),
    )
    def store(
        self, data: st.DataObject, blocks: tuple[int, ...], medium: str | None, skipped: int
    ) -> None:
        skipped = min(skipped, len(blocks) - 1)
        new = [blocks[: i + 1] for i in range(skipped, len(blocks))]
        parent = engine_hash(blocks[:skipped]) if skipped else None
        self.publish(
            data,
            {
                "type": "BlockStored",
                "block_hashes": [engine_hash(prefix) for prefix in new],
                "parent_block_hash": parent,
                "token_ids": tokens_of(blocks[skipped:]),
                "block_size": BLOCK_SIZE,
                "medium": medium,
            },
            needs_parent=parent,
        )

    @precondition(lambda self: self.twin.workers)
    @rule(data=st.data(), blocks=letters.filter(bool), medium=st.sampled_from(MEDIA))
    def remove(self, data: st.DataObject, blocks: tuple[int, ...], medium: str | None) -> None:
        hashes = [engine_hash(blocks)]
        self.publish(data, {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium})

    @precondition(lambda self: self.twin.workers)
    @rule(data=st.data(), meant=st.sampled_from([False, False, False, True]))
    def clear(self, data: st.DataObject, *, meant: bool) -> None:
        if meant:
            self.publish(data, {"type": "AllBlocksCleared"})

    def publish(
        self, data: st.DataObject, event: dict[str, Any], needs_parent: int | None = None
    ) -> None:
        rank = data.draw(st.sampled_from(sorted(self.twin.ranks())))
        truth = self.twin.truths[rank]
        if needs_parent is not None and needs_parent not in truth.known:
            return  # what an orphan becomes is up to the index, and tested there
        frames = [
            b"kv-events",
            struct.pack(">Q", self.sequence[rank]),
            msgspec.msgpack.encode([1.0, [event], None]),
        ]
        self.streams[rank].on_live(frames, self.later())
        self.sequence[rank] += 1
        truth.apply([event])

    # -- requests ------------------------------------------------------------------------------

    def token_prompt(self, blocks: tuple[int, ...], tail: int) -> TwinPrompt:
        tokens = tokens_of(blocks, tail)
        packed = sequence_hashes(block_hashes(tokens, BLOCK_SIZE))
        return TwinPrompt(tuple(unpack_u64(packed)), len(tokens), {"token_ids": tokens})

    @rule(blocks=letters, tail=st.integers(1, BLOCK_SIZE - 1), wish=free_wishes)
    def select(self, blocks: tuple[int, ...], tail: int, wish: Wish) -> None:
        prompt = self.token_prompt(blocks, tail)
        request = SelectRequest(token_ids=tokens_of(blocks, tail), **fields_of(wish))
        self.expect(
            prompt, wish, None, {}, lambda: self.core.selection.select(request, self.later())
        )

    @rule(
        target=reservations,
        blocks=letters,
        tail=st.integers(1, BLOCK_SIZE - 1),
        wish=free_wishes,
        term=terms,
        again=st.booleans(),
        reused=st.booleans(),
    )
    def select_and_reserve(
        self,
        blocks: tuple[int, ...],
        tail: int,
        wish: Wish,
        term: dict[str, Any],
        *,
        again: bool,
        reused: bool,
    ) -> str:
        name = self.new_name(reused=reused)
        prompt = self.token_prompt(blocks, tail)
        request = SelectAndReserveRequest(
            token_ids=tokens_of(blocks, tail), reservation_id=name, **fields_of(wish), **term
        )

        def ask() -> Any:
            return self.core.selection.select_and_reserve(request, self.later())

        answer = self.expect(prompt, wish, name, term, ask)
        if again and isinstance(answer, Selection):
            assert ask()[0] == answer  # D14: the same answer, and nothing is booked twice
        return name

    def new_name(self, *, reused: bool = False) -> str:
        """An id nobody has; the last one that was freed may be had again (4.3)."""
        if reused:
            taken = self.twin.live.keys() | {ticket.name for ticket in self.twin.queue}
            for name in reversed(self.twin.freed):
                if name not in taken:
                    return name
        self.names += 1
        return f"r{self.names}"

    def expect(
        self, prompt: TwinPrompt, wish: Wish, name: str | None, term: dict[str, Any], ask: Any
    ) -> Any:
        """Ask, and compare what happens with what the twin says must happen."""
        problem = self.expected_refusal(wish, term)
        if problem is not None:
            with pytest.raises(problem):
                ask()
            return None
        waits = self.twin.must_wait(wish)
        answer, effects = ask()
        assert isinstance(answer, Ticket) is waits
        if waits:
            self.twin.queue.append(TwinTicket(wish, prompt, name, term))
            self.tickets.append(answer)
            return None
        assert not effects.answered
        asked = TwinTicket(wish, prompt, name, term)
        self.accept(asked, answer, effects.decided[0][0].cost)
        return answer

    def is_leaseless(self, term: Mapping[str, Any]) -> bool:
        """Whether a booking names a lease that is not open."""
        return "lease_id" in term and term["lease_id"] not in self.twin.leases

    def expected_refusal(self, wish: Wish, term: dict[str, Any]) -> type[ServiceError] | None:
        if not self.twin.open_ranks():
            return NoSchedulableWorker
        clash = wish.pinned and wish.allowed is not None and wish.pinned[0] not in wish.allowed
        if clash:
            return ServiceError
        if self.is_leaseless(term):
            return LeaseNotFound
        if not self.twin.eligible(wish):
            if self.twin.wished(wish):
                return WorkerDraining
            if not self.twin.queue:
                return NoEligibleWorker
        return None

    def accept(self, asked: TwinTicket, answer: Selection, cost: float) -> None:
        """A choice was made: it must be an arg-min; the twin books it too."""
        prompt, wish, name = asked.prompt, asked.wish, asked.name
        rank = (answer.worker_id, answer.dp_rank)
        among = self.twin.eligible(wish)
        prices = {one: self.twin.cost(one, prompt, wish, among) for one in among}
        assert prices[rank] <= min(prices.values()) + TOLERANCE, prices
        assert cost == pytest.approx(prices[rank], abs=TOLERANCE)
        effective = max(0, prompt.isl_tokens - self.twin.cached_tokens(rank, prompt))
        assert answer.effective_prefill_tokens == effective
        assert (
            answer.overlap.gpu
            == max(
                self.twin.overlap((rank[0], other), prompt)[0]
                for other in self.twin.workers[rank[0]].sources
            )
            * BLOCK_SIZE
        )
        if name is None:
            return
        blocks = self.twin.decode(rank) + self.twin.new_blocks(rank, prompt.chain)
        assert answer.potential_decode_blocks == blocks
        booked = effective if self.twin.config.track else 0
        self.book(TwinReservation(name, rank, prompt, booked, self.now), asked.term)

    def book(self, reservation: TwinReservation, term: Mapping[str, Any]) -> None:
        reservation.lease, reservation.ttl_s = term.get("lease_id"), term.get("ttl_s")
        self.twin.book(reservation)

    def settle(self, ticket: Ticket, decided: Iterator[Placement]) -> None:
        """A waiting request has its answer: it was the head of the queue and could go."""
        assert self.twin.head_may_go()
        expected = self.twin.queue.pop(0)
        assert self.tickets.pop(0) is ticket
        if not self.twin.eligible(expected.wish):
            assert isinstance(ticket.answer, NoEligibleWorker)
            return
        if self.is_leaseless(expected.term):
            assert isinstance(ticket.answer, LeaseNotFound)
            return
        assert isinstance(ticket.answer, Selection)
        self.accept(expected, ticket.answer, next(decided).cost)

    @rule(
        target=reservations,
        data=st.data(),
        chain=st.lists(st.integers(0, 3), max_size=5).map(tuple),
        isl=st.sampled_from([8, 9, 30, 0]),
        prefill=st.sampled_from([None, 0, 3, 8, 20]),
        term=terms,
        reused=st.booleans(),
    )
    def reserve(
        self,
        data: st.DataObject,
        chain: tuple[int, ...],
        isl: int,
        prefill: int | None,
        term: dict[str, Any],
        *,
        reused: bool,
    ) -> str:
        """Book a rank by hand, with hashes that are chained to nothing and may repeat."""
        name = self.new_name(reused=reused)
        if not self.twin.workers:
            return name
        rank = data.draw(st.sampled_from(sorted(self.twin.ranks())))
        prefill = None if prefill is None else min(prefill, isl)
        request = ReservationRequest(
            reservation_id=name,
            worker_id=rank[0],
            dp_rank=rank[1],
            sequence_hashes=list(chain),
            isl_tokens=isl,
            effective_prefill_tokens=prefill,
            **term,
        )
        if self.is_leaseless(term):
            with pytest.raises(LeaseNotFound):
                self.core.reservations.reserve(request, self.later())
            return name
        if rank[0] in self.twin.closed:
            with pytest.raises(WorkerDraining):
                self.core.reservations.reserve(request, self.later())
            return name
        answer, effects = self.core.reservations.reserve(request, self.later())
        assert (answer.worker_id, answer.dp_rank) == rank
        self.follow(effects)
        prompt = TwinPrompt(tuple(unpack_u64(pack_u64(chain))), isl, {"token_ids": []})
        booked = prefill if prefill is not None else isl if self.twin.config.track else 0
        self.book(TwinReservation(name, rank, prompt, booked, self.now), term)
        assert self.core.reservations.reserve(request, self.later())[0] == answer  # D14
        request.isl_tokens = isl + 1
        with pytest.raises(ReservationConflict):
            self.core.reservations.reserve(request, self.later())
        return name

    # -- lifecycle -----------------------------------------------------------------------------

    @rule(name=reservations)
    def prefill_complete(self, name: str) -> None:
        if name not in self.twin.live:
            with pytest.raises(ReservationNotFound):
                self.core.reservations.prefill_complete(name, self.later())
            return
        effects = self.core.reservations.prefill_complete(name, self.later())
        self.twin.live[name].prefill_done = True
        self.twin.alive(name)
        self.follow(effects)
        assert not self.twin.head_may_go()

    @rule(name=reservations, fraction=fractions)
    def output_block(self, name: str, fraction: float | None) -> None:
        if name not in self.twin.live:
            with pytest.raises(ReservationNotFound):
                self.core.reservations.output_block(name, fraction, self.later())
            return
        self.core.reservations.output_block(name, fraction, self.later())
        self.twin.output_block(name, fraction)

    @rule(name=reservations)
    def free(self, name: str) -> None:
        if name in self.twin.live:
            effects = self.core.reservations.free(name, self.later())
            self.twin.alive(name)
            self.twin.release(name)
            self.follow(effects)
            assert not self.twin.head_may_go()
        elif self.twin.must_remember(name):
            self.follow(
                self.core.reservations.free(name, self.later())
            )  # D4: no error, and nothing happens
        elif name not in self.twin.freed:
            with pytest.raises(ReservationNotFound):
                self.core.reservations.free(name, self.later())

    @rule(
        names=st.lists(reservations, max_size=4),
        kind=st.sampled_from(["prefill_complete", "output_block", "free"]),
        fraction=fractions,
        count=st.integers(1, 3),
    )
    def batch(self, names: list[str], kind: str, fraction: float | None, count: int) -> None:
        """Many lifecycle calls: each is what it would be alone."""
        for name in names:
            if kind == "free" and name in self.twin.freed and not self.twin.must_remember(name):
                continue  # may be remembered, must not
            lives = name in self.twin.live
            operation: Any
            if kind == "prefill_complete":
                operation = BatchPrefillComplete(reservation_id=name)
            elif kind == "free":
                operation = BatchFree(reservation_id=name)
            else:
                operation = BatchOutputBlock(
                    reservation_id=name, decay_fraction=fraction, count=count
                )
            result, effects = self.core.reservations.operate(operation, self.later())
            known = lives or (kind == "free" and self.twin.must_remember(name))
            assert result.status == (200 if known else 404)
            if lives and kind == "output_block":
                for _ in range(count):
                    self.twin.output_block(name, fraction)
            elif lives:
                self.twin.live[name].prefill_done = True
                self.twin.alive(name)
                if kind == "free":
                    self.twin.release(name)
            self.follow(effects)

    # -- leases --------------------------------------------------------------------------------

    @rule(lease_id=lease_ids, owner=st.sampled_from("xxxy"), ttl_s=lease_ttls)
    def open_lease(self, lease_id: str, owner: str, ttl_s: float) -> None:
        request = LeaseRequest(lease_id=lease_id, owner=owner, ttl_s=ttl_s)
        known = self.twin.leases.get(lease_id)
        if known is not None and known.owner != owner:
            with pytest.raises(LeaseConflict):
                self.core.reservations.open_lease(request, self.later())
            return
        now = self.later()
        if now - self.closed.get(lease_id, -REOPEN_S) < REOPEN_S:
            with pytest.raises(LeaseReopened):
                self.core.reservations.open_lease(request, now)
            return
        self.closed.pop(lease_id, None)
        self.core.reservations.open_lease(request, now)
        self.twin.leases[lease_id] = TwinLease(owner, ttl_s, self.now)

    @rule(lease_id=lease_ids, ttl_s=st.none() | lease_ttls)
    def renew_lease(self, lease_id: str, ttl_s: float | None) -> None:
        lease = self.twin.leases.get(lease_id)
        if lease is None:
            with pytest.raises(LeaseNotFound):
                self.core.reservations.renew_lease(
                    lease_id, LeaseRenewal(ttl_s=ttl_s), self.later()
                )
            return
        self.core.reservations.renew_lease(lease_id, LeaseRenewal(ttl_s=ttl_s), self.later())
        lease.renewed_at = self.now
        lease.ttl_s = lease.ttl_s if ttl_s is None else ttl_s

    @rule(lease_id=lease_ids, meant=st.sampled_from([False, False, True]))
    def close_lease(self, lease_id: str, *, meant: bool) -> None:
        if lease_id not in self.twin.leases or not meant:
            return
        unseen = self.twin.head_may_go()  # thanks to a worker that came: that lets nobody in (3.6)
        loads = len(self.twin.live)
        lease, effects = self.core.reservations.close_lease(lease_id, self.later())
        assert lease is not None
        assert not lease.reservations, "few enough for one turn"
        self.twin.end_lease(lease_id)
        self.closed[lease_id] = self.now
        lighter = len(self.twin.live) < loads
        self.follow(effects)
        assert not self.twin.head_may_go() or (unseen and not lighter)

    @invariant()
    def leases_are_open_or_not(self) -> None:
        found = self.core.reservations.leases(self.now, None, 100)
        assert {
            (lease.lease_id, lease.owner, lease.ttl_s, lease.expires_in_s) for lease in found.leases
        } == {
            (name, one.owner, one.ttl_s, max(0.0, one.renewed_at + one.ttl_s - self.now))
            for name, one in self.twin.leases.items()
        }
        for name in self.twin.leases:
            under = self.core.lifecycle.leases.get(name).reservations
            assert {one.reservation_id for one in under if one.live} == {
                one.name for one in self.twin.live.values() if one.lease == name
            }

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def hang_up(self, data: st.DataObject) -> None:
        """Somebody who waits goes away."""
        number = data.draw(st.integers(0, len(self.tickets) - 1))
        assert self.core.waiting_requests.withdraw(self.tickets.pop(number))
        self.twin.queue.pop(number)

    @rule(seconds=st.sampled_from([50.2, 70.3, 150.7, 400.1]))
    def time_passes(self, seconds: float) -> None:
        unseen = self.twin.head_may_go()
        self.now += seconds
        self.twin.now = self.now
        self.twin.expire()
        more = True
        while more:
            more, effects = self.core.tick(self.now)
            self.follow(effects)
        is_looked_at = seconds >= self.core.limits.queue_recheck_s
        assert not self.twin.head_may_go() or (unseen and not is_looked_at)

    @rule()
    def housekeeping(self) -> None:
        """One turn: what has expired goes, the queue may be looked at again, else nothing."""
        self.twin.expire()
        _, effects = self.core.tick(self.now)
        assert [effects.unlisten, effects.listen, effects.published] == [[], [], []]
        self.follow(effects)

    # -- what is always true -------------------------------------------------------------------

    @invariant()
    def promises_hold(self) -> None:
        self.core.check()

    @invariant()
    def loads_are_the_sum_of_live_reservations(self) -> None:
        expected = {
            rank: (self.twin.prefill(rank), self.twin.decode(rank), len(self.twin.on_rank(rank)))
            for rank in self.twin.ranks()
        }
        assert self.loads() == expected
        scopes = self.core.queries.loads()
        assert sum(scope.pending_count for scope in scopes) == len(self.twin.queue)
        isl = sum(ticket.prompt.isl_tokens for ticket in self.twin.queue)
        assert sum(scope.pending_isl_tokens for scope in scopes) == isl

    def loads(self) -> dict[Rank, tuple[int, int, int]]:
        return {
            (row.worker_id, row.dp_rank): (
                row.potential_prefill_tokens,
                row.potential_decode_blocks,
                row.active_requests,
            )
            for scope in self.core.queries.loads()
            for row in scope.loads
        }

    @precondition(lambda self: self.twin.open_ranks())
    @rule(blocks=letters, tail=st.integers(1, BLOCK_SIZE - 1))
    def inspect(self, blocks: tuple[int, ...], tail: int) -> None:
        """/overlap_scores and /potential_loads of any prompt."""
        prompt, tokens = self.token_prompt(blocks, tail), tokens_of(blocks, tail)
        scores = self.core.queries.overlap_scores(OverlapScoresRequest(token_ids=tokens))
        seen = {
            (row.worker_id, row.dp_rank): (
                row.device_blocks,
                row.host_pinned_extension_blocks,
                row.disk_extension_blocks,
            )
            for row in scores.workers
        }
        assert seen == {rank: self.twin.overlap(rank, prompt) for rank in self.twin.ranks()}
        for row in self.core.queries.potential_loads(PotentialLoadsRequest(token_ids=tokens)):
            rank = (row.worker_id, row.dp_rank)
            added = max(0, prompt.isl_tokens - self.twin.cached_tokens(rank, prompt))
            added = added if self.twin.config.track else 0
            assert row.potential_prefill_tokens == self.twin.prefill(rank) + added
            blocks_then = self.twin.decode(rank) + self.twin.new_blocks(rank, prompt.chain)
            assert row.potential_decode_blocks == blocks_then

    def teardown(self) -> None:
        """Free everything: all loads go to zero, nobody waits."""
        if not hasattr(self, "twin"):
            return
        while self.tickets:
            assert self.core.waiting_requests.withdraw(self.tickets.pop())
        for name in list(self.twin.live):
            self.core.reservations.free(name, self.later())
        assert set(self.loads().values()) <= {(0, 0, 0)}
        self.core.check()


def fields_of(wish: Wish) -> dict[str, Any]:
    """A wish as the members of a request."""
    fields: dict[str, Any] = {}
    if wish.allowed is not None:
        fields["allowed_worker_ids"] = sorted(wish.allowed)
    if wish.pinned is not None:
        fields["pinned_worker"] = PinnedWorker(*wish.pinned)
    if wish.required or wish.preferred:
        fields["routing_constraints"] = RoutingConstraints(
            sorted(wish.required), dict(wish.preferred)
        )
    return fields


def test_the_service_and_its_twin_agree() -> None:
    run_state_machine_as_test(
        ServiceMachine,
        settings=settings(max_examples=examples(30), stateful_step_count=40, deadline=None),
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_service_and_its_twin_agree_for_long() -> None:
    run_state_machine_as_test(
        ServiceMachine,
        settings=settings(max_examples=share_of(600), stateful_step_count=80, deadline=None),
    )
