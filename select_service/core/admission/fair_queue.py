"""Requests waiting for a saturated pool: a quota per band, fair over tenants, earliest first.

Within a band the least served tenant is next (virtual token counters, arXiv 2401.00588), within a
tenant's flow the earliest deadline. A tenant that returns is lifted to the level of those that
stayed: absence earns no credit. Bands never share their quotas. `slo_shed.py` decides which
requests may leave, and when.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from sortedcontainers import SortedKeyList

from select_service.core.admission.policy_api import TENANTS_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from select_service.core.admission.policy_api import AdmissionRequest

T = TypeVar("T")

SHARE_MAX: Final = 4
"""One tenant of several leaves a fifth of a band's quota to the others."""


class Waiting(Generic[T]):
    """One waiting request; compared by identity."""

    __slots__ = ("arrival", "ask", "band", "cost", "deadline", "flow", "item", "turn", "work")

    def __init__(
        self,
        item: T,
        ask: AdmissionRequest,
        band: int,
        cost: int,
        deadline: float,
        turn: float | None = None,
    ) -> None:
        self.item = item
        self.ask = ask
        self.band = band
        self.work = ask.work  # prefill tokens
        self.cost = cost  # charged to its tenant when it is served
        self.deadline = deadline  # when it expires
        self.turn = deadline if turn is None else turn  # the lowest of its tenant goes first
        self.arrival = 0
        self.flow: TenantFlow[T] | None = None  # set while it waits


class TenantFlow(Generic[T]):
    """One tenant of one band: its service so far, and its waiting requests."""

    __slots__ = ("counter", "tenant_id", "turn", "waiting", "work")

    def __init__(self, tenant_id: str) -> None:
        self.tenant_id = tenant_id
        self.counter = 0
        self.turn = 0  # breaks ties: the first to ask
        self.work = 0  # prefill tokens waiting
        self.waiting: SortedKeyList[Waiting[T], tuple[float, int]] | None = None


def _by_deadline(one: Waiting[T]) -> tuple[float, int]:
    return one.deadline, one.arrival


def _by_turn(one: Waiting[T]) -> tuple[float, int]:
    return one.turn, one.arrival


def _by_counter(flow: TenantFlow[T]) -> tuple[int, int]:
    return flow.counter, flow.turn


class _Band(Generic[T]):
    def __init__(self, quota: int, tenants_max: int) -> None:
        self.quota = quota
        self.size = 0
        self.work = 0  # prefill tokens waiting
        self.level = 0  # the counter of the tenant served last
        self.latest: TenantFlow[T] | None = None  # the last flow seen; one of `flows`
        self.flows: OrderedDict[str, TenantFlow[T]] = OrderedDict()  # least recently seen first
        self.active: SortedKeyList[TenantFlow[T], tuple[int, int]] = SortedKeyList(key=_by_counter)
        self._tenants_max = tenants_max
        self._turns = 0

    def flow_of(self, tenant_id: str) -> TenantFlow[T]:
        """Return the tenant's flow, lifted to the current level if none of its requests waits."""
        flow = self.flows.get(tenant_id)
        if flow is None:
            flow = self.latest = self.flows[tenant_id] = TenantFlow(tenant_id)
            self._forget_one()
        else:
            self.latest = flow
            self.flows.move_to_end(tenant_id)
        if flow.waiting is None:
            least = self.active[0].counter if self.size else self.level
            flow.counter = max(flow.counter, least)
        return flow

    def _forget_one(self) -> None:
        """Forget the longest idle tenant; two are looked at, at most, as only one was added."""
        if len(self.flows) <= self._tenants_max:
            return
        for tenant_id, flow in list(_first(self.flows, 2)):
            if flow.waiting is None:
                del self.flows[tenant_id]
                if flow is self.latest:
                    self.latest = None
                return
            self.flows.move_to_end(tenant_id)  # it waits, so it is not idle

    def charge(self, flow: TenantFlow[T], cost: int) -> None:
        self.level = flow.counter
        self.correct(flow, cost)

    def correct(self, flow: TenantFlow[T], cost: int) -> None:
        """Move a counter, and its tenant among those that wait; none is served."""
        if flow.waiting is not None:
            self.active.remove(flow)
        flow.counter += cost
        if flow.waiting is not None:
            self._join(flow)

    def add(self, flow: TenantFlow[T], one: Waiting[T]) -> None:
        if flow.waiting is None:
            flow.waiting = SortedKeyList(key=_by_turn)
            self._join(flow)
        flow.waiting.add(one)
        flow.work += one.work
        self.size += 1
        self.work += one.work

    def _join(self, flow: TenantFlow[T]) -> None:
        self._turns += 1
        flow.turn = self._turns
        self.active.add(flow)

    def remove(self, flow: TenantFlow[T], one: Waiting[T]) -> None:
        assert flow.waiting is not None
        flow.waiting.remove(one)
        flow.work -= one.work
        self.size -= 1
        self.work -= one.work
        if not flow.waiting:
            flow.waiting = None
            self.active.remove(flow)


def _first(
    flows: OrderedDict[str, TenantFlow[T]], count: int
) -> Iterator[tuple[str, TenantFlow[T]]]:
    for number, item in enumerate(flows.items()):
        if number == count:
            return
        yield item


class FairQueue(Generic[T]):
    """Waiting requests of all bands; every operation O(log n).

    Args:
        quotas: maximum waiting requests of each band, most important first.
        tenants_max: counters kept per band; beyond, the longest idle ones are forgotten.
    """

    def __init__(self, quotas: Sequence[int], *, tenants_max: int = TENANTS_MAX) -> None:
        if any(quota < 0 for quota in quotas):
            raise ValueError("queue quotas must be at least 0")
        self._bands: list[_Band[T]] = [_Band(quota, tenants_max) for quota in quotas]
        self._expiries: SortedKeyList[Waiting[T], tuple[float, int]] = SortedKeyList(
            key=_by_deadline
        )
        self._arrivals = 0
        self.waiting = 0
        """Waiting requests of all bands."""

    def __len__(self) -> int:
        return self.waiting

    def size(self, band: int) -> int:
        """Waiting requests of a band."""
        return self._bands[band].size

    def has_room(self, band: int) -> bool:
        """Whether one more of this band may wait."""
        one = self._bands[band]
        return one.size < one.quota

    def has_share(self, band: int, tenant_id: str) -> bool:
        """Whether one more of this tenant may wait without leaving too little room for others.

        While others wait, a tenant may have `SHARE_MAX` times as many waiting as there is room for:
        the more it has, the sooner what becomes free is left to them.
        """
        waiting, most = self.share(band, tenant_id)
        return not waiting or waiting <= most

    def share(self, band: int, tenant_id: str) -> tuple[int, int]:
        """Return how many of this tenant wait, and with how many at most one more of it may."""
        one = self._bands[band]
        flow = one.flows.get(tenant_id)
        if flow is None or flow.waiting is None:
            return 0, one.quota
        is_alone = len(one.active) == 1
        return len(flow.waiting), one.quota if is_alone else SHARE_MAX * (one.quota - one.size)

    def taken(self, band: int, tenant_id: str) -> tuple[int, int]:
        """Return what one more of this tenant has no room beside, and its limit: band or share."""
        one = self._bands[band]
        return self.share(band, tenant_id) if one.size < one.quota else (one.size, one.quota)

    def quota(self, band: int) -> int:
        """Maximum waiting requests of a band."""
        return self._bands[band].quota

    def first_band(self) -> int:
        """Return the most important band with a waiting request; the number of bands if none."""
        if self.waiting:
            for number, band in enumerate(self._bands):
                if band.size:
                    return number
        return len(self._bands)

    def bands_waiting(self) -> list[int]:
        """Return the bands with waiting requests, most important first."""
        if not self.waiting:
            return []
        return [number for number, band in enumerate(self._bands) if band.size]

    def work_ahead(self, band: int) -> int:
        """Return the prefill tokens waiting in this band and those above it."""
        if not self.waiting:
            return 0
        return sum(one.work for one in self._bands[: band + 1])

    def work_before(self, band: int, tenant_id: str, work: int) -> int:
        """Return about how many prefill tokens would go before one more request of a tenant.

        These are all tokens of the bands above; of its own band the tenant's own, and at most as
        many again of every other tenant: a tenant that sends little does not wait behind all of
        another's.
        """
        if not self.waiting:
            return 0
        one = self._bands[band]
        above = sum(one.work for one in self._bands[:band])
        if not one.work:
            return above
        flow = one.flows.get(tenant_id)
        own = 0 if flow is None else flow.work
        others = len(one.active) - (own > 0)
        return above + own + min(one.work - own, others * (own + work))

    def counter(self, band: int, tenant_id: str) -> int:
        """Return what a tenant has been charged in a band; 0 if it is not remembered."""
        flow = self._bands[band].flows.get(tenant_id)
        return 0 if flow is None else flow.counter

    def serve_directly(self, band: int, tenant_id: str, cost: int) -> None:
        """Charge a tenant whose request did not have to wait."""
        one = self._bands[band]
        flow = one.latest
        if flow is None or flow.tenant_id != tenant_id or one.size:
            flow = one.flow_of(tenant_id)
        elif flow.counter < one.level:  # as `flow_of` does while none waits
            flow.counter = one.level
        if flow.waiting is None:
            one.level = flow.counter
            flow.counter += cost
        else:
            one.charge(flow, cost)

    def correct(self, band: int, tenant_id: str, cost: int) -> None:
        """Charge a tenant so much more, or less, for what it was charged for before.

        A tenant that is not remembered has nothing to be corrected.
        """
        one = self._bands[band]
        flow = one.flows.get(tenant_id)
        if flow is not None:
            one.correct(flow, cost)

    def push(self, one: Waiting[T]) -> None:
        """Queue a request. The caller checks the quota."""
        band = self._bands[one.band]
        flow = band.flow_of(one.ask.tenant_id)
        self._arrivals += 1
        one.arrival = self._arrivals
        one.flow = flow
        band.add(flow, one)
        self._expiries.add(one)
        self.waiting += 1

    def in_order(self, band: int) -> Iterator[Waiting[T]]:
        """Yield a band's requests in order: tenants by service, each tenant's by deadline.

        The queue must not change meanwhile.
        """
        for flow in self._bands[band].active:
            yield from flow.waiting or ()

    def last_first(self, band: int) -> Iterator[Waiting[T]]:
        """Yield a band's requests in reverse order."""
        for flow in reversed(self._bands[band].active):
            yield from reversed(flow.waiting or ())

    def head(self, band: int) -> Waiting[T] | None:
        """Return the next request of a band without removing it."""
        return next(self.in_order(band), None)

    def serve(self, one: Waiting[T]) -> None:
        """Take a waiting request out and charge its tenant."""
        flow = one.flow
        assert flow is not None, "it waits no more"
        self._bands[one.band].charge(flow, one.cost)
        self.remove(one)

    def remove(self, one: Waiting[T]) -> bool:
        """Remove a request without a charge; False if it does not wait."""
        flow = one.flow
        if flow is None:
            return False
        one.flow = None
        self._bands[one.band].remove(flow, one)
        self._expiries.remove(one)
        self.waiting -= 1
        return True

    def next_expiry(self) -> float:
        """Return the earliest deadline; infinity if none waits."""
        return self._expiries[0].deadline if self._expiries else math.inf

    def expired(self, now: float, limit: int) -> list[Waiting[T]]:
        """Remove up to `limit` expired requests."""
        gone: list[Waiting[T]] = []
        while self._expiries and self._expiries[0].deadline <= now and len(gone) < limit:
            one = self._expiries[0]
            self.remove(one)
            gone.append(one)
        return gone

    def __iter__(self) -> Iterator[Waiting[T]]:
        return iter(self._expiries)

    def check(self) -> None:
        """Assert all invariants of the queue."""
        total = 0
        for number, band in enumerate(self._bands):
            waiting = [one for flow in band.flows.values() for one in flow.waiting or ()]
            assert band.size == len(waiting)
            latest = band.latest
            assert latest is None or band.flows.get(latest.tenant_id) is latest
            assert band.work == sum(one.work for one in waiting)
            assert all(one.band == number for one in waiting)
            active = {flow.tenant_id for flow in band.flows.values() if flow.waiting is not None}
            assert {flow.tenant_id for flow in band.active} == active, "waiting tenants are kept"
            assert all(flow.waiting for flow in band.active), "an idle flow is not active"
            for flow in band.flows.values():
                assert flow.work == sum(one.work for one in flow.waiting or ())
            total += band.size
        assert total == len(self._expiries) == self.waiting
