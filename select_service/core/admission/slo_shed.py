"""slo-shed: ceilings per band, early refusal of the hopeless, quotas, fairness. Our own policy.

Its guarantees, which tests check:

* A band's quota is its own: a request is refused as `band-full` only when that many requests of
  its own band wait, or, if it is sheddable, when its tenant has most of them and others want some.
  No lower band is admitted while a higher one waits.
* Hence no inversion: between the admission of a sheddable request and the refusal of a critical
  one, more criticals than their quota arrive, or the critical one's own deadline passes.
* Critical and standard requests are never refused for saturation; they wait. If all places to
  wait for a worker (Q) are taken, the last of the sheddable requests below gives way (`outranked`).
* A request that returns in time waits behind those two classes only, whatever its band: its
  promise is kept while more important newcomers keep coming.
* A request that is refused, or waits in vain, is not charged.

The queue is part of the policy: if `judge` says "wait", the caller calls `enqueue`, and asks
`may_go` which requests may go when load drops.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from select_service.core.admission.fair_queue import FairQueue, Waiting
from select_service.core.admission.policy_api import ADMIT, AdmissionPolicy, AdmissionVerdict
from select_service.core.admission.slo_shed_settings import SloShedSettings
from select_service.core.admission.token_bucket import TenantBuckets
from select_service.core.admission.traffic import LEFT_SHARE_MIN, MEMORY_S, AdmittedTraffic
from select_service.core.admission.waiting_deadline import in_time_s

if TYPE_CHECKING:
    from collections.abc import Iterator

    from select_service.core.admission.classes import SloClasses
    from select_service.core.admission.policy_api import AdmissionRequest, Facts
    from select_service.core.admission.pool_load import PoolLoad

T = TypeVar("T")

_AIM_STEP: Final = 0.02
"""Weight of one request in the mean of its line's targets."""
_OWN_TARGETS: Final = (0.1, 10.0)
"""A request's own target counts for saturation down to and up to these multiples of its class's:
whoever claims that of a microsecond must not close the pool for others, and whoever has a year must
not open it."""

BAND_FULL: Final = "band-full"
HOPELESS: Final = "infeasible-deadline"
SATURATED: Final = "saturated"
_WAIT: Final = AdmissionVerdict("wait", "", "waits")

LET_IN_MAX: Final = 64
"""Admitted requests whose charge is still pending: some 30 µs together."""


def ceilings(bands: int, usage_limit: float) -> tuple[float, ...]:
    """Return the saturation at which each band closes, from 1 down to the usage limit."""
    if bands <= 1:
        return (1.0,) * bands
    return tuple(1.0 - band * (1.0 - usage_limit) / (bands - 1) for band in range(bands))


class SloShed(AdmissionPolicy, Generic[T]):
    """The policy with its queue of waiting items.

    `judge` costs O(bands); everything else O(log n) in the number of waiting items.
    """

    name = "slo-shed"
    charges = True

    def __init__(self, classes: SloClasses, settings: SloShedSettings | None = None) -> None:
        self.settings = settings or SloShedSettings()
        self._classes = classes
        bands = len(classes.bands)
        self.ceilings = ceilings(bands, self.settings.usage_limit)
        # One line per band, and one for sheddable requests that return in time: below the bands
        # that are never shed, above those that are.
        self._promised = sum(priority >= 0 for priority in classes.bands)
        limits = list(self.ceilings)
        limits.insert(self._promised, limits[max(0, self._promised - 1)])
        self._closes_at = tuple(limits)
        self._reopen_below = tuple(one - self.settings.hysteresis for one in limits)
        self._is_open = [True] * len(limits)
        self._closed = [0] * len(limits)
        self._queue: FairQueue[T] = FairQueue(self._quotas(), tenants_max=self.settings.tenants_max)
        self._waits_since = 0.0  # when a request began to wait while no other did
        self._traffic = AdmittedTraffic(len(limits))
        self._let_in: list[AdmissionRequest] = []  # admitted while nothing waited, charge pending
        self._in_pool_s = 0.0  # time the pool needs for the booked load, as last computed
        self._targets_s = {
            name: self.settings.targets_s.get(name, self.settings.default_target_s)
            for name in classes.names
        }
        self._usual_target_s = self._targets_s[classes.usual]
        self._aims = [
            min(self._targets_s[name] for name in classes.names if classes.band(name) == band)
            for band in range(max(1, self._promised))
        ]
        """By band that is never shed (or of the highest): the mean target of its requests."""
        self._slack = self.settings.feasibility_slack
        is_held = bool(self._slack)
        self._is_refused_early = [is_held and self.settings.feasibility_critical]
        """By line: whether requests that would be late are refused at once."""
        self._is_refused_early += [is_held] * (len(limits) - 1)
        self._lines = {name: self._terms_of(name) for name in classes.names}
        """By class: its line, and the predicted TTFT above which a request is refused; infinity:
        never."""
        self._usual = self._lines[classes.usual]
        self._judged: AdmissionRequest | None = None  # the last request judged, and its line
        self.judged_line = 0
        capacity, rate = self.settings.budget_tokens, self.settings.budget_tokens_per_s
        self._budgets = (
            None
            if capacity is None
            else TenantBuckets(capacity, rate, tenants_max=self.settings.tenants_max)
        )

    @property
    def queue(self) -> FairQueue[T]:
        """The waiting requests, and the charges of each tenant."""
        if self._let_in:
            self._settle()
        return self._queue

    @property
    def target_ttft_s(self) -> float:
        """Half of the tightest target among the classes that are never shed, in seconds.

        A request let in at the ceiling waits as long as a saturated rank computes, and then for its
        own prompt and the step under way. Targets are those of the requests of late: their own, or
        their class's.
        """
        return min(self._aims) / 2

    def protected_per_s(self, now: float) -> float:
        """Return how many requests per second are admitted in the bands that are never shed."""
        if self._let_in:
            self._settle()
        return self._traffic.requests_above(self._promised, now)

    def _quotas(self) -> list[int]:
        """Return the maximum waiting in each line.

        Promised returns are limited where they are granted.
        """
        given, usual = self.settings.quotas, self.settings.default_quota
        quotas = [0] * len(self._classes.bands)
        for name in self._classes.names:
            band = self._classes.band(name)
            quotas[band] = max(quotas[band], given.get(name, usual))
        quotas.insert(self._promised, 0)
        return quotas

    @property
    def flaps(self) -> list[int]:
        """How often each band has closed."""
        return self._closed[: self._promised] + self._closed[self._promised + 1 :]

    def _terms_of(self, name: str) -> tuple[int, float]:
        line = self.line_of(self._classes.band(name))
        is_held = self._is_refused_early[line]
        return line, self._targets_s[name] * self._slack if is_held else math.inf

    def line_of(self, band: int) -> int:
        """Return the queue's line for a band."""
        return band if band < self._promised else band + 1

    # -- on arrival ----------------------------------------------------------------------------

    def judge(self, ask: AdmissionRequest, pool: PoolLoad, now: float) -> AdmissionVerdict:  # noqa: C901 - all pay for it
        """Admit, queue or refuse a request; nothing is charged."""
        line, limit_s = self._lines.get(ask.slo_class, self._usual)
        if self._budgets is not None:
            line = self.line_of(self._band(ask, now))
            limit_s = self._limit_s(ask, line)
        elif ask.target_s != math.inf:
            limit_s = self._limit_s(ask, line)
        self._judged, self.judged_line = ask, line
        queue = self._queue
        speed, backlog, saturation = pool.outlook()
        if limit_s != math.inf and speed is not None:
            work = ask.prefill_tokens
            if work < 0:
                work = ask.tokens
            predicted_s = self._in_pool_s = speed.ttft_s(backlog, work)  # after all booked load
            if queue.waiting:
                predicted_s += self._queued_s(ask, line, work, speed.tokens_per_s, now)
            # Requests sent to an idle pool measure its speed anew. If the last measurement refused
            # them all, one bad minute would close the pool for ever.
            if predicted_s > limit_s and (backlog or queue.waiting):
                return _hopeless(predicted_s, limit_s, speed.alone_s(work))
        if not queue.waiting and self._is_open[line] and saturation < self._closes_at[line]:
            return ADMIT  # the usual case
        if self._opens(line, saturation) and not (queue.waiting and queue.first_band() <= line):
            return ADMIT
        if queue.has_room(line) and (line < self._promised or queue.has_share(line, ask.tenant_id)):
            return _WAIT
        quota = queue.quota(line)
        if not quota and line >= self._promised:
            facts = {"saturation": saturation, "limit": self._closes_at[line]}
            return AdmissionVerdict("refuse", SATURATED, SATURATED, facts=dict(facts))
        waiting, limit = queue.taken(line, ask.tenant_id)
        return AdmissionVerdict(
            "refuse",
            BAND_FULL,
            BAND_FULL,
            facts={"waiting": waiting, "limit": limit, "saturation": saturation},
        )

    def _band(self, ask: AdmissionRequest, now: float) -> int:
        """Return the effective band: one lower if the tenant is over budget."""
        band = self._classes.band(ask.slo_class)
        if self._budgets is None:
            return band
        t_us = round(now * 1e6)
        bucket = self._budgets.of(self._budget_key(ask), t_us)
        if bucket.holds(ask.work, t_us):
            return band
        return min(band + 1, len(self.ceilings) - 1)

    def _budget_key(self, ask: AdmissionRequest) -> str:
        return f"{ask.tenant_id}\0{self._classes.known(ask.slo_class)}"

    def target_s(self, ask: AdmissionRequest) -> float:
        """Return the TTFT target of a request: its own, else its class's."""
        own = ask.target_s
        if own != math.inf:
            return own
        return self._targets_s.get(ask.slo_class, self._usual_target_s)

    def _limit_s(self, ask: AdmissionRequest, line: int) -> float:
        """Return the predicted TTFT above which a line's request is refused; infinity: never."""
        return self.target_s(ask) * self._slack if self._is_refused_early[line] else math.inf

    def _queued_s(
        self, ask: AdmissionRequest, line: int, work: int, drains: float, now: float
    ) -> float:
        """Return how long the requests waiting in a line and above will take.

        They drain at the rate the lines above leave over, as those will keep coming.
        """
        ahead = self.queue.work_before(line, ask.tenant_id, work)  # `queue` settles pending charges
        if not ahead:
            return 0.0
        return ahead / max(drains - self._traffic.above(line, now), drains * LEFT_SHARE_MIN)

    def _takes(self, drains: float, now: float) -> float:
        """Return the work per second that the pool takes, given how fast it computes prompts.

        Once requests have waited for a while, what was let in meanwhile is all that it takes, also
        where long answers are what fills it.
        """
        if not self._queue.waiting or now - self._waits_since < MEMORY_S:
            return drains
        return min(drains, self._traffic.taken(now))

    def _opens(self, line: int, saturation: float) -> bool:
        """Tell whether a line is open, following the saturation with hysteresis."""
        if self._is_open[line]:
            if saturation < self._closes_at[line]:
                return True
            self._is_open[line] = False
            self._closed[line] += 1
        elif saturation < self._reopen_below[line]:
            self._is_open[line] = True
        return self._is_open[line]

    def charge(self, ask: AdmissionRequest, now: float) -> None:
        """Charge the tenant of an arrival that goes on at once, before any request has to wait."""
        let_in = self._let_in
        if self._queue.waiting or self._budgets is not None:
            self._charge_at_once(ask, now)
            return
        if now > self._traffic.fades_at or len(let_in) >= LET_IN_MAX:
            self._settle()
            self._traffic.faded(now)
        let_in.append(ask)

    def _settle(self) -> None:
        """Charge the pending requests together: one by one would cost three times as much.

        No budgets are in force, so each was admitted in the line of its class.
        """
        serve, sums = self._queue.serve_directly, self._traffic.sums
        requests = self._traffic.requests
        for ask in self._let_in:
            line, _ = self._lines.get(ask.slo_class, self._usual)
            work = ask.tokens if ask.prefill_tokens < 0 else ask.prefill_tokens
            serve(line, ask.tenant_id, self.cost(ask) if ask.output_tokens else work)
            sums[line] += work
            requests[line] += 1.0
            self._note_target(line, ask)
        self._let_in.clear()

    def _charge_at_once(self, ask: AdmissionRequest, now: float) -> None:
        line = self.judged_line
        if self._judged is not ask:  # usually it was judged just before
            line = self.line_of(self._band(ask, now))
        self.queue.serve_directly(line, ask.tenant_id, self.cost(ask))
        self._traffic.add(line, ask.work, now)
        self._note_target(line, ask)
        self._pay(ask, now)

    def charge_of_replica(self, ask: AdmissionRequest, now: float) -> int:
        """Charge the tenant of a request that another replica has admitted to the same pool.

        Its own allowance was charged there: those belong to each replica.

        Returns:
            The line in which it was charged.
        """
        line, _ = self._lines.get(ask.slo_class, self._usual)
        self.queue.serve_directly(line, ask.tenant_id, self.cost(ask))
        self._traffic.add(line, ask.work, now)
        self._note_target(line, ask)
        return line

    def _note_target(self, line: int, ask: AdmissionRequest) -> None:
        """Let the target of an admitted request count for what saturates the pool."""
        if line < len(self._aims):
            of_class = self._targets_s.get(ask.slo_class, self._usual_target_s)
            least, most = _OWN_TARGETS
            target_s = min(max(self.target_s(ask), of_class * least), of_class * most)
            self._aims[line] += (target_s - self._aims[line]) * _AIM_STEP

    def above(self, band: int, now: float) -> tuple[float, float]:
        """Return the work and the requests per second that were admitted above this band."""
        if self._let_in:
            self._settle()
        line = self.line_of(band)
        return self._traffic.above(line, now), self._traffic.requests_above(line, now)

    def cost(self, ask: AdmissionRequest) -> int:
        """Return what a request costs its tenant in fairness."""
        if not ask.output_tokens:
            return ask.work
        return ask.work + int(self.settings.output_weight * ask.output_tokens)

    def answered(self, line: int, tenant_id: str, expected: int, reported: int) -> None:
        """Charge the tenant of a request in this line for its answer, not the expected one."""
        weight = self.settings.output_weight
        self.queue.correct(line, tenant_id, int(weight * reported) - int(weight * expected))

    def _pay(self, ask: AdmissionRequest, now: float) -> None:
        if self._budgets is not None:
            self._budgets.of(self._budget_key(ask), round(now * 1e6)).take(ask.work)

    def _refund(self, ask: AdmissionRequest, now: float) -> None:
        if self._budgets is not None:
            bucket = self._budgets.of(self._budget_key(ask), round(now * 1e6))
            bucket.tokens = min(bucket.capacity, bucket.tokens + ask.work)

    def refill(self, ask: AdmissionRequest, pool: PoolLoad) -> tuple[str, float]:
        """Return the pool's drain rate: computed tokens become room."""
        drains = pool.prefill_rate * pool.instances
        if self._queue.waiting:
            drains = self._takes(drains, pool.now)
        return "pool", drains

    # -- waiting -------------------------------------------------------------------------------

    def enqueue(
        self, ask: AdmissionRequest, item: T, now: float, *, is_promised: bool = False
    ) -> Waiting[T]:
        """Queue an item for as long as its target allows, charging its tenant's budget.

        A line with early refusal gives up waiting early enough for the request to be served in
        time: a late one would delay the next past its target as well.
        """
        band = self._band(ask, now)
        target_s = self.target_s(ask)
        line = self.line_of(band)
        if self._is_refused_early[line]:
            target_s = in_time_s(target_s, self._in_pool_s)
        if is_promised and self._classes.is_sheddable(band):
            line = self._promised
        turn = now if is_promised else None  # ahead of all that came later
        one = Waiting(item, ask, line, self.cost(ask), now + target_s, turn)
        self._pay(ask, now)
        if not self._queue.waiting:
            self._waits_since = now
        self.queue.push(one)
        return one

    def may_go(self, pool: PoolLoad, limit: int) -> Iterator[Waiting[T]]:
        """Yield up to `limit` requests that may go now; `serve` one, then ask again.

        Its band must be open; a closed band also blocks all bands below it.
        """
        saturation = pool.saturation
        for line in self.queue.bands_waiting():
            if not self._opens(line, saturation):
                return
            for one in self.queue.in_order(line):
                if limit <= 0:
                    return
                limit -= 1
                yield one

    def outranked(self, ask: AdmissionRequest, now: float) -> Iterator[Waiting[T]]:
        """Yield sheddable requests waiting in bands below this request's, last in line first."""
        highest = max(self.line_of(self._band(ask, now)), self._promised)
        for line in reversed(self.queue.bands_waiting()):
            if line <= highest:
                return
            yield from self.queue.last_first(line)

    def serve(self, one: Waiting[T], now: float) -> None:
        """Serve a waiting request: charge its tenant."""
        self.queue.serve(one)
        self._traffic.add(one.band, one.work, now)
        self._note_target(one.band, one.ask)

    def withdraw(self, one: Waiting[T], now: float) -> bool:
        """Remove a request whose client left. Not charged."""
        if not self.queue.remove(one):
            return False
        self._refund(one.ask, now)
        return True

    def work_ahead(self, band: int) -> int:
        """Return the prefill tokens waiting in this band and those above it."""
        return self.queue.work_ahead(self.line_of(band))

    def next_expiry(self) -> float:
        """Return when the first waiting request expires; infinity while none waits."""
        return self.queue.next_expiry()

    def expired(self, now: float, limit: int) -> list[Waiting[T]]:
        """Remove up to `limit` expired requests. Not charged."""
        gone = self.queue.expired(now, limit)
        for one in gone:
            self._refund(one.ask, now)
        return gone

    def clear(self, now: float) -> list[Waiting[T]]:
        """Remove all waiting requests, most important first. Not charged."""
        everybody = [
            one for line in self.queue.bands_waiting() for one in self.queue.in_order(line)
        ]
        for one in everybody:
            self.withdraw(one, now)
        return everybody

    def check(self) -> None:
        """Assert all invariants of the queue."""
        self.queue.check()


def _hopeless(predicted_s: float, limit_s: float, alone_s: float) -> AdmissionVerdict:
    """Refuse until enough booked load has drained; for good if its own prefill takes too long."""
    again_s = predicted_s - limit_s if alone_s <= limit_s else math.inf
    facts: Facts = {"predicted_ttft_s": predicted_s, "limit": limit_s}
    return AdmissionVerdict("refuse", HOPELESS, HOPELESS, again_s, facts)
