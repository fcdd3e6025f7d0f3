"""What a gate knows of its ranks, kept in step with the ledger: their load, which are busy or full.

The ledger notes what has changed (`loads.py`); nothing is computed before a request is
judged. Workers report the rest.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from select_service.core.admission.busy import BusyRanks
from select_service.core.admission.capacity import WorkerCaps
from select_service.core.admission.pool_load import PoolLoad, SaturationLimits
from select_service.core.ledger.loads import LoadChanges
from select_service.core.ledger.rank_speeds import Fit

if TYPE_CHECKING:
    from collections.abc import Collection

    from select_service.core.admission.thresholds import Thresholds
    from select_service.core.columns import Rows
    from select_service.core.fleet.catalog import Worker
    from select_service.core.ledger.drain_meter import DrainMeter
    from select_service.core.ledger.ledger import Ledger
    from select_service.core.ledger.reservation import LedgerReservation
    from select_service.types.admission import AdmissionSettings, RankMetrics


class RankLimits:
    """The ranks of one partition: load, thresholds and caps.

    The load of `ledger` is followed from now on; `attach` brings the workers.
    """

    def __init__(
        self,
        ledger: Ledger,
        settings: AdmissionSettings,
        thresholds: Thresholds,
        meter: DrainMeter,
    ) -> None:
        self.pool = PoolLoad(ledger.loads, SaturationLimits(settings.slo_target_ttft_s), meter)
        self.busy = BusyRanks()
        self.busy.set_thresholds(thresholds)
        self.caps = WorkerCaps()
        self.now = 0.0  # of the last refresh
        self.changes = LoadChanges(self.busy.slots, self.caps.slots)
        """What the ledger has noted; unless it asks for a `look`, no `refresh` is needed."""
        self.stays = Fit(is_level=True)
        """How long requests are in flight, of late, while a worker has a cap."""
        self._settings = settings
        self._ledger, self._loads = ledger, ledger.loads
        self._has_new_limits = False
        self._by_slot: dict[int, tuple[int, int]] = {}  # slot → worker id and rank
        self._slots: dict[int, dict[int, int]] = {}  # worker id → rank → slot
        self._capped: set[int] = set()  # workers with a cap
        ledger.changes = self.changes

    # -- workers -------------------------------------------------------------------------------

    def attach(self, worker: Worker) -> None:
        """Add a worker or update its record or ranks; load and reports of its ranks stay."""
        spec, worker_id = worker.spec, worker.worker_id
        before = self._slots.get(worker_id, {})
        for rank, slot in before.items():
            if worker.slots.get(rank) != slot:
                self._release_slot(slot)
        self._slots[worker_id] = dict(worker.slots)
        for rank, slot in worker.slots.items():
            if self._by_slot.get(slot) != (worker_id, rank):
                self._release_slot(slot)
            self._by_slot[slot] = (worker_id, rank)
            self.pool.attach(slot, spec.total_kv_blocks, spec.max_num_seqs)
            self.busy.attach(slot, spec.max_num_batched_tokens, spec.total_kv_blocks)
            self.changes.note(slot)
        self._has_new_limits = True
        most = self._settings.max_inflight if spec.max_inflight is None else spec.max_inflight
        queued = self._settings.max_queued if spec.max_queued is None else spec.max_queued
        self.caps.attach(worker_id, worker.slots.values(), most, queued)
        (self._capped.discard if most is None else self._capped.add)(worker_id)
        self.changes.look = True

    def _drop(self, worker_id: int) -> int:
        """Remove a worker; return how many requests held a place with it."""
        for slot in self._slots.pop(worker_id, {}).values():
            self._release_slot(slot)
        self._capped.discard(worker_id)
        self.changes.look = True
        return self.caps.detach(worker_id)

    def disregard(self, slots: Collection[int]) -> None:
        """Exclude these slots from the pool's load: their workers drain."""
        self.pool.disregard(slots)

    def _release_slot(self, slot: int) -> None:
        self._by_slot.pop(slot, None)
        self.pool.detach(slot)
        self.busy.detach(slot)

    def set_thresholds(self, thresholds: Thresholds) -> None:
        """Put thresholds in force at once."""
        self.busy.set_thresholds(thresholds)
        self.changes.slots.update(self._by_slot)
        self.changes.look = True
        self._has_new_limits = True

    def report(self, worker: Worker, metrics: RankMetrics) -> None:
        """Apply a rank's own load report."""
        slot = worker.slots.get(metrics.dp_rank)
        if slot is None or slot not in self._by_slot:
            return
        total = metrics.kv_total_blocks
        if worker.spec.total_kv_blocks is None and total is not None:
            self.pool.attach(slot, total, worker.spec.max_num_seqs)
            self.busy.attach(slot, worker.spec.max_num_batched_tokens, total)
            self._has_new_limits = True
        self.busy.report(slot, metrics.kv_used_blocks)
        self.pool.mark_stale(slot, stale=False)
        if metrics.num_requests_waiting is not None:
            self.pool.report_waiting(
                slot, metrics.num_requests_waiting, metrics.num_requests_running
            )
        self.changes.note(slot)

    def report_stale(self, worker: Worker, dp_rank: int, *, is_full: bool) -> None:
        """Drop the block count of a rank's stale report; the rank may then count as full."""
        slot = worker.slots.get(dp_rank)
        if slot is not None and slot in self._by_slot:
            self.busy.report(slot, None)
            self.pool.report_waiting(slot, None)
            self.pool.mark_stale(slot, stale=is_full)
            self.changes.note(slot)

    # -- load ----------------------------------------------------------------------------------

    def refresh(self, now: float) -> None:
        """Bring the books up to date with the ledger; O(slots that may be judged differently).

        Called before judging, not with every change.
        """
        self.now = now
        changes = self.changes
        if changes.slots:
            if self._has_new_limits:
                self._set_alarms()
            self._follow(changes.slots)
            changes.slots.clear()
        if changes.names_wanted and (changes.begun or changes.ended):
            for tenant in changes.begun:
                self.pool.began(tenant)
            changes.begun.clear()
            for tenant in changes.ended:
                self.pool.left(tenant)
            changes.ended.clear()
        changes.look = bool(
            self.busy.slots
            or self.caps.slots
            or changes.names_wanted
            or self._has_new_limits
            or not self.pool.instances
        )

    def _set_alarms(self) -> None:
        """Tell the ledger which loads to report, after limits have changed."""
        changes = self.changes
        changes.prefill_alarm, changes.decode_alarm = self.busy.lowest_limits()
        changes.requests_alarm = self.caps.lowest_limit()
        self._has_new_limits = False

    def _follow(self, slots: set[int]) -> None:
        loads, capped = self._loads, self._capped
        busy = self.busy if self.busy.watches else None
        for slot in slots:
            attach = self._by_slot.get(slot)
            if attach is None:
                continue
            if busy is not None:
                busy.note(slot, loads.prefill_left[slot], loads.decode.item(slot))
            if attach[0] in capped:
                self.caps.note(attach[0], self._inflight(attach[0]))

    def _inflight(self, worker_id: int) -> int:
        requests = self._loads.requests
        return sum(requests.item(slot) for slot in self._slots[worker_id].values())

    def ended(self, reservation: LedgerReservation, now: float) -> None:
        """Learn from a request that its client has freed how long one is in flight."""
        if self._capped and reservation.created > self._loads.work.resumed_at:
            self.stays.learn(0.0, now - reservation.created)

    # -- ranks that can take one ----------------------------------------------------------------

    def can_take(self, rows: Rows) -> bool:
        """Tell whether any of the rows is neither busy nor full."""
        return not self.busy.all_busy(rows) and not self.caps.all_full(rows)

    def usable(self, rows: Rows) -> Rows:
        """Return the candidates to choose from: never full ones, busy ones only if all are."""
        if not (self.busy.slots or self.caps.slots):
            return rows
        free = self.busy.free_rows(rows)
        opened = self.caps.open_rows(free)
        if not isinstance(opened, slice) and not len(opened):
            return self.caps.open_rows(rows)
        return opened

    def is_full(self, slot: int) -> bool:
        """Tell whether the worker of a slot is full."""
        return bool(self._capped) and bool(self.caps.full[slot])

    def check_limits(self) -> None:
        """Assert that all this matches the ledger; `refresh` comes first."""
        for worker_id, slots in self._slots.items():
            cap, inflight = self.caps[worker_id], self._inflight(worker_id)
            assert not slots or cap.full == (inflight >= cap.max_inflight)
            assert not cap.full or cap.inflight == inflight, "a full one is followed closely"
        if self.changes.names_wanted:
            tenants = Counter(one.fairness_id for one in self._ledger.all_reservations())
            assert all(self.pool.tenant_in_flight(name) == n for name, n in tenants.items())
        loads = self._loads
        assert self.changes.look or not (self.busy.slots or self.caps.slots)
        for slot in self._by_slot:
            assert self.busy.is_true(slot, loads.prefill_left[slot], loads.decode.item(slot))
