"""The field's gateway queue: bands by priority, flows in a band, caps, victims, gated dispatch.

A flow is (tenant, priority). This is the queue of the reference simulator, kept to be compared
with; `fair_queue.py` is the one `slo_shed.py` waits in. No clock: the caller brings saturation.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Generic, Literal, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T")
Fairness = Literal["global-strict", "round-robin"]
EnqueueOutcome = Literal["Enqueued", "ShedVictim", "Rejected"]


def ceilings(bands: int, usage_limit: float) -> tuple[float, ...]:
    """Return the saturation at which each band's dispatch halts, from 1 down to the usage limit."""
    if bands <= 1:
        return (1.0,) * bands
    return tuple(1.0 - band * (1.0 - usage_limit) / (bands - 1) for band in range(bands))


class Entry(NamedTuple, Generic[T]):
    """One waiting request."""

    item: T
    tenant_id: str
    priority: int
    arrival: int


class Enqueued(NamedTuple, Generic[T]):
    """What became of an arrival, and who had to go for it."""

    outcome: EnqueueOutcome
    victim: T | None = None


class _Band(Generic[T]):
    """The flows of one priority; each is FIFO, empty ones are forgotten."""

    def __init__(self) -> None:
        self.flows: OrderedDict[str, deque[Entry[T]]] = OrderedDict()  # next turn first
        self.size = 0

    def push(self, entry: Entry[T]) -> None:
        self.flows.setdefault(entry.tenant_id, deque()).append(entry)
        self.size += 1

    def pop(self, fairness: Fairness) -> Entry[T]:
        """Take the oldest of all, or the head of the flow whose turn it is."""
        if fairness == "round-robin":
            tenant = next(iter(self.flows))
        else:
            tenant = min(self.flows, key=lambda one: self.flows[one][0].arrival)
        flow = self.flows[tenant]
        entry = flow.popleft()
        self.size -= 1
        if flow:
            self.flows.move_to_end(tenant)
        else:
            del self.flows[tenant]
        return entry

    def pop_newest(self) -> Entry[T]:
        tenant = max(self.flows, key=lambda one: self.flows[one][-1].arrival)
        flow = self.flows[tenant]
        entry = flow.pop()
        self.size -= 1
        if not flow:
            del self.flows[tenant]
        return entry


class FlowQueue(Generic[T]):
    """Waiting requests, most important band first.

    Args:
        max_depth: most entries at all; 0: no cap.
        per_band_capacity: most entries of one priority; 0: no cap.
        shed_victims: when full, the newest sheddable entry of the lowest priority makes room for
            an arrival that outranks it.
        fairness: who is next inside a band.
        usage_limit: the lowest band's ceiling.

    O(flows of the band) per operation.
    """

    def __init__(
        self,
        *,
        max_depth: int = 0,
        per_band_capacity: int = 0,
        shed_victims: bool = False,
        fairness: Fairness = "global-strict",
        usage_limit: float = 1.0,
    ) -> None:
        if max_depth < 0 or per_band_capacity < 0:
            raise ValueError("queue capacities must be at least 0")
        if not 0.0 < usage_limit <= 1.0:
            raise ValueError("the usage limit must be above 0 and at most 1")
        self._max_depth = max_depth
        self._per_band = per_band_capacity
        self._shed_victims = shed_victims
        self._fairness: Fairness = fairness
        self._usage_limit = usage_limit
        self._bands: dict[int, _Band[T]] = {}
        self._arrivals = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Entry[T]]:
        for priority in sorted(self._bands, reverse=True):
            band = self._bands[priority]
            yield from sorted(
                (entry for flow in band.flows.values() for entry in flow),
                key=lambda entry: entry.arrival,
            )

    def enqueue(self, item: T, tenant_id: str, priority: int) -> Enqueued[T]:
        """Let a request wait if there is room, or if somebody less important can go."""
        band = self._bands.setdefault(priority, _Band())
        victim = None
        if self._per_band and band.size >= self._per_band:
            return Enqueued("Rejected")  # a victim of lower priority frees no room in this band
        if self._max_depth and self._size >= self._max_depth:
            victim = self._evict_below(priority)
            if victim is None:
                return Enqueued("Rejected")
        self._arrivals += 1
        band.push(Entry(item, tenant_id, priority, self._arrivals))
        self._size += 1
        return Enqueued("Enqueued") if victim is None else Enqueued("ShedVictim", victim.item)

    def _evict_below(self, priority: int) -> Entry[T] | None:
        if not self._shed_victims:
            return None
        lowest = min(one for one, band in self._bands.items() if band.size)
        if lowest >= priority or lowest >= 0:
            return None
        self._size -= 1
        return self._bands[lowest].pop_newest()

    def dequeue(self, saturation: float) -> T | None:
        """Take the next request unless saturation reaches the ceiling of its band.

        Bands count by what was ever seen, most important first; a band that must wait lets none
        below it pass.
        """
        order = sorted(self._bands, reverse=True)
        limits = ceilings(len(order), self._usage_limit)
        for priority, ceiling in zip(order, limits, strict=True):
            band = self._bands[priority]
            if not band.size:
                continue
            if saturation >= ceiling:
                return None
            self._size -= 1
            return band.pop(self._fairness).item
        return None

    def check(self) -> None:
        """State every promise of the queue."""
        assert self._size == sum(band.size for band in self._bands.values())
        for band in self._bands.values():
            assert band.size == sum(len(flow) for flow in band.flows.values())
            assert all(band.flows.values()), "an empty flow is forgotten"
            assert not self._per_band or band.size <= self._per_band
        assert not self._max_depth or self._size <= self._max_depth
