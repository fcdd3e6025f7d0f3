"""The load of a partition's ranks as policies see it: columns, evaluated on demand.

The columns are kept by the ledger (`slot_loads.py`), and set by hand where a policy is
tried (`simulator/trial_pool.py`). Nothing here follows their changes: one expression over all ranks
costs less than following the three changes of each request, and no sum can drift. It knows no
classes and decides nothing.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeVar

import numpy as np

from indexer.compiled import usable
from select_service.core.ledger.drain_meter import DrainMeter
from select_service.core.ledger.rank_speeds import PoolSpeed

if not TYPE_CHECKING and usable("select_service.core._pricer", 6):
    from select_service.core._pricer import Fill
else:
    from select_service.core.pricing.plain_pricer import Fill

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from numpy.typing import NDArray

    from select_service.core.columns import Floats
    from select_service.core.ledger.drain_meter import WorkDone
    from select_service.core.ledger.rank_speeds import RankSpeeds
    from select_service.core.ledger.slot_loads import SlotLoads

_Number = TypeVar("_Number", np.float64, np.int64)
FloatOrColumn = TypeVar("FloatOrColumn", float, "Floats")

_RATE_STEP_S: Final = 0.05
"""How often the measured rate, an average over half a minute, is refreshed."""


DEFAULT_TARGET_TTFT_S: Final = 1.0

IDLE_SHARE: Final = 0.5
"""Where this share of the requests that a rank runs at once is taken, it is as good as idle: the
ceilings of bands lie between here and full. Of a large pool it is more, see `SPARE`."""

SPARE: Final = 8.0
"""Times the square root of what all ranks run at once are as many as lie between there and full, at
most: by so much varies what more important requests take (square-root staffing). Of a thousand
that is a quarter."""

SPARE_MIN: Final = 2.0
"""As many at least: places that are free for more important requests are not used by others."""

SPARE_LEFT: Final = 0.75
"""Between the two it is this over the share of ended requests that the more important ones leave
over: what they take for a while beyond that share must be free already, as it drains slowly."""

BURST_SHARE: Final = 0.05
"""Requests that come together are counted again after this share of what the ranks run at once."""


def fullness(share: FloatOrColumn, idle_share: float) -> FloatOrColumn:
    """Return how far a rank is filled by so large a share of the requests that it runs at once.

    0 is as good as idle, 1 full. What is beyond waits inside the rank, and counts alike in small
    pools and in large ones: in these little lies between idle and full, and else a few hot ranks
    would fill a pool whose other ranks are idle.
    """
    below, beyond = (share - idle_share) / (1.0 - idle_share), (share - 1.0) / (1.0 - IDLE_SHARE)
    filled: FloatOrColumn = np.minimum(below, 1.0 + beyond)
    return filled


class SaturationLimits(NamedTuple):
    """What counts as a full rank."""

    target_ttft_s: float | None = None
    """The booked prefill tokens of a rank should be computed within this time; None: as long as the
    policy says, else `DEFAULT_TARGET_TTFT_S`."""
    kv_utilization: float = 0.8
    waiting: float = 5.0
    """Requests waiting inside the engine, if reported; 0: ignored."""


class TargetSource(Protocol):
    """A policy that says how long what is booked on a rank may take."""

    @property
    def target_ttft_s(self) -> float:
        """In seconds, above 0; it may change at any time."""
        ...

    def protected_per_s(self, now: float) -> float:
        """Return how many requests per second it admits that it never refuses for load."""
        ...


class _OfOthers:
    """The load without that of some slots, whose workers drain; the columns are copies.

    Used only while a worker drains: a copy of a thousand rows takes a microsecond.
    """

    def __init__(self, loads: SlotLoads, left_out: Collection[int]) -> None:
        self._loads = loads
        self._left_out = np.array([*left_out], dtype=np.int64)

    def _without(self, column: NDArray[_Number]) -> NDArray[_Number]:
        column = column.copy()
        column[self._left_out] = 0
        return column

    @property
    def prefill(self) -> Floats:
        return self._without(self._loads.prefill)

    @property
    def decode(self) -> Floats:
        return self._without(self._loads.decode)

    @property
    def requests(self) -> NDArray[np.int64]:
        return self._without(self._loads.requests)

    @property
    def computing(self) -> NDArray[np.int64]:
        return self._without(self._loads.computing)

    @property
    def prefilling(self) -> int:
        return int(self.computing.sum())

    @property
    def prefill_backlog(self) -> int:
        return int(self.prefill.sum())

    @property
    def speeds(self) -> RankSpeeds:
        return self._loads.speeds

    @property
    def work(self) -> WorkDone:
        return self._loads.work


class PoolLoad:
    """The load of a pool of slots; detached ones do not count, and empty ones hold 0."""

    def __init__(
        self,
        loads: SlotLoads,
        limits: SaturationLimits | None = None,
        meter: DrainMeter | None = None,
    ) -> None:
        self._loads = loads
        self.loads: SlotLoads | _OfOthers = loads
        self.limits = limits or SaturationLimits()
        self.meter = meter or DrainMeter(loads.work)
        self._targets: TargetSource | None = None
        self.instances = 0
        self._attached: set[int] = set()
        self._waiting: dict[int, int] = {}  # inside the engine, by slot, if reported
        self._stale: set[int] = set()
        self._share: Floats = np.zeros(0)
        """1 / total blocks; 0: unknown."""
        self._blocks: Floats = np.zeros(0)
        """Total blocks; infinity: unknown. Compare with limits by division: 28 times 1/35 is less
        than 28/35."""
        self._reported_floor: Floats = np.zeros(0)
        """The saturation a rank has at any load: from its report, or because that is stale."""
        self._max_num_seqs: Floats = np.zeros(0)
        """Requests that it runs at once; infinity: unknown."""
        self._is_known: list[bool] = []
        """Whether its worker's record says so."""
        self._floor: Floats = np.zeros(0)
        """The larger of `_reported_floor` and of how far those are taken, updated with the rate,
        after bursts, and, where they are taken, when requests have ended."""
        self._ended = -1  # requests that had ended when `_floor` was updated
        self._is_taken = False  # whether places of any rank counted then
        self._idle_share = IDLE_SHARE
        self._burst_at = math.inf  # with so many prompts to compute it is updated again
        self._speed = PoolSpeed(0.0, 1.0, 1, 1.0)
        self._rate_until = -math.inf
        self._room = 1.0  # prefill tokens of a full rank
        self._full = 0.0  # the same of all ranks
        self._block_tokens: Floats = np.zeros(0)
        """The prefill tokens that fill a rank as much as one block does."""
        self._fill = Fill(self._share, self._share, self._block_tokens, self._floor)
        self._prefill = self._share  # the column it reads
        self._tenants: dict[str, int] = {}

    # -- ranks ---------------------------------------------------------------------------------

    def _ensure(self, capacity: int) -> None:
        missing = capacity - len(self._share)
        if missing <= 0:
            return
        more = np.zeros(missing)
        self._share = np.concatenate([self._share, more])
        self._blocks = np.concatenate([self._blocks, np.full(missing, math.inf)])
        self._reported_floor = np.concatenate([self._reported_floor, more])
        self._max_num_seqs = np.concatenate([self._max_num_seqs, np.full(missing, math.inf)])
        self._is_known += [False] * missing
        self._floor = np.concatenate([self._floor, more])
        self._block_tokens = np.zeros(capacity)
        self._prefill = self._share  # `_fill` still reads the old columns
        self._rate_until = -math.inf

    def attach(
        self, slot: int, total_kv_blocks: int | None, max_num_seqs: int | None = None
    ) -> None:
        """Attach a schedulable rank on the slot, or update its record; its load stays."""
        self._ensure(max(slot + 1, len(self.loads.prefill)))
        self._attached.add(slot)
        self.instances = len(self._attached)
        self._share[slot] = 1.0 / total_kv_blocks if total_kv_blocks else 0.0
        self._blocks[slot] = total_kv_blocks or math.inf
        if max_num_seqs or self._is_known[slot]:
            self._max_num_seqs[slot] = max_num_seqs or math.inf
        self._is_known[slot] = bool(max_num_seqs)
        self._rate_until = -math.inf

    def detach(self, slot: int) -> None:
        """Remove the rank from the slot; the ledger removes its load."""
        if slot not in self._attached:
            return
        self._attached.discard(slot)
        self.instances = len(self._attached)
        self._share[slot], self._blocks[slot], self._max_num_seqs[slot] = 0.0, math.inf, math.inf
        self._is_known[slot] = False
        self._waiting.pop(slot, None)
        self._stale.discard(slot)
        self._write_floor(slot)
        self._rate_until = -math.inf

    def disregard(self, slots: Collection[int]) -> None:
        """Ignore detached slots that still carry load."""
        self.loads = _OfOthers(self._loads, slots) if slots else self._loads

    # -- reports of ranks ----------------------------------------------------------------------

    def report_waiting(self, slot: int, waiting: int | None, running: int | None = None) -> None:
        """Set the requests waiting inside the engine of an attached slot, and those it runs.

        None: not reported. Where the worker's record does not say how many it runs at once, it is
        the most that it ran while it was full, until it is seen to run more without; and one more
        whenever it runs so many and none waits, or no more would ever be sent to it.
        """
        if waiting is None:
            self._waiting.pop(slot, None)
        else:
            self._waiting[slot] = waiting
            if running and not self._is_known[slot]:
                most = self._max_num_seqs.item(slot)
                if 0.0 < self.limits.waiting <= waiting:
                    self._max_num_seqs[slot] = running if most == math.inf else max(most, running)
                elif running > most:
                    self._max_num_seqs[slot] = math.inf
                elif running == most and not waiting:
                    self._max_num_seqs[slot] = running + 1
        self._write_floor(slot)

    def mark_stale(self, slot: int, *, stale: bool) -> None:
        """Mark a rank's report as stale or fresh; a rank with a stale one counts as full."""
        (self._stale.add if stale else self._stale.discard)(slot)
        self._write_floor(slot)

    def _write_floor(self, slot: int) -> None:
        limit = self.limits.waiting
        floor = self._waiting.get(slot, 0) / limit if limit else 0.0
        self._reported_floor[slot] = max(floor, 1.0) if slot in self._stale else floor
        self._floor[slot] = max(self._reported_floor.item(slot), self._fullness_by_requests(slot))

    def _fullness_by_requests(self, slot: int) -> float:
        """Return how far a rank's `max_num_seqs` are taken; more than 1: some requests wait."""
        most = self._max_num_seqs.item(slot)
        return fullness(self.loads.requests.item(slot) / most, self._idle_share)

    # -- for policies --------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """Time of the last change of the load, in monotonic seconds."""
        return self.meter.work.at

    @property
    def prefill_backlog(self) -> float:
        """Booked prefill tokens not computed yet."""
        return self.loads.prefill_backlog

    @property
    def prefill_rate(self) -> float:
        """Prefill tokens per second of one rank with work to do; 0: unknown."""
        if self.meter.work.at > self._rate_until:
            self._follow_rate()
        return self._speed.tokens_per_s / self._speed.ranks

    @property
    def requests_per_s(self) -> float:
        """Requests that end per second with as many in flight as now; 0: unknown. O(slots)."""
        return self.meter.requests_per_s(int(self.loads.requests.sum()))

    def _follow_requests(self) -> None:
        """Read how far the requests that ranks run at once are taken. O(slots)."""
        requests = self.loads.requests
        rows = len(requests)
        self._ensure(rows)
        taken = fullness(requests / self._max_num_seqs[:rows], self._idle_share)
        np.maximum(self._reported_floor[:rows], taken, out=self._floor[:rows])
        self._is_taken = bool(taken.max(initial=0.0) > 0.0)
        self._ended = self.meter.work.ended
        places = self.instances * self._max_num_seqs.min(initial=math.inf).item()
        self._burst_at = self.loads.prefilling + max(1.0, places * BURST_SHARE)

    def _follow_places(self) -> None:
        """Follow how many requests all ranks run at once; one that does not say is like the others.

        O(slots).
        """
        known = self._max_num_seqs[np.isfinite(self._max_num_seqs)]
        places = self.instances * known.mean().item() if len(known) else 0.0
        if places > 0.0:
            self._idle_share = max(IDLE_SHARE, 1.0 - self._spare() / math.sqrt(places))

    def _spare(self) -> float:
        """Return how many times the square root of all places are kept for important requests."""
        ends_per_s = self.requests_per_s
        if self._targets is None or not ends_per_s:
            return SPARE
        left = 1.0 - self._targets.protected_per_s(self.now) / ends_per_s
        return max(SPARE_MIN, SPARE_LEFT / max(left, SPARE_LEFT / SPARE))

    def _follow_rate(self) -> None:
        self._follow_places()
        self._follow_requests()
        self._rate_until = self.meter.work.at + _RATE_STEP_S
        ranks = max(1, self.instances)
        self._speed = speed = self._loads.speeds.of_pool(ranks, self.meter.tokens_per_s)
        target_s = self.limits.target_ttft_s
        if target_s is None:
            target_s = DEFAULT_TARGET_TTFT_S
            if self._targets is not None:
                target_s = self._targets.target_ttft_s
        self._room = speed.tokens_per_s / ranks * target_s
        self._full = self._room * self.instances
        np.multiply(self._share, self._room / self.limits.kv_utilization, out=self._block_tokens)

    def aim(self, targets: TargetSource | None) -> None:
        """Take the time in which booked tokens should be computed from a policy, or the default."""
        self._targets = targets
        self._rate_until = -math.inf

    def outlook(self) -> tuple[PoolSpeed | None, float, float]:
        """Return how fast prompts are computed, prefill_backlog and saturation."""
        loads, work = self.loads, self.meter.work
        if work.at > self._rate_until:
            self._follow_rate()
        elif loads.prefilling >= self._burst_at or (
            self._is_taken and work.ended != self._ended
        ):  # an end alone does not move `work.at`: a full pool would never be seen to empty
            self._follow_requests()
        if loads.prefill is not self._prefill:
            self._read_anew()
        full = self._full
        saturation = self._fill.total(self._room) / full if full else 1.0
        return self._speed, loads.prefill_backlog, saturation

    @property
    def saturation(self) -> float:
        """Mean over ranks of max(prefill/P*, blocks/(limit·K), waiting/limit); 1 without ranks."""
        return self.outlook()[2]

    def _read_anew(self) -> None:
        """Adopt columns that replaced shorter ones."""
        loads = self.loads
        self._ensure(len(loads.prefill))
        self._follow_rate()
        self._prefill = loads.prefill
        rows = len(loads.prefill)
        more = self._block_tokens[:rows], self._floor[:rows]
        self._fill = Fill(loads.prefill, loads.decode, *more)

    @property
    def queue_depth(self) -> Floats:
        """Requests waiting inside each rank: as reported, else all that compute but one."""
        waiting: Floats = np.maximum(self.loads.computing - 1.0, 0.0)
        for slot, reported in self._waiting.items():
            waiting[slot] = reported
        return waiting

    @property
    def batch_size(self) -> Floats:
        """Requests that do not wait."""
        running: Floats = np.maximum(self.loads.requests - self.queue_depth, 0.0)
        return running

    @property
    def in_flight(self) -> Floats:
        """Requests sent and not ended."""
        return self.loads.requests.astype(np.float64)

    @property
    def kv_utilization(self) -> Floats:
        """Share of the blocks in use."""
        decode = self.loads.decode
        self._ensure(len(decode))
        return decode / self._blocks[: len(decode)]

    @property
    def heaviest(self) -> int:
        """The largest sum of waiting, running and in-flight requests on one rank."""
        if self._waiting:
            return int((self.queue_depth + self.batch_size + self.in_flight).max())
        requests = self.loads.requests
        most: int = requests.item(requests.argmax())  # `max` costs a Python frame
        return 2 * most  # a request either waits or runs

    def utilization_most(self, queue_depth: float, kv_utilization: float) -> float:
        """Return an upper bound of the pool's utilization; infinity: no quick answer.

        The maximum of two values is at most their sum, and not all that compute wait.
        """
        decode = self.loads.decode
        if self._waiting or not self.instances or len(decode) != len(self._share):
            return math.inf
        used = float(decode.dot(self._share)) / kv_utilization
        return (self.loads.prefilling / queue_depth + used) / self.instances

    # -- by tenant -----------------------------------------------------------------------------

    def tenant_in_flight(self, tenant_id: str) -> int:
        """Requests of the tenant that began and have not ended."""
        return self._tenants.get(tenant_id, 0)

    def began(self, tenant_id: str) -> None:
        """A request of the tenant was booked."""
        self._tenants[tenant_id] = self._tenants.get(tenant_id, 0) + 1

    def left(self, tenant_id: str) -> None:
        """A request of the tenant ended; tenants without requests are forgotten."""
        left = self._tenants.get(tenant_id, 0) - 1
        if left > 0:
            self._tenants[tenant_id] = left
        else:
            self._tenants.pop(tenant_id, None)

    def recount(self, in_flight: Mapping[str, int]) -> None:
        """Restart the counts by tenant."""
        self._tenants = {name: count for name, count in in_flight.items() if count}

    def check(self) -> None:
        """Assert all invariants: the sum is that of the ranks, and empty slots carry nothing."""
        assert self.instances == len(self._attached)
        loads, limits = self.loads, self.limits
        _, _, saturation = self.outlook()  # one snapshot: the next call may refresh the rate
        assert self.prefill_backlog == loads.prefill.sum()
        assert loads.prefilling == loads.computing.sum()
        if self.instances:
            most = self.queue_depth + self.batch_size + self.in_flight
            assert self.heaviest == most.max()
        total = 0.0
        for slot in self._attached:
            filled = float(loads.prefill[slot]) / self._room
            used = float(loads.decode[slot]) * float(self._share[slot]) / limits.kv_utilization
            waits = self._waiting.get(slot, 0) / limits.waiting if limits.waiting else 0.0
            floor = self._floor.item(slot)
            assert (
                floor >= self._reported_floor.item(slot) == max(waits, float(slot in self._stale))
            )
            total += max(filled, used, floor)
        if self.instances:
            assert math.isclose(saturation, total / self.instances, rel_tol=1e-9)
        assert self._waiting.keys() | self._stale <= self._attached
        assert all(self._tenants.values()), "only tenants with requests are counted"
