"""The load of a partition's ranks as policies see it, kept up in O(1) with every ledger change.

Saturation, backlog and busy ranks are sums that follow each change of one slot; they are kept in
whole numbers, so that no rounding adds up over days. Knows no classes and decides nothing.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import numpy as np

from select_service.core.admission.drain import DrainMeter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from select_service.core.columns import Floats

_UNIT: Final = 1 << 32
"""Saturations are summed in units of 2^-32."""
_SATURATION_MAX: Final = 1e6
"""Of one rank; beyond it, more means nothing more."""
_RATE_CHANGED: Final = 0.05
"""So much must the measured rate move before all ranks are judged anew."""


class SaturationLimits(NamedTuple):
    """What counts as a full rank."""

    target_ttft_s: float = 1.0
    """The booked prefill tokens of a rank should be computed within that."""
    kv_utilization: float = 0.8
    waiting: float = 5.0
    """Requests that wait inside the engine, where it tells; 0: not looked at."""


class RankLoad(NamedTuple):
    """What the ledger and the engine say of one rank."""

    prefill_tokens: float = 0.0
    decode_blocks: float = 0.0
    requests: int = 0
    prefilling: int = 0  # of them, those whose prefill is not complete
    waiting: int | None = None  # inside the engine, if it tells


Carried: TypeAlias = tuple[float, float, int, int, int | None]
"""A `RankLoad`, which need not be built for it."""


class PoolLoad:
    """A `Pool` over slots; unseated slots hold zeros and count nowhere."""

    def __init__(
        self, limits: SaturationLimits | None = None, meter: DrainMeter | None = None
    ) -> None:
        self.limits = limits or SaturationLimits()
        self.meter = meter or DrainMeter()
        self.queue_depth: Floats = np.zeros(0)
        self.batch_size: Floats = np.zeros(0)
        self.in_flight: Floats = np.zeros(0)
        self.kv_utilization: Floats = np.zeros(0)
        self._keeps_columns = True
        self.instances = 0
        self.prefill_backlog = 0.0
        self._computing = 0  # ranks with something to prefill
        self._loads: list[Carried | None] = []  # None: nobody
        self._share: list[float] = []  # 1 / total blocks; 0: not known
        self._units: list[int] = []
        self._sum = 0
        self._stale: set[int] = set()
        self._behind: set[int] = set()  # slots whose saturation nobody has asked for since
        self._per_token = 0.0  # saturation of one booked token
        self._rate_used = 0.0
        self._tenants: dict[str, int] = {}
        self._follow_rate()

    # -- who is here ---------------------------------------------------------------------------

    def ensure(self, capacity: int) -> None:
        """Make room for slots below `capacity`; never shrinks."""
        missing = capacity - len(self._loads)
        if missing <= 0:
            return
        more = np.zeros(missing)
        self.queue_depth = np.concatenate([self.queue_depth, more])
        self.batch_size = np.concatenate([self.batch_size, more])
        self.in_flight = np.concatenate([self.in_flight, more])
        self.kv_utilization = np.concatenate([self.kv_utilization, more])
        self._loads += [None] * missing
        self._share += [0.0] * missing
        self._units += [0] * missing

    def seat(self, slot: int, total_kv_blocks: int | None) -> None:
        """A schedulable rank takes the slot, or its record changed; its load stays."""
        self.ensure(slot + 1)
        if self._loads[slot] is None:
            self._loads[slot] = RankLoad()
            self.instances += 1
        self._share[slot] = 1.0 / total_kv_blocks if total_kv_blocks else 0.0
        self._write(slot)

    def unseat(self, slot: int, now: float) -> None:
        """The rank is gone, its load with it."""
        if slot >= len(self._loads) or self._loads[slot] is None:
            return
        self.note(slot, RankLoad(), now)
        self._write(slot)
        self._stale.discard(slot)
        self._behind.discard(slot)
        self._loads[slot] = None
        self._sum -= self._units[slot]
        self._units[slot] = 0
        self.instances -= 1

    def keep_columns(self, *, keep: bool) -> None:
        """Whether some policy looks at the columns; where none does they are not kept up."""
        if keep and not self._keeps_columns:
            self._keeps_columns = True
            for column in (
                *(self.queue_depth, self.batch_size),
                *(self.in_flight, self.kv_utilization),
            ):
                column.fill(0.0)  # who has gone meanwhile has left something behind
            for slot, load in enumerate(self._loads):
                if load is not None:
                    self._write(slot)
        self._keeps_columns = keep

    # -- what it carries -----------------------------------------------------------------------

    def note(self, slot: int, load: Carried, now: float) -> None:
        """The ledger, or the engine, says what a seated slot carries now. O(1).

        What that does to the saturation is found out when somebody asks for it.
        """
        before = self._loads[slot]
        assert before is not None, "nobody sits there"
        if load == before:
            return  # as it was when somebody looked last
        self._loads[slot] = load
        tokens, were = load[0], before[0]
        if tokens != were:
            self.prefill_backlog += tokens - were
            computing = (tokens > 0) - (were > 0)
            if computing:
                self._computing += computing
                self.meter.computing(self._computing, now)
        if self._keeps_columns:
            self._write(slot)
        else:
            self._behind.add(slot)

    def mark_stale(self, slot: int, *, stale: bool) -> None:
        """Whether what a rank says of itself is too old to be believed; then it counts as full."""
        (self._stale.add if stale else self._stale.discard)(slot)
        self._write(slot)

    def prefilled(self, tokens: int, now: float) -> None:
        """So many booked tokens were computed (not: given up)."""
        self.meter.computed(tokens, now)
        rate = self.meter.tokens_per_s
        if abs(rate - self._rate_used) > _RATE_CHANGED * self._rate_used:
            self._follow_rate()

    def _follow_rate(self) -> None:
        self._rate_used = self.meter.tokens_per_s
        room = self._rate_used * self.limits.target_ttft_s
        self._per_token = 1.0 / room if room > 0.0 else 0.0
        self._behind.update(slot for slot, load in enumerate(self._loads) if load is not None)

    def _catch_up(self) -> None:
        while self._behind:
            self._write(self._behind.pop())

    def _write(self, slot: int) -> None:
        load = self._loads[slot]
        assert load is not None, "nobody sits there"
        prefill_tokens, decode_blocks, requests, prefilling, waiting = load
        used = decode_blocks * self._share[slot]
        saturation = prefill_tokens * self._per_token
        if used > saturation * self.limits.kv_utilization:
            saturation = used / self.limits.kv_utilization
        if waiting is None:
            waiting = max(0, prefilling - 1)
        elif self.limits.waiting:
            saturation = max(saturation, waiting / self.limits.waiting)
        if slot in self._stale:
            saturation = max(saturation, 1.0)
        units = int(min(saturation, _SATURATION_MAX) * _UNIT)
        self._sum += units - self._units[slot]
        self._units[slot] = units
        if self._keeps_columns:
            self.queue_depth[slot] = waiting
            self.batch_size[slot] = max(0, requests - waiting)
            self.in_flight[slot] = requests
            self.kv_utilization[slot] = used

    # -- what policies ask ---------------------------------------------------------------------

    @property
    def saturation(self) -> float:
        """Mean over ranks of max(prefill/P*, blocks/(limit·K), waiting/limit); 1 without ranks."""
        if not self.instances:
            return 1.0
        if self._behind:
            self._catch_up()
        return self._sum / (_UNIT * self.instances)

    @property
    def prefill_rate(self) -> float:
        """Prefill tokens per second of one rank that has something to compute; 0: not known."""
        return self.meter.tokens_per_s

    def tenant_in_flight(self, tenant_id: str) -> int:
        """Requests of the tenant that began and have not ended."""
        return self._tenants.get(tenant_id, 0)

    def began(self, tenant_id: str) -> None:
        """A request of the tenant was booked."""
        self._tenants[tenant_id] = self._tenants.get(tenant_id, 0) + 1

    def ended(self, tenant_id: str, now: float) -> None:
        """A request of the tenant ended; as many names are kept as have requests."""
        self.meter.ended(now)
        self.left(tenant_id)

    def recount(self, in_flight: Mapping[str, int]) -> None:
        """Begin to count tenants anew."""
        self._tenants = {name: count for name, count in in_flight.items() if count}

    def left(self, tenant_id: str) -> None:
        """One request fewer of the tenant; the meter knows already."""
        left = self._tenants.get(tenant_id, 0) - 1
        if left > 0:
            self._tenants[tenant_id] = left
        else:
            self._tenants.pop(tenant_id, None)

    def check(self) -> None:
        """State every promise: sums are sums, nobody carries nothing."""
        self._catch_up()
        seated = [load for load in self._loads if load is not None]
        assert self.instances == len(seated)
        assert self._sum == sum(self._units)
        assert math.isclose(self.prefill_backlog, sum(load[0] for load in seated), abs_tol=1e-6)
        assert self._computing == sum(load[0] > 0 for load in seated)
        for slot, load in enumerate(self._loads):
            if load is None:
                assert self._units[slot] == 0
                assert not (self._keeps_columns and self.in_flight[slot])
        assert all(self._tenants.values()), "only who has requests is counted"
