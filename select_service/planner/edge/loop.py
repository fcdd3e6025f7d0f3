"""The loop: collect, decide, act, repeat; slowly by forecasts, quickly by load.

Ticks are on a fixed grid from the start, so that long work shifts nothing. Without the lease the
planner collects and learns, but changes nothing. Forecasts may take long, so the core decides in a
thread, one decision at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, deque
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec.structs import replace

from select_service.planner.errors import PlannerError
from select_service.planner.types import Missing, PoolState, Target

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from select_service.planner.core.fleet_plan import FleetPlan
    from select_service.planner.edge.connectors.connector import Connector
    from select_service.planner.edge.engine_drain import EngineDrain
    from select_service.planner.edge.leases.lease import LeaderLease
    from select_service.planner.edge.sources.source import TrafficSource
    from select_service.planner.edge.state_file import StateFile
    from select_service.planner.types import Load, ModelKey, PoolKey, ScalingDecision, Window

DECISIONS_MAX: Final = 200
"""Decisions kept for /decisions: ten hours of three-minute intervals with changes."""
UNCOUNTED_REPORTED: Final = 12
"""Looks in a row without arrivals that are reported: a minute of them is no failed scrape."""
UNCOUNTED_AT_START: Final = 3
"""The same before any were counted: the address may be wrong. The first look only begins."""
RENEW_S: Final = 5.0
"""Renewal interval of the lease during a decision: a hundred models take half a minute."""
_log = logging.getLogger("select_planner")


class Noted(msgspec.Struct, frozen=True):
    """One decision, as in /decisions."""

    id: int
    at: float
    """Seconds since 1970."""
    loop: str
    """slow or fast."""
    targets: list[Target]
    changed: list[str]
    reasons: list[str]
    infeasible: list[str]
    gpus: int
    acted: bool
    """False: the lease is not ours, or nothing had to change."""
    failed: dict[str, str]
    waiting: dict[str, str] = {}
    """Pools whose leaving engines are still busy, and their work in flight."""


class LoopCounters(msgspec.Struct):
    """Event counts for /metrics; they only grow."""

    intervals: int = 0
    decisions: dict[str, int] = {}
    """By loop."""
    changes: int = 0
    failures: int = 0
    overrides: int = 0
    gpu_seconds: float = 0.0
    state_failures: int = 0
    faults: int = 0
    starts_given_up: int = 0


class Loop:
    """Runs a fleet.

    Args:
        fleet: decides.
        source: provides the measurements.
        connector: changes replica counts.
        lease: the right to act.
        clock: monotonic seconds.
        wall: seconds since 1970.
        fast_s: between two looks at the load; None: forecasts alone.
        state: where the past is kept, if anywhere.
        retiring: lets engines finish before they go; None: left to whatever stops them.
    """

    def __init__(
        self,
        fleet: FleetPlan,
        source: TrafficSource,
        connector: Connector,
        lease: LeaderLease,
        *,
        clock: Callable[[], float],
        wall: Callable[[], float],
        fast_s: float | None = 5.0,
        state: StateFile | None = None,
        first_id: int = 0,
        retiring: EngineDrain | None = None,
    ) -> None:
        self.fleet = fleet
        self.source = source
        self.connector = connector
        self.retiring = retiring
        self.lease = lease
        self._clock, self._wall = clock, wall
        self._fast_s = fast_s
        self._state = state
        self.decision_id = first_id
        self.decisions: deque[Noted] = deque(maxlen=DECISIONS_MAX)
        self.counts = LoopCounters()
        self.is_leader = False
        self.windows: dict[ModelKey, Window] = {}
        self.loads: dict[ModelKey, Load] = {}
        self.states: dict[PoolKey, PoolState] = {}
        self._overrides: list[str] = []
        self.terms: dict[str, float] = {}
        self.infeasible: tuple[str, ...] = ()
        self._waits: dict[PoolKey, str] = {}
        self._asked: dict[PoolKey, int] = {}  # the last requested replicas
        self._read_back: set[PoolKey] = set()  # pools whose requested count was read back since
        self._would: list[str] = []
        self._uncounted: Counter[ModelKey] = Counter()  # looks in a row without arrivals
        self._counted: set[ModelKey] = set()  # models whose arrivals were ever counted
        self._models = [one.key for one in fleet.models]
        self._pools = [pool.key for model in fleet.models for pool in model.pools]
        self._asked_at = self._looked_at = clock()
        self._ended_at = wall()  # the end of the last interval, for our successor

    @property
    def is_ready(self) -> bool:
        """Whether every pool could be read, and one interval has ended."""
        return self.counts.intervals > 0 and len(self.states) == len(self._pools)

    async def run(self) -> None:
        """Tick until cancelled."""
        start = self._clock()
        await self.source.begin(self._models)
        self._asked_at = self._clock()
        fast = self.fleet.interval_s if self._fast_s is None else self._fast_s
        slow_at, fast_at = start + self.fleet.interval_s, start + fast
        while True:
            await asyncio.sleep(max(0.0, min(slow_at, fast_at) - self._clock()))
            now = self._clock()
            is_slow = now >= slow_at
            await self._guarded(is_slow=is_slow)
            slow_at = _next(slow_at, self.fleet.interval_s, now)
            fast_at = _next(fast_at, fast, now)

    async def _guarded(self, *, is_slow: bool) -> None:
        """Run a turn; a failure is logged and counted, and the loop goes on."""
        try:
            await (self.slow() if is_slow else self.fast())
        except Exception:  # noqa: BLE001 - a planner that is gone plans nothing at all
            self.counts.faults += 1
            _log.exception("a turn failed")

    async def slow(self) -> ScalingDecision:
        """Do one interval."""
        asked_at, self._asked_at = self._asked_at, self._clock()
        self._ended_at = self._wall()
        seconds = self._asked_at - asked_at
        self.windows = await self.source.windows(self._models, seconds or self.fleet.interval_s)
        await self._look()
        decision = await self._decided(
            partial(self.fleet.slow, self.windows, self.states, self._clock())
        )
        self.counts.intervals += 1
        self.terms, self.infeasible = decision.terms, decision.infeasible
        await self._act(decision, "slow")
        self._keep()
        return decision

    async def fast(self) -> ScalingDecision:
        """React to the current load once."""
        self.loads = await self.source.loads(self._models)
        self._report_uncounted()
        await self._look()
        decision = await self._decided(
            partial(self.fleet.fast, self.loads, self.states, self._clock())
        )
        if await self._act(decision, "fast"):
            self._keep()
        return decision

    async def _decided(self, decide: Callable[[], ScalingDecision]) -> ScalingDecision:
        """Decide in a thread; a leader renews its lease meanwhile."""
        deciding = asyncio.ensure_future(asyncio.to_thread(decide))
        while True:
            done, _ = await asyncio.wait((deciding,), timeout=RENEW_S)
            if done:
                return deciding.result()
            if self.is_leader:
                with contextlib.suppress(PlannerError):  # `_act` asks again and reports it
                    self.is_leader = await self.lease.held()

    async def _look(self) -> None:
        self.states = await self.connector.states(self._pools)
        self._overrides = self._changed_by_others()
        looked_at, self._looked_at = self._looked_at, self._clock()
        seconds = self._looked_at - looked_at
        for model in self.fleet.models:
            for pool in model.pools:
                if pool.key in self.states:
                    ready = self.states[pool.key].ready
                    self.counts.gpu_seconds += seconds * ready * pool.settings.gpus

    def _report_uncounted(self) -> None:
        """Log once that arrivals of a model are not counted, and that they are again."""
        for model, load in self.loads.items():
            patience = UNCOUNTED_REPORTED if model in self._counted else UNCOUNTED_AT_START
            if isinstance(load.arrived, Missing):
                self._uncounted[model] += 1
                if self._uncounted[model] == patience:
                    why = load.arrived.why
                    _log.warning("%s: the fast loop counts no arrivals: %s", model, why)
                continue
            if self._uncounted.pop(model, 0) >= patience:
                _log.info("%s: the fast loop counts arrivals again", model)
            self._counted.add(model)

    def _changed_by_others(self) -> list[str]:
        """Return which pools' requested counts were changed by others, once per change.

        Two scalers of one pool, such as a cluster autoscaler or a person, look like one that cannot
        decide. A client of the virtual connector that reports a failed decision is not another
        scaler.
        """
        if self.connector.sets_all_at_once:
            return []
        found = []
        for pool, state in self.states.items():
            asked = self._asked.get(pool)
            if state.desired == asked:
                self._read_back.add(pool)
            elif asked is not None and pool in self._read_back:
                text = f"{asked} were asked for, it says {state.desired}"
                found.append(f"{pool}: something else scales it: {text}")
                del self._asked[pool]
        self.counts.overrides += len(found)
        for text in found:
            _log.warning("%s", text)
        return found

    async def _act(self, decision: ScalingDecision, loop: str) -> bool:
        """Carry a decision out, if we hold the lease; returns whether anything was requested."""
        self.is_leader = await self.lease.held()
        if not self.is_leader:
            self._asked.clear()  # the other planner may change what we requested
        before, self._waits = self._waits, {}
        changed = await self._retire(decision)
        begun = not self._waits.keys() <= before.keys()
        self.counts.decisions[loop] = self.counts.decisions.get(loop, 0) + 1
        changes = [
            f"{one.pool}: {self.states[one.pool].desired} to {one.replicas}" for one in changed
        ]
        # a standby would repeat the same changes until the leader has acted
        is_reported = not self.is_leader and changes == self._would
        self._would = [] if self.is_leader else changes
        if (not changes or is_reported) and not begun and loop == "fast" and not self._overrides:
            return False  # too frequent, and nothing to report
        failed: dict[str, str] = {}
        self.decision_id += 1
        acted = bool(changed) and self.is_leader
        if acted:
            self._keep()  # written first, so that no id is issued twice after a crash
            failed = await self._carry_out(changed, decision.reasons)
            self.counts.failures += len(failed)
            for why in failed.values():
                _log.error("%s", why)
        self.decisions.append(
            Noted(
                self.decision_id,
                self._wall(),
                loop,
                list(decision.targets),
                changes,
                [*self._overrides, *self.source.warnings, *decision.reasons],
                list(decision.infeasible),
                decision.gpus,
                acted=acted,
                failed=failed,
                waiting={str(pool): why for pool, why in self._waits.items()},
            )
        )
        if changes:
            why = self.lease.problem or "another planner holds the lease"
            prefix = "" if self.is_leader else f"not acting, {why}: "
            _log.info("%s%s", prefix, "; ".join([*changes, *decision.reasons]))
        return acted

    async def _retire(self, decision: ScalingDecision) -> list[Target]:
        """Return the targets to request now.

        `_waits` has the pools whose engines must finish first.
        """
        targets = list(decision.targets)
        if self.retiring is not None and not self.is_leader:
            self.retiring.forget()
        elif self.retiring is not None:
            kept = await self.retiring.settle(targets, self.states)
            self._waits = {pool: one.why for pool, one in kept.items()}
            targets = [
                replace(one, replicas=kept[one.pool].replicas) if one.pool in kept else one
                for one in targets
            ]
        changed = [one for one in targets if self.states[one.pool].desired != one.replicas]
        if not self._waits:
            return changed
        # kept GPUs are in use, so pools that were to get them wait, too
        allowed = self.fleet.affordable(changed, self.states)
        for one in changed:
            if one not in allowed:
                self._waits[one.pool] = f"{one.replicas} when others have given GPUs back"
        return allowed

    async def _carry_out(self, changed: Sequence[Target], reasons: Sequence[str]) -> dict[str, str]:
        """Request every change, as far as allowed; returns the failures by pool."""
        ups = [one for one in changed if one.replicas > self.states[one.pool].desired]
        downs = [one for one in changed if one not in ups]
        failed: dict[str, str] = {}
        for some in (changed,) if self.connector.sets_all_at_once else (downs, ups):
            allowed = self.fleet.affordable(some, self.states)
            for one in some:
                if one not in allowed:
                    text = f"GPUs that others were to give back are still in use: {one.replicas}"
                    failed[str(one.pool)] = f"{one.pool}: {text} would be above the ceiling"
            alone = not self.connector.sets_all_at_once
            for part in [[one] for one in allowed] if alone else [allowed]:
                failed |= await self._apply(part, reasons)
        return failed

    async def _apply(self, targets: Sequence[Target], reasons: Sequence[str]) -> dict[str, str]:
        """Request some targets if the lease is still ours: earlier ones may have taken long."""
        if not targets:
            return {}
        if not self.is_leader or not (self.lease.is_sure or await self.lease.held()):
            self.is_leader = False
            return {str(one.pool): f"{one.pool}: the lease has run out" for one in targets}
        outcome = await self.connector.apply(targets, reasons)
        self.counts.changes += len(outcome.done)
        for one in outcome.done:
            state = self.states[one.pool]
            self.counts.starts_given_up += min(state.starting, max(0, state.desired - one.replicas))
            self.states[one.pool] = PoolState(one.replicas, state.ready)
            self._asked[one.pool] = one.replicas
            self._read_back.discard(one.pool)
        return {str(pool): why for pool, why in outcome.failed.items()}

    def _keep(self) -> None:
        if self._state is None or not self.is_leader:
            return
        try:
            self._state.write(self.fleet, self.decision_id, self.states, self._ended_at)
        except PlannerError as error:
            self.counts.state_failures += 1
            _log.error("%s", error)

    @property
    def is_past_damaged(self) -> bool:
        """Whether the state file found at the start was damaged, so that its history is lost."""
        return self._state is not None and self._state.damaged

    async def close(self) -> None:
        """Close everything, the lease first: releasing it needs the connector's client."""
        for one in (self.lease, self.source, self.retiring, self.connector):
            if one is not None:
                await one.close()


def _next(at: float, period: float, now: float) -> float:
    """Return the next point of the grid after `now`; missed ones are skipped."""
    if now < at:
        return at
    return at + period * (int((now - at) / period) + 1)
