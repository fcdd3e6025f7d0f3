"""Loads as told slot by slot, in place of the live service's ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from select_service.core.admission.pool_load import PoolLoad, SaturationLimits
from select_service.core.ledger.drain_meter import PRIOR_TOKENS_PER_S, DrainMeter
from select_service.core.ledger.rank_speeds import RankSpeeds
from select_service.core.ledger.work_done import WorkDone

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from select_service.core.columns import Floats


class RecordedRankLoad(NamedTuple):
    """The load of one rank, and its engine's report."""

    prefill_tokens: float = 0.0
    decode_blocks: float = 0.0
    requests: int = 0
    prefilling: int = 0  # those of them whose prefill is not complete
    waiting: int | None = None  # inside the engine, if reported
    running: int | None = None  # in its batch, if reported


class RecordedLoads:
    """The columns of a pool; see `Loads`."""

    def __init__(self) -> None:
        self.prefill: Floats = np.zeros(0)
        self.decode: Floats = np.zeros(0)
        self.requests: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self.computing: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self.prefilling = 0
        self.prefill_backlog = 0
        self.work = WorkDone()
        self.speeds = RankSpeeds()

    def ensure(self, capacity: int) -> None:
        """Make room for slots below `capacity`; never shrinks."""
        missing = capacity - len(self.prefill)
        if missing > 0:
            for name in ("prefill", "decode", "requests", "computing"):
                column = getattr(self, name)
                more = np.zeros(missing, dtype=column.dtype)
                setattr(self, name, np.concatenate([column, more]))
            self.work.ensure(capacity)

    def note(self, slot: int, load: RecordedRankLoad, now: float) -> None:
        """Set the load of a slot."""
        self.work.at = max(self.work.at, now)
        before, tokens = int(self.prefill[slot]), int(load.prefill_tokens)
        self.prefill_backlog += tokens - before
        if tokens and not before:
            self.work.starts(slot)
        elif before and not tokens:
            self.work.stops(slot)
        self.prefilling += load.prefilling - int(self.computing[slot])
        self.prefill[slot], self.decode[slot] = tokens, load.decode_blocks
        self.requests[slot], self.computing[slot] = load.requests, load.prefilling


class RecordedPool(PoolLoad):
    """A pool with its own loads."""

    def __init__(
        self,
        limits: SaturationLimits | None = None,
        *,
        prior_tokens_per_s: float = PRIOR_TOKENS_PER_S,
    ) -> None:
        self.told = RecordedLoads()
        meter = DrainMeter(self.told.work, prior_tokens_per_s=prior_tokens_per_s)
        super().__init__(self.told, limits, meter)

    def attach(
        self, slot: int, total_kv_blocks: int | None, max_num_seqs: int | None = None
    ) -> None:
        """Attach a rank on the slot, or update its record; its load stays."""
        self.told.ensure(slot + 1)
        super().attach(slot, total_kv_blocks, max_num_seqs)

    def detach(self, slot: int) -> None:
        """Remove a rank with its load."""
        if slot < len(self.told.prefill):
            self.told.note(slot, RecordedRankLoad(), self.told.work.at)
        super().detach(slot)

    def note(self, slot: int, load: RecordedRankLoad, now: float) -> None:
        """Set the load of a attached slot."""
        self.told.note(slot, load, now)
        self.tell_waiting(slot, load.waiting, load.running)

    def prefilled(
        self, slot: int, tokens: int, booked_at: float, now: float, queued: int | None = None
    ) -> None:
        """Count this many computed tokens of a prompt booked then (not: given up).

        With the tokens that were queued before it, the speed of its rank is learnt from it.
        """
        self.told.work.at = max(self.told.work.at, now)
        if tokens:
            self.told.work.hear(slot, tokens, booked_at)
            if queued is not None:
                self.told.speeds.computed(slot, queued + tokens, now - booked_at)

    def ended(self, tenant_id: str, booked_at: float | None = None) -> None:
        """Count the end of a request of the tenant, booked then."""
        work = self.told.work
        work.ended += 1
        work.stayed_s += 0.0 if booked_at is None else max(0.0, work.at - booked_at)
        self.left(tenant_id)
