"""The gate: every check in one fixed order; the first refusal wins and is named.

    1 unavailable  no schedulable worker      nothing else means anything then
    2 busy         every candidate is busy    one bit per rank, nearly always one look
    3 capacity     N + Q of every candidate   the same
    4 policy       budgets, then the policy   O(1), or one vector expression
    5 cache_hit    no candidate holds enough  needs the index's matches, so it comes last

Cheap and certain checks come first. 1 to 4 are judged here, 5 in `cache_hits.py`. Nothing is
charged until all have passed: `judge` only looks, `admit` and `settle` charge and count. A request
that returns in time is not refused for load (2 to 4): if it cannot go at once, it waits.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, Generic, Literal, NamedTuple, TypeVar

from select_service.core.admission.policy_api import ADMIT, AdmissionVerdict, Outcome
from select_service.core.admission.retry_after import NO_ROOM, RetryPromises, Room
from select_service.core.admission.tallies import Tallies
from select_service.core.admission.traffic import LEFT_SHARE_MIN, AdmittedTraffic

if TYPE_CHECKING:
    from collections.abc import Iterator

    from select_service.core.admission.busy import BusyRanks
    from select_service.core.admission.capacity import WorkerCaps
    from select_service.core.admission.classes import SloClasses
    from select_service.core.admission.fair_queue import Waiting
    from select_service.core.admission.policies import Built
    from select_service.core.admission.policy_api import AdmissionPolicy, AdmissionRequest, Facts
    from select_service.core.admission.pool_load import PoolLoad
    from select_service.core.admission.slo_shed import SloShed
    from select_service.core.admission.tallies import ByTenant, ClassTally
    from select_service.core.columns import Rows

T = TypeVar("T")
GateName = Literal["", "unavailable", "busy", "capacity", "policy", "cache_hit", "waiting"]

UNAVAILABLE: Final = AdmissionVerdict("refuse", "no schedulable workers", "unavailable")
BUSY: Final = AdmissionVerdict(
    "refuse", "All workers are busy, please retry later", "all-workers-busy"
)
EXPIRED_WAITING: Final = AdmissionVerdict("refuse", "expired-waiting", "expired-waiting")
AT_CAPACITY: Final = AdmissionVerdict(
    "refuse", "Server overloaded: worker at capacity", "workers-at-capacity"
)
OUTRANKED: Final = AdmissionVerdict("refuse", "outranked", "outranked")
WAITS_FOR_WORKER: Final = AdmissionVerdict("wait", "", "waits-for-worker")
PROMISED: Final = "promised"
_HARD: Final = frozenset({"unavailable", "capacity"})
"""Gates that no promise overrides: no worker at all, or N + Q, which is exact."""
_FULL_NOW: Final = frozenset({"busy", "capacity"})
"""Gates that are asked before the policy, and whose refusals pass with time."""
LET_IN_MAX: Final = 64
"""Admitted requests not counted yet: some 20 µs together."""
RETURN_SHARE: Final = 0.0625
"""Share of the drain rate promised to returning requests; the rest is for newcomers. A share of 1
would turn an overload into one long queue in which all are late: returning requests usually are
already, and what they take is lost to requests in time (`bench/admission`). A smaller share makes
refused requests wait even longer."""


class AdmissionDecision(NamedTuple):
    """The gate's answer to one request, and why."""

    outcome: Outcome
    reason: str  # the text for people, in the field's wording
    code: str  # stable and short
    policy: str
    gate: GateName  # the check that refused; "" if none did
    retry_after_s: float = 0.0  # infinity: the request never fits, a retry is of no use
    promised: bool = False  # whether a place is held for its return
    details: Facts | None = None

    @property
    def admitted(self) -> bool:
        """Whether it may be placed now."""
        return self.outcome == "admit"


class Gate(Generic[T]):
    """All checks of one partition; `T` is the item that waits in a policy's queue.

    Others (`partition_admission.py`, or the simulator's pool) keep its books up to date with every
    change of load; the gate only reads them.
    """

    def __init__(
        self,
        classes: SloClasses,
        policy: AdmissionPolicy,
        pool: PoolLoad,
        *,
        queue: SloShed[T] | None = None,
        busy: BusyRanks | None = None,
        caps: WorkerCaps | None = None,
        returns: RetryPromises | None = None,
        by_tenant: ByTenant | None = None,
        tenant_id: str | None = None,
    ) -> None:
        self.classes = classes
        self.policy = policy
        self.pool = pool
        self.queue = queue
        """Where requests wait when the policy says so: the policy itself, or the one it wraps."""
        pool.aim(queue)
        self.busy = busy
        self.caps = caps
        self.returns = returns or RetryPromises(len(classes.bands))
        self.tenant_id = tenant_id
        self._tallies = Tallies(classes, by_tenant)
        self._know_classes()
        self._traffic = AdmittedTraffic(len(classes.bands))
        self._let_in: list[AdmissionRequest] = []  # since the traffic last faded, not counted yet
        self._counts_at = self._traffic.fades_at
        self.admitted = AdmissionDecision("admit", "", "", policy.name, "")
        """The decision for every request that may go on."""
        self._promised: AdmissionRequest | None = None
        """The last settled request that held a promise."""

    def _know_classes(self) -> None:
        """Index by class: its tally, its band, and the name it is counted under."""
        classes, of = self.classes, self._tallies.of
        self._lines = {name: (of[name], classes.band(name), name) for name in classes.names}
        self._usual_line = self._lines[classes.usual]

    @property
    def tallies(self) -> Tallies:
        """Outcomes of all requests."""
        if self._let_in:
            self._count()
        return self._tallies

    # -- judging -------------------------------------------------------------------------------

    def judge(self, ask: AdmissionRequest, rows: Rows, now: float) -> AdmissionDecision:
        """Say whether a request may be placed on one of these rows now; charges nothing."""
        gate, verdict = self.first_word(ask, rows, now)
        return self.decide(ask, gate, verdict, rows, now)

    def decide(
        self,
        ask: AdmissionRequest,
        gate: GateName,
        verdict: AdmissionVerdict,
        rows: Rows,
        now: float,
    ) -> AdmissionDecision:
        """Turn the verdict of one check into a decision; a refusal gets its time to return."""
        if verdict is ADMIT:
            return self.admitted
        if gate not in _HARD and self.returns.is_due(ask.key, now):
            return self._honour(ask, gate, rows, now)
        if verdict.outcome == "wait":
            return AdmissionDecision("wait", verdict.reason, verdict.code, self.policy.name, gate)
        return self._refusal(ask, gate, verdict, now)

    def first_word(
        self, ask: AdmissionRequest, rows: Rows, now: float
    ) -> tuple[GateName, AdmissionVerdict]:
        """Return the first refusal, else whether and where the request has to wait."""
        if not self.pool.instances:
            return "unavailable", UNAVAILABLE
        if self.busy is not None and self.busy.all_busy(rows):
            return "busy", BUSY
        places = self._places(rows)
        if places is not None and not places:
            return "capacity", AT_CAPACITY
        verdict = self.policy.judge(ask, self.pool, now)
        if places is not None and verdict.outcome != "refuse":
            return "capacity", WAITS_FOR_WORKER  # Q is exact, whatever else it waits for
        return "policy", verdict

    def _places(self, rows: Rows) -> bool | None:
        """Tell whether one more may wait for a worker; None: one is open, it need not."""
        if self.caps is None or not self.caps.all_full(rows):
            return None
        return self.caps.has_place(rows)

    def _honour(
        self, ask: AdmissionRequest, gate: GateName, rows: Rows, now: float
    ) -> AdmissionDecision:
        """Keep a promise: a queue takes the request beyond its quota; without a queue, it goes.

        Not beyond N + Q: if every candidate is full it waits for one, if there is a place.
        """
        places = self._places(rows)
        if places is not None and not places:
            return self._refusal(ask, "capacity", AT_CAPACITY, now)
        if gate == "policy" and self.queue is None and places is None:
            return self.admitted
        return AdmissionDecision("wait", "", PROMISED, self.policy.name, gate)

    # -- refusing ------------------------------------------------------------------------------

    def _refusal(
        self, ask: AdmissionRequest, gate: GateName, verdict: AdmissionVerdict, now: float
    ) -> AdmissionDecision:
        if verdict.can_fit and gate in _FULL_NOW:
            of_policy = self.policy.judge(ask, self.pool, now)
            if not of_policy.can_fit:  # else it would come again until the policy's turn
                gate, verdict = "policy", of_policy
        if not verdict.can_fit:
            return AdmissionDecision(
                "refuse",
                verdict.reason,
                verdict.code,
                self.policy.name,
                gate,
                math.inf,
                details=verdict.facts,
            )
        band = self.classes.band(ask.slo_class)
        room = self._room(ask, gate, verdict, band, now)
        promise = self.returns.grant(
            ask.key, band, room, now, is_unique=ask.is_unique, tenant=self.tenant_id
        )
        return AdmissionDecision(
            "refuse",
            verdict.reason,
            verdict.code,
            self.policy.name,
            gate,
            promise.retry_after_s,
            promise.is_kept,
            verdict.facts,
        )

    def _room(
        self,
        ask: AdmissionRequest,
        gate: GateName,
        verdict: AdmissionVerdict,
        band: int,
        now: float,
    ) -> Room:
        """Return the room a refused request waits for."""
        if gate == "unavailable":
            return NO_ROOM
        if gate == "capacity":
            _, ends_per_s = self._left(band, 0.0, now)
            return Room("requests", 1.0, ends_per_s * RETURN_SHARE, 0.0)
        line, rate = self.policy.refill(ask, self.pool)
        work = max(1, ask.work)  # a cached prompt takes a place, too
        if gate == "busy":
            line, rate = "pool", self.pool.prefill_rate * self.pool.instances
        earliest_s = verdict.retry_in_s
        if line == "pool" and rate > 0.0:
            ahead = self.pool.prefill_backlog
            if self.queue is not None:
                ahead += self.queue.work_ahead(band)
            earliest_s = max(earliest_s, ahead / rate)
            rate, ends_per_s = self._left(band, rate, now)
            if ends_per_s:  # long answers may be what fills the pool
                rate = min(rate, work * ends_per_s)
        if earliest_s == math.inf:  # it never fits
            return NO_ROOM
        rate *= RETURN_SHARE
        return Room(line, work if line == "pool" else ask.tokens, rate, earliest_s)

    def _left(self, band: int, rate: float, now: float) -> tuple[float, float]:
        """Return what the bands above leave over of a rate of work, and of the ends per second."""
        work, requests = (self if self.queue is None else self.queue).above(band, now)
        ends_per_s = self.pool.requests_per_s
        return (
            max(rate - work, rate * LEFT_SHARE_MIN),
            max(ends_per_s - requests, ends_per_s * LEFT_SHARE_MIN),
        )

    def above(self, band: int, now: float) -> tuple[float, float]:
        """Return the work and the requests per second that were admitted above this band."""
        if self._let_in:
            self._count()
        return self._traffic.above(band, now), self._traffic.requests_above(band, now)

    def refusal(
        self, ask: AdmissionRequest, gate: GateName, reason: str, code: str, now: float
    ) -> AdmissionDecision:
        """Express a refusal decided elsewhere (a full queue, say) as a decision of the gate."""
        return self._refusal(ask, gate, AdmissionVerdict("refuse", reason, code), now)

    # -- settling ------------------------------------------------------------------------------

    def admit(self, ask: AdmissionRequest, now: float) -> None:
        """Charge a request that need not wait; it is counted later, together with others.

        Nearly all requests take this path, and counting one by one costs four times as much.
        """
        policy, let_in = self.policy, self._let_in
        if policy.charges:
            policy.charge(ask, now)
        if now > self._counts_at or len(let_in) >= LET_IN_MAX:
            self._count()
            self._counts_at = self._traffic.faded(now)
        let_in.append(ask)
        if self.returns.size:
            self._redeem(ask)

    def _count(self) -> None:
        """Count the requests admitted since the last call."""
        tenants, sums = self._tallies.by_tenant.admitted, self._traffic.sums
        requests = self._traffic.requests
        for ask in self._let_in:
            tally, band, _ = self._lines.get(ask.slo_class, self._usual_line)
            tally.offered += 1
            tally.admitted += 1
            sums[band] += ask.tokens if ask.prefill_tokens < 0 else ask.prefill_tokens
            requests[band] += 1.0
            count = tenants.counts.get(ask.tenant_id)
            if count is None:
                tenants.add(ask.tenant_id)
            else:
                tenants.counts[ask.tenant_id] = count + 1
        self._let_in.clear()

    def settle(self, decision: AdmissionDecision, ask: AdmissionRequest, now: float) -> None:
        """Charge and count a decision, in the same step as the booking."""
        if decision.outcome == "admit":
            self.admit(ask, now)
            return
        tally, _, name = self._lines.get(ask.slo_class, self._usual_line)
        tally.offered += 1
        self.tallies.note(decision.policy, decision.gate, decision.outcome, decision.code, name)
        if decision.outcome == "wait":
            tally.waiting += 1
            tally.waited += 1
            self._promised = ask if decision.code == PROMISED else None
            self._redeem(ask)
        else:
            tally.refused += 1
            self.tallies.by_tenant.refused.add(ask.tenant_id)

    def too_few_hits(self, ask: AdmissionRequest, now: float) -> None:
        """Count a request turned away because no candidate holds enough of its prompt.

        It gets no time to return, as time does not help.
        """
        code, name = "cache_threshold", self.policy.name
        self.settle(AdmissionDecision("refuse", code, code, name, "cache_hit"), ask, now)

    def _admit(self, ask: AdmissionRequest, tally: ClassTally, band: int, now: float) -> None:
        tally.admitted += 1
        self.tallies.by_tenant.admitted.add(ask.tenant_id)
        if self.queue is None:
            self._traffic.add(band, ask.work, now)
        if self.returns.size:
            self._redeem(ask)

    def _redeem(self, ask: AdmissionRequest) -> None:
        if self.returns.size and ask.key:
            self.returns.redeem(ask.key)

    # -- waiting -------------------------------------------------------------------------------

    def enqueue(self, ask: AdmissionRequest, item: T, now: float) -> Waiting[T]:
        """Queue an item in the policy's queue, after its decision was settled."""
        assert self.queue is not None
        return self.queue.enqueue(ask, item, now, is_promised=ask is self._promised)

    def next_waiting(self) -> Waiting[T] | None:
        """Return the next request that may go now; `serve` or `withdraw` it before asking again."""
        return next(self.may_go(1), None)

    def may_go(self, limit: int) -> Iterator[Waiting[T]]:
        """Yield up to `limit` requests that may go now, in order.

        For a caller that must find one with a free worker: serve at most one, then ask again.
        """
        return iter(()) if self.queue is None else self.queue.may_go(self.pool, limit)

    def serve(self, one: Waiting[T], now: float) -> None:
        """Charge and count a request from the policy's queue that is placed."""
        assert self.queue is not None
        self.queue.serve(one, now)
        self._admit_waiting(one.ask, now)

    def placed(self, ask: AdmissionRequest, now: float) -> None:
        """Charge and count a request that waited elsewhere (for a worker) and is placed."""
        self.policy.charge(ask, now)
        self._admit_waiting(ask, now)

    def _admit_waiting(self, ask: AdmissionRequest, now: float) -> None:
        tally = self._leave(ask, "admit", "")
        self._admit(ask, tally, self.classes.band(ask.slo_class), now)

    def withdraw(self, one: Waiting[T], now: float) -> bool:
        """Remove a request from the policy's queue, as its client left; not charged."""
        if self.queue is None or not self.queue.withdraw(one, now):
            return False
        self.gone(one.ask)
        return True

    def gone(self, ask: AdmissionRequest) -> None:
        """Count a request that waited elsewhere and whose client left."""
        self._leave(ask, "withdrawn", "").withdrawn += 1

    def expired(self, now: float, limit: int) -> list[tuple[Waiting[T], AdmissionDecision]]:
        """Refuse up to `limit` expired requests of the policy's queue."""
        if self.queue is None or self.queue.next_expiry() > now:
            return []
        return [(one, self.refuse_waiting(one.ask, now)) for one in self.queue.expired(now, limit)]

    def refuse_waiting(self, ask: AdmissionRequest, now: float) -> AdmissionDecision:
        """Refuse a request that has waited too long, wherever it did; not charged."""
        decision = self._refusal(ask, "waiting", EXPIRED_WAITING, now)
        self._leave(ask, "refuse", decision.code).refused += 1
        self.tallies.by_tenant.refused.add(ask.tenant_id)
        return decision

    def turn_away(self, ask: AdmissionRequest, code: str) -> None:
        """Count a request that waited elsewhere and was refused there; not charged."""
        self._leave(ask, "refuse", code).refused += 1
        self.tallies.by_tenant.refused.add(ask.tenant_id)

    def _leave(self, ask: AdmissionRequest, outcome: str, code: str) -> ClassTally:
        name = self.tallies.name_of(ask.slo_class)
        self.tallies.note(self.policy.name, "waiting", outcome, code, name)
        tally = self.tallies.of[name]
        tally.waiting -= 1
        return tally

    # -- another policy ------------------------------------------------------------------------

    def change(self, built: Built[T], now: float) -> list[Waiting[T]]:
        """Put another policy in force at once; counters stay.

        Returns:
            The requests that waited in the old policy's queue: `enqueue` each again, or place it
            and call `placed`. They still count as waiting.
        """
        self._count()
        waiting = [] if self.queue is None else self.queue.clear(now)
        if built.classes.bands != self.classes.bands:
            self.returns = self.returns.anew(len(built.classes.bands))
            self._traffic = AdmittedTraffic(len(built.classes.bands))
        self.classes, self.policy, self.queue = built.classes, built.policy, built.queue
        self.pool.aim(built.queue)
        self._counts_at = -math.inf
        self.tallies.know(built.classes)
        self._know_classes()
        self.admitted = AdmissionDecision("admit", "", "", built.policy.name, "")
        return waiting

    def check(self) -> None:
        """Assert all invariants of the gate and its books."""
        self.tallies.check()
        self.returns.check()
        self.pool.check()
        if self.busy is not None:
            self.busy.check()
        if self.caps is not None:
            self.caps.check()
