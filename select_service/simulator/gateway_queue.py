"""The field's gateway queue: bands by priority, one flow per tenant, a gate by load.

It exists for comparison: in `slo-shed` each band has its own room, fairness is by service received,
and requests have deadlines. `cli.py` reads operations and writes their outcomes.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import count
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import msgspec
import numpy as np

from select_service.core.admission.classes import SloClasses
from select_service.core.admission.gaie_legacy import (
    DEFAULT_KV_UTILIZATION,
    DEFAULT_QUEUE_DEPTH,
    utilization,
)
from select_service.core.admission.policy_api import InstanceSnapshot
from select_service.core.admission.slo_shed import ceilings
from select_service.simulator.admit import InstanceState
from select_service.simulator.trace_lines import decoded, naming, numbered
from select_service.simulator.trial_pool import SnapshotPool

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

Outcome = Literal["Enqueued", "ShedVictim", "Rejected"]
Detector = Literal["never", "utilization", "concurrency"]
DEFAULT_CONCURRENCY: Final = 64
"""Requests in flight at which an instance counts as full."""


class QueueSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of the queue, with the field's names.

    Raises:
        ValueError: a number or a class that makes no sense.
    """

    dispatch_order: Literal["priority"] = "priority"
    fairness: Literal["global-strict", "round-robin"] = "global-strict"
    max_depth: int = 0  # of all bands together; 0: no limit
    per_band_capacity: int = 0  # likewise, of each
    queue_shedding: bool = False  # whether an arrival may replace a sheddable request
    usage_limit_threshold: float = 1.0  # the lowest band's ceiling
    slo_priorities: dict[str, int] = {}
    detector: Detector = "never"
    queue_depth: float = DEFAULT_QUEUE_DEPTH
    kv_utilization: float = DEFAULT_KV_UTILIZATION
    max_concurrency: float = DEFAULT_CONCURRENCY

    def __post_init__(self) -> None:
        """Validate every number, and the classes."""
        SloClasses(self.slo_priorities)
        for name in ("max_depth", "per_band_capacity"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0")
        if not 0.0 < self.usage_limit_threshold <= 1.0:
            raise ValueError("usage_limit_threshold must be above 0 and at most 1")
        for name in ("queue_depth", "kv_utilization", "max_concurrency"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0")


class _Entry(NamedTuple):
    number: int  # of its arrival
    name: str


class _Band:
    """The requests of one priority: a flow per tenant with waiting requests; first come first."""

    def __init__(self) -> None:
        self.size = 0
        self.flows: dict[str, deque[_Entry]] = {}
        self._last = ""  # the tenant served last, in round-robin

    def add(self, tenant: str, entry: _Entry) -> None:
        self.flows.setdefault(tenant, deque()).append(entry)
        self.size += 1

    def newest(self) -> str:
        """Return the tenant of the latest request."""
        return max(self.flows, key=lambda one: self.flows[one][-1].number)

    def first(self, fairness: str) -> str:
        """Return the tenant to serve next: the oldest request's, or the next by name."""
        if fairness == "global-strict":
            return min(self.flows, key=lambda one: self.flows[one][0].number)
        names = sorted(self.flows)
        # The position of a tenant with nothing left is unknown: rounds restart, as in the original.
        at = names.index(self._last) + 1 if self._last in self.flows else 0
        self._last = names[at % len(names)]
        return self._last

    def take(self, tenant: str, *, last: bool = False) -> str:
        flow = self.flows[tenant]
        entry = flow.pop() if last else flow.popleft()
        self.size -= 1
        if not flow:
            del self.flows[tenant]
        return entry.name


class GatewayQueue:
    """Requests waiting in front of a saturated pool; names are the caller's."""

    def __init__(self, settings: QueueSettings | None = None) -> None:
        self.settings = settings or QueueSettings()
        self._classes = SloClasses(self.settings.slo_priorities)
        self._bands: dict[int, _Band] = {}  # by priority; a band, once created, stays
        self._numbers = count()

    def __len__(self) -> int:
        return sum(band.size for band in self._bands.values())

    def enqueue(self, name: str, slo_class: str = "", tenant: str = "") -> tuple[Outcome, str]:
        """Queue a request, or reject it.

        Returns:
            Its outcome, and the request that lost its place to it: the newest of the least
            important sheddable ones, if the arrival is more important; "": none.
        """
        limits, priority = self.settings, self._classes.priority(slo_class)
        band = self._bands.setdefault(priority, _Band())
        if limits.per_band_capacity and band.size >= limits.per_band_capacity:
            return "Rejected", ""
        outcome: Outcome = "Enqueued"
        victim = ""
        if limits.max_depth and len(self) >= limits.max_depth:
            lowest = min((one for one, some in self._bands.items() if some.size), default=priority)
            if not limits.queue_shedding or lowest >= min(priority, 0):
                return "Rejected", ""
            losing = self._bands[lowest]
            outcome, victim = "ShedVictim", losing.take(losing.newest(), last=True)
        band.add(tenant or "default", _Entry(next(self._numbers), name))
        return outcome, victim

    def dequeue_gated(self, saturation: float) -> str:
        """Release the first request of the most important band; "" if none may go, or none waits.

        Ceilings depend on the positions of all bands ever seen; a closed band blocks all below it,
        even while it is empty.
        """
        priorities = sorted(self._bands, reverse=True)
        limits = ceilings(len(priorities), self.settings.usage_limit_threshold)
        for priority, limit in zip(priorities, limits, strict=True):
            if saturation >= limit:
                return ""
            band = self._bands[priority]
            if band.size:
                return band.take(band.first(self.settings.fairness))
        return ""

    def check(self) -> None:
        """Assert that limits hold, and that no flow is empty."""
        limits = self.settings
        assert not limits.max_depth or len(self) <= limits.max_depth
        for band in self._bands.values():
            assert band.size == sum(map(len, band.flows.values()))
            assert all(band.flows.values())
            assert not limits.per_band_capacity or band.size <= limits.per_band_capacity


def saturation_of(settings: QueueSettings, snapshots: Sequence[InstanceState]) -> float:
    """Return the saturation of a pool by the chosen detector; an empty pool is full.

    never: 0. utilization: the mean over instances of max(queue / limit, KV use / limit).
    concurrency: requests in flight / (instances · `max_concurrency`).
    """
    if settings.detector == "never":
        return 0.0
    pool = SnapshotPool()
    pool.set_snapshots([InstanceSnapshot(*msgspec.structs.astuple(one)) for one in snapshots])
    if settings.detector == "utilization":
        return utilization(pool, settings.queue_depth, settings.kv_utilization)
    if not pool.instances:
        return 1.0
    return float(np.sum(pool.in_flight)) / (pool.instances * settings.max_concurrency)


class Operation(msgspec.Struct, kw_only=True):
    """One line of input, with the fields of its operation. Other fields are skipped."""

    op: Literal["enqueue", "dequeue_gated"]
    id: str = ""
    slo_class: str = msgspec.field(name="class", default="")
    tenant: str = ""
    saturation: float | None = None
    snapshots: list[InstanceState] = []
    """The pool's state for the detector, if no saturation is given."""


def carry_out(settings: QueueSettings, lines: Iterable[bytes]) -> Iterator[dict[str, object]]:
    """Yield each operation with its outcome, in order; empty lines are skipped.

    Raises:
        BadTrace: naming the line, from 1.
    """
    queue, decoder = GatewayQueue(settings), msgspec.json.Decoder(Operation)
    for number, line in numbered(lines):
        one = decoded(decoder, line, number)
        with naming(number):
            outcome = _carry_out(queue, one)
        yield outcome


def _carry_out(queue: GatewayQueue, one: Operation) -> dict[str, object]:
    if one.op == "enqueue":
        outcome, victim = queue.enqueue(one.id, one.slo_class, one.tenant)
        asked = {"op": one.op, "id": one.id, "class": one.slo_class, "tenant": one.tenant}
        return {**asked, "outcome": outcome, "victim": victim}
    saturation = one.saturation
    if saturation is None:
        saturation = saturation_of(queue.settings, one.snapshots)
    return {"op": one.op, "saturation": saturation, "id": queue.dequeue_gated(saturation)}
