"""Pools for trying a policy: one described by the arrivals, and one that simulates computing.

Both use the same books as the live service; neither reads a clock. `admit.py` uses them.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
from typing_extensions import override

from select_service.core.admission.pool_load import PoolLoad, SaturationLimits
from select_service.core.ledger.drain_meter import PRIOR_TOKENS_PER_S, DrainMeter
from select_service.core.ledger.slot_loads import SlotLoads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from select_service.core.admission.policy_api import AdmissionRequest, InstanceSnapshot
    from select_service.core.columns import Floats
    from select_service.core.ledger.rank_speeds import PoolSpeed


class RecordedRankLoad(NamedTuple):
    """The load of one rank, and its engine's report."""

    prefill_tokens: float = 0.0
    decode_blocks: float = 0.0
    requests: int = 0
    prefilling: int = 0  # those of them whose prefill is not complete
    waiting: int | None = None  # inside the engine, if reported
    running: int | None = None  # in its batch, if reported


class RecordedPool(PoolLoad):
    """A pool whose loads are reported, not booked."""

    def __init__(
        self,
        limits: SaturationLimits | None = None,
        *,
        prior_tokens_per_s: float = PRIOR_TOKENS_PER_S,
    ) -> None:
        self.slot_loads = SlotLoads()
        meter = DrainMeter(self.slot_loads.work, prior_tokens_per_s=prior_tokens_per_s)
        super().__init__(self.slot_loads, limits, meter)

    def attach(
        self, slot: int, total_kv_blocks: int | None, max_num_seqs: int | None = None
    ) -> None:
        """Attach a rank on the slot, or update its record; its load stays."""
        self.slot_loads.ensure(slot + 1)
        super().attach(slot, total_kv_blocks, max_num_seqs)

    def detach(self, slot: int) -> None:
        """Remove a rank with its load."""
        if slot < len(self.slot_loads.prefill):
            self._set(slot, RecordedRankLoad(), self.slot_loads.work.at)
        super().detach(slot)

    def note(self, slot: int, load: RecordedRankLoad, now: float) -> None:
        """Set the load of an attached slot."""
        self._set(slot, load, now)
        self.report_waiting(slot, load.waiting, load.running)

    def _set(self, slot: int, load: RecordedRankLoad, now: float) -> None:
        slot_loads = self.slot_loads
        slot_loads.work.at = max(slot_loads.work.at, now)
        before, tokens = int(slot_loads.prefill[slot]), int(load.prefill_tokens)
        slot_loads.prefill_backlog += tokens - before
        if tokens and not before:
            slot_loads.work.starts(slot)
        elif before and not tokens:
            slot_loads.work.stops(slot)
        slot_loads.prefilling += load.prefilling - int(slot_loads.computing[slot])
        slot_loads.prefill[slot], slot_loads.decode[slot] = tokens, load.decode_blocks
        slot_loads.requests[slot], slot_loads.computing[slot] = load.requests, load.prefilling

    def prefilled(
        self, slot: int, tokens: int, booked_at: float, now: float, queued: int | None = None
    ) -> None:
        """Count this many computed tokens of a prompt booked then (not: given up).

        With the tokens that were queued before it, the speed of its rank is learnt from it.
        """
        self.slot_loads.work.at = max(self.slot_loads.work.at, now)
        if tokens:
            self.slot_loads.work.note_computed(slot, tokens, booked_at)
            if queued is not None:
                self.slot_loads.speeds.computed(slot, queued + tokens, now - booked_at)

    def ended(self, tenant_id: str, booked_at: float | None = None) -> None:
        """Count the end of a request of the tenant, booked then."""
        work = self.slot_loads.work
        work.ended += 1
        work.stayed_s += 0.0 if booked_at is None else max(0.0, work.at - booked_at)
        self.left(tenant_id)


class SnapshotPool(RecordedPool):
    """A pool as described by arrivals; values they leave out stay as they were."""

    queue_depth: Floats = np.zeros(0)
    batch_size: Floats = np.zeros(0)
    in_flight: Floats = np.zeros(0)
    kv_utilization: Floats = np.zeros(0)

    def __init__(self) -> None:
        super().__init__()
        self.in_flight_by_tenant: dict[str, int] = {}
        self._saturation = 1.0

    def set_snapshots(self, snapshots: Sequence[InstanceSnapshot]) -> None:
        """Replace the state of the instances."""
        self.instances = len(snapshots)
        columns = np.array(snapshots, dtype=np.float64).reshape(len(snapshots), 4)
        self.queue_depth, self.batch_size, self.in_flight, self.kv_utilization = columns.T
        limits = self.limits
        worse = np.maximum(
            self.queue_depth / limits.waiting, self.kv_utilization / limits.kv_utilization
        )
        self._saturation = float(worse.mean()) if len(worse) else 1.0

    @property
    def heaviest(self) -> int:
        """The largest sum on one instance, as reported."""
        return int((self.queue_depth + self.batch_size + self.in_flight).max())

    def utilization_most(self, queue_depth: float, kv_utilization: float) -> float:
        """Return no bound: only exact values count here."""
        return math.inf

    @property
    def saturation(self) -> float:
        """Mean over instances of max(queue, KV use), each against its limit."""
        return self._saturation

    @property
    def prefill_rate(self) -> float:
        """Unknown."""
        return 0.0

    @override
    def outlook(self) -> tuple[PoolSpeed | None, float, float]:
        """Return the reported state; how fast prompts are computed is unknown."""
        return None, self.prefill_backlog, self._saturation

    def tenant_in_flight(self, tenant_id: str) -> int:
        """Return the last reported value."""
        return self.in_flight_by_tenant.get(tenant_id, 0)


class TrialPoolSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A pool that computes; `check` before use."""

    ranks: int = 4
    prefill_tokens_per_s: float = 20_000.0
    output_token_s: float = 0.0  # time per output token while decoding
    kv_total_blocks: int = 8_192
    block_size: int = 16
    target_ttft_s: float | None = None  # as `SaturationLimits`

    def check(self) -> None:
        """Refuse settings with which a pool cannot compute.

        Raises:
            ValueError: naming it.
        """
        for name in ("ranks", "prefill_tokens_per_s", "kv_total_blocks", "block_size"):
            if not getattr(self, name) > 0:
                raise ValueError(f"pool: {name} must be above 0")
        target_s = self.target_ttft_s
        if not (self.output_token_s >= 0 and (target_s is None or target_s > 0)):
            raise ValueError("pool: output_token_s must be at least 0, target_ttft_s above 0")


class _Running:
    """A request that a rank computes, and then decodes."""

    __slots__ = ("ask", "blocks", "prefilled", "queued", "rank", "started")

    def __init__(
        self, ask: AdmissionRequest, rank: int, blocks: int, started: float, queued: int
    ) -> None:
        self.ask = ask
        self.rank = rank
        self.blocks = blocks
        self.started = started
        self.queued = queued
        self.prefilled = False


class ComputingPool(RecordedPool):
    """Ranks that compute prompts one after another and decode with unlimited batches.

    A fluid model: good enough to see whether a policy keeps its promises, not to predict latency.
    """

    def __init__(self, settings: TrialPoolSettings) -> None:
        settings.check()
        limits = SaturationLimits(settings.target_ttft_s)
        super().__init__(limits, prior_tokens_per_s=settings.prefill_tokens_per_s)
        self.settings = settings
        self._booked = [RecordedRankLoad()] * settings.ranks
        self._free_at = [0.0] * settings.ranks  # when all prompts booked so far are computed
        self._events: list[tuple[float, int, _Running]] = []
        self._order = 0
        for slot in range(settings.ranks):
            self.attach(slot, settings.kv_total_blocks)

    def place(self, ask: AdmissionRequest, now: float) -> float:
        """Place a request on the least loaded rank; returns the time of its first token."""
        settings, free_at = self.settings, self._free_at
        rank = min(range(settings.ranks), key=free_at.__getitem__)
        blocks = -(-(ask.tokens + ask.output_tokens) // settings.block_size)
        running = _Running(ask, rank, blocks, now, int(self._booked[rank].prefill_tokens))
        free_at[rank] = max(free_at[rank], now) + ask.work / settings.prefill_tokens_per_s
        self.began(ask.tenant_id)
        self._change(rank, RecordedRankLoad(ask.work, blocks, 1, 1), now)
        self._at(free_at[rank], running)
        return free_at[rank]

    def _at(self, when: float, running: _Running) -> None:
        self._order += 1
        heappush(self._events, (when, self._order, running))

    def next_event(self) -> float | None:
        """Return the time of the next event."""
        return self._events[0][0] if self._events else None

    def step(self) -> float:
        """Process the next event; returns its time."""
        now, _, running = heappop(self._events)
        ask, rank = running.ask, running.rank
        if not running.prefilled:
            running.prefilled = True
            self.prefilled(rank, ask.work, running.started, now, running.queued)
            self._change(rank, RecordedRankLoad(prefill_tokens=-ask.work, prefilling=-1), now)
            self._at(now + ask.output_tokens * self.settings.output_token_s, running)
            return now
        self._change(rank, RecordedRankLoad(decode_blocks=-running.blocks, requests=-1), now)
        self.ended(ask.tenant_id, running.started)
        return now

    def _change(self, rank: int, by: RecordedRankLoad, now: float) -> None:
        """Add to the load of a rank."""
        load = self._booked[rank] = RecordedRankLoad(
            self._booked[rank].prefill_tokens + by.prefill_tokens,
            self._booked[rank].decode_blocks + by.decode_blocks,
            self._booked[rank].requests + by.requests,
            self._booked[rank].prefilling + by.prefilling,
        )
        self.note(rank, load, now)
