"""`select-sim admit`: any policy on any arrivals, with the live policy code.

Arrivals come as JSON lines and decisions leave as JSON lines, one per arrival and in the same
order; a waiting request holds back the lines behind it until it is decided.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from select_service.core.admission.gate import Gate
from select_service.core.admission.policies import Built, build
from select_service.core.admission.policy_api import AdmissionRequest, InstanceSnapshot, checked
from select_service.simulator.trace_lines import decoded, naming, numbered
from select_service.simulator.trial_pool import ComputingPool, SnapshotPool, TrialPoolSettings

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from select_service.core.admission.pool_load import PoolLoad

_US_MAX: Final = 1 << 51  # beyond, microseconds in doubles are no longer exact
_STEPS: Final = 1 << 30


class InstanceState(msgspec.Struct):
    """The state of one instance, as reported."""

    queue_depth: float = 0
    batch_size: float = 0
    in_flight: float = 0
    kv_utilization: float = 0.0


class Arrival(msgspec.Struct, kw_only=True):
    """One line of input; most policies use only the first four fields.

    Unknown fields are skipped: recorded traces have more than admission needs.
    """

    t_us: int | float
    tokens: int | float
    slo_class: str | None = None
    tenant: str | None = None
    output_tokens: int | float = 0
    slo_ttft_ms: float | None = None
    snapshots: list[InstanceState] | None = None
    """The state of every instance from now on, for a pool that does not compute."""
    tenant_in_flight: int | None = None
    """This tenant's requests in flight from now on, likewise."""


class AdmitResult(msgspec.Struct):
    """One line of output."""

    admitted: bool
    reason: str


def read_arrivals(lines: Iterable[bytes]) -> Iterator[Arrival]:
    """Decode arrivals line by line; empty lines are skipped.

    Raises:
        BadTrace: naming the line, from 1.
    """
    decoder = msgspec.json.Decoder(Arrival)
    for number, line in numbered(lines):
        arrival = decoded(decoder, line, number)
        with naming(number):
            _check(arrival)
        yield arrival


def _check(arrival: Arrival) -> None:
    """Refuse invalid numbers; 5.0 counts as whole."""
    for name, least in (("t_us", -_US_MAX), ("tokens", 0), ("output_tokens", 0)):
        value = getattr(arrival, name)
        if not (least <= value <= _US_MAX and value == int(value)):
            raise ValueError(f"{name} must be a whole number in {least}..{_US_MAX}")
        setattr(arrival, name, int(value))
    target_ms = arrival.slo_ttft_ms
    if target_ms is not None and not (math.isfinite(target_ms) and target_ms > 0):
        raise ValueError("slo_ttft_ms must be above 0")


class _Open:
    """A pending line of output."""

    __slots__ = ("outcome",)

    def __init__(self) -> None:
        self.outcome: AdmitResult | None = None


class _Config(NamedTuple):
    policy: dict[str, object]
    pool: TrialPoolSettings | None


def _read_config(name: str, config: Mapping[str, object]) -> _Config:
    policy = dict(config)
    given = policy.pop("pool", {} if name == "slo-shed" else None)
    if given is None:
        return _Config(policy, None)
    if not isinstance(given, dict):
        raise ValueError("pool must be an object or null")  # noqa: TRY004 - one kind of refusal
    checked(given, frozenset(TrialPoolSettings.__struct_fields__), "pool")
    try:
        settings = msgspec.convert(given, TrialPoolSettings)
    except msgspec.ValidationError as error:
        raise ValueError(f"pool: {error}") from None
    settings.check()
    return _Config(policy, settings)


class PolicyTrial:
    """One policy on one pool.

    Args:
        name: of the policy.
        config: the policy's keys, and optionally `pool`, the PoolSettings of a pool that computes
            what is admitted (the default of slo-shed); null: the pool is as reported by arrivals in
            `snapshots` (the default of all others).

    Raises:
        ValueError: naming what is wrong with the configuration.
    """

    def __init__(self, name: str, config: Mapping[str, object]) -> None:
        policy, settings = _read_config(name, config)
        built: Built[_Open] = build(name, policy)
        self._computing = None if settings is None else ComputingPool(settings)
        self._snapshots = SnapshotPool()
        pool: PoolLoad = self._computing or self._snapshots
        self._policy = built.policy
        self._pool = pool
        self.gate: Gate[_Open] = Gate(built.classes, built.policy, pool, queue=built.queue)
        self._open: deque[_Open] = deque()
        self._last = 0.0

    def decide(self, arrivals: Iterable[Arrival]) -> Iterator[AdmitResult]:
        """Yield one outcome per arrival, in order, as soon as it is known."""
        for arrival in arrivals:
            self._arrive(arrival)
            yield from self._settled()
        self._advance(math.inf)
        yield from self._settled()

    def _settled(self) -> Iterator[AdmitResult]:
        while self._open and (outcome := self._open[0].outcome) is not None:
            self._open.popleft()
            yield outcome

    def _arrive(self, arrival: Arrival) -> None:
        now = arrival.t_us / 1e6
        if arrival.snapshots is not None:
            self._snapshots.set_snapshots(
                [InstanceSnapshot(*msgspec.structs.astuple(one)) for one in arrival.snapshots]
            )
        tenant_id = arrival.tenant or "default"
        if arrival.tenant_in_flight is not None:
            self._snapshots.in_flight_by_tenant[tenant_id] = arrival.tenant_in_flight
        self._advance(max(now, self._last))
        target_ms = arrival.slo_ttft_ms
        ask = AdmissionRequest(
            int(arrival.tokens),
            arrival.slo_class or "",
            tenant_id,
            output_tokens=int(arrival.output_tokens),
            target_s=math.inf if target_ms is None else target_ms / 1e3,
        )
        line = _Open()
        self._open.append(line)
        # An empty pool is left to the policy here: the field's simulator admits into it.
        verdict = self._policy.judge(ask, self._pool, now)
        decision = self.gate.decide(ask, "policy", verdict, slice(0, 0), now)
        self.gate.settle(decision, ask, now)
        if decision.outcome == "wait":
            self.gate.enqueue(ask, line, self._last)
            return
        line.outcome = AdmitResult(decision.admitted, decision.reason)
        if decision.admitted:
            self._place(ask)

    def _place(self, ask: AdmissionRequest) -> None:
        if self._computing is not None:
            self._computing.place(ask, self._last)

    # -- time ----------------------------------------------------------------------------------

    def _advance(self, until: float) -> None:
        """Process everything until then, in order: computing, expiry, release."""
        self._pump()
        while (now := self._next_time()) <= until and now < math.inf:
            self._last = max(self._last, now)
            if self._computing is not None and self._computing.next_event() == now:
                self._computing.step()
            for one, decision in self.gate.expired(self._last, _STEPS):
                one.item.outcome = AdmitResult(admitted=False, reason=decision.reason)
            self._pump()
        if until < math.inf:
            self._last = until

    def _next_time(self) -> float:
        event = None if self._computing is None else self._computing.next_event()
        expiry = math.inf if self.gate.queue is None else self.gate.queue.next_expiry()
        return expiry if event is None else min(event, expiry)

    def _pump(self) -> None:
        while (one := self.gate.next_waiting()) is not None:
            self.gate.serve(one, self._last)
            one.item.outcome = AdmitResult(admitted=True, reason="")
            self._place(one.ask)
