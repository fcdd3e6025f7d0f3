"""Which ranks are busy: one bit per slot, updated in O(1) with each change that may flip it.

A rank is busy when any configured check is exceeded, a worker when all its declared ranks are. The
field's newer routers latch the decode check: set when either signal exceeds the limit, cleared when
the latest reports of both do not. With both latest values at hand that is their OR, and no stale
latch can survive a change of thresholds: everything is recomputed from the known values.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from select_service.core.admission.thresholds import NOTHING

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from select_service.core.admission.thresholds import Thresholds
    from select_service.core.columns import Rows

UNREPORTED: Final = -math.inf
"""The used blocks of a worker that never reported them: never over the limit."""


class RankReport(NamedTuple):
    """What is known of one rank."""

    active_prefill_tokens: float = 0.0
    active_decode_blocks: float = 0.0  # from our ledger
    kv_used_blocks: float | None = None  # reported by the worker
    kv_total_blocks: int | None = None
    max_num_batched_tokens: int | None = None


def rank_busy(thresholds: Thresholds, load: RankReport) -> bool:
    """Tell whether any check is exceeded; equal is not."""
    if load.active_prefill_tokens > thresholds.prefill_limit(load.max_num_batched_tokens):
        return True
    limit = thresholds.decode_limit(load.kv_total_blocks)
    used = UNREPORTED if load.kv_used_blocks is None else load.kv_used_blocks
    return load.active_decode_blocks > limit or used > limit


class BusyRanks:
    """The busy bit of every slot of a partition.

    Slots without a worker are never busy. `note` must be called when the load of a slot grows, and
    when that of a busy one shrinks; it costs a few comparisons of Python numbers and writes the
    column only when the bit flips.
    """

    def __init__(self) -> None:
        self.busy: NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
        self.slots: set[int] = set()
        """The slots whose bit is set."""
        self.thresholds = NOTHING
        self.watches = False
        """Whether any threshold is set; if not, no slot is ever busy."""
        self._attached: list[bool] = []
        self._batch_tokens: list[int | None] = []
        self._total_blocks: list[int | None] = []
        self._prefill_limit: list[float] = []
        self._decode_limit: list[float] = []
        self._prefill: list[float] = []
        self._decode: list[float] = []
        self._used: list[float] = []

    def ensure(self, capacity: int) -> None:
        """Make room for slots below `capacity`; never shrinks."""
        missing = capacity - len(self._attached)
        if missing <= 0:
            return
        self.busy = np.concatenate([self.busy, np.zeros(missing, dtype=np.bool_)])
        self._attached += [False] * missing
        self._batch_tokens += [None] * missing
        self._total_blocks += [None] * missing
        self._prefill_limit += [math.inf] * missing
        self._decode_limit += [math.inf] * missing
        self._prefill += [0.0] * missing
        self._decode += [0.0] * missing
        self._used += [UNREPORTED] * missing

    @property
    def count(self) -> int:
        """Busy slots."""
        return len(self.slots)

    def attach(
        self, slot: int, max_num_batched_tokens: int | None, kv_total_blocks: int | None
    ) -> None:
        """Attach a declared rank on the slot, or update its worker's record; its load stays."""
        self.ensure(slot + 1)
        self._attached[slot] = True
        self._batch_tokens[slot] = max_num_batched_tokens
        self._total_blocks[slot] = kv_total_blocks
        self._compile(slot)

    def detach(self, slot: int) -> None:
        """Remove a rank with its load, report and bit."""
        if slot >= len(self._attached):
            return
        self._attached[slot] = False
        self._prefill[slot] = self._decode[slot] = 0.0
        self._used[slot] = UNREPORTED
        self._prefill_limit[slot] = self._decode_limit[slot] = math.inf
        self._judge(slot)

    def set_thresholds(self, thresholds: Thresholds) -> None:
        """Put thresholds in force at once, for every slot."""
        self.thresholds = thresholds
        self.watches = thresholds.any
        for slot, attached in enumerate(self._attached):
            if attached:
                self._compile(slot)

    def note(self, slot: int, prefill_tokens: float, decode_blocks: float) -> None:
        """Update the load of a slot, from the ledger."""
        self._prefill[slot] = prefill_tokens
        self._decode[slot] = decode_blocks
        self._judge(slot)

    def report(self, slot: int, kv_used_blocks: float | None) -> bool:
        """Apply a report of used blocks; False: dropped, as the rank is not declared."""
        if slot >= len(self._attached) or not self._attached[slot]:
            return False
        self._used[slot] = UNREPORTED if kv_used_blocks is None else float(kv_used_blocks)
        self._judge(slot)
        return True

    def is_reported(self, rows: Rows) -> bool:
        """Tell whether any candidate is judged by used blocks that its worker reported."""
        slots = range(rows.stop) if isinstance(rows, slice) else rows.tolist()
        return any(self._used[slot] != UNREPORTED for slot in slots)

    def all_busy(self, rows: Rows) -> bool:
        """Tell whether every candidate is busy.

        O(1) unless as many slots are busy as candidates.
        """
        candidates = rows.stop if isinstance(rows, slice) else len(rows)
        if len(self.slots) < candidates or not candidates:
            return False
        return bool(self.busy[rows].all())

    def free_rows(self, rows: Rows) -> Rows:
        """Return the candidates that are not busy, ascending; all of them if none is busy."""
        if not self.slots:
            return rows
        busy = self.busy[rows]
        if not busy.any():
            return rows
        if isinstance(rows, slice):
            return np.flatnonzero(~busy)
        return rows[~busy]

    def lowest_limits(self) -> tuple[float, float]:
        """Return the prefill tokens and blocks up to which no slot is busy."""
        return min(self._prefill_limit, default=math.inf), min(self._decode_limit, default=math.inf)

    def exceeded(self, slot: int) -> tuple[str, float, float] | None:
        """Return (knob, value, limit) of the first check a slot exceeds, for the answer."""
        decode, used = self._decode[slot], self._used[slot]
        if self._prefill[slot] > self._prefill_limit[slot]:
            knob = "active_prefill_tokens_threshold"
            absolute = self.thresholds.active_prefill_tokens_threshold
            if absolute is None or absolute != self._prefill_limit[slot]:
                knob = "active_prefill_tokens_threshold_frac"
            return knob, self._prefill[slot], self._prefill_limit[slot]
        limit = self._decode_limit[slot]
        if decode > limit or used > limit:
            return "active_decode_blocks_threshold", max(decode, used), limit
        return None

    def _compile(self, slot: int) -> None:
        self._prefill_limit[slot] = self.thresholds.prefill_limit(self._batch_tokens[slot])
        self._decode_limit[slot] = self.thresholds.decode_limit(self._total_blocks[slot])
        self._judge(slot)

    def _judge(self, slot: int) -> None:
        limit = self._decode_limit[slot]
        busy = (
            self._prefill[slot] > self._prefill_limit[slot]
            or self._decode[slot] > limit
            or self._used[slot] > limit
        )
        if busy != (slot in self.slots):
            self.busy[slot] = busy
            (self.slots.add if busy else self.slots.discard)(slot)

    def is_true(self, slot: int, prefill_tokens: float, decode_blocks: float) -> bool:
        """Tell whether the bit of a slot is right for its current load; for tests."""
        limit = self._decode_limit[slot]
        over = prefill_tokens > self._prefill_limit[slot] or decode_blocks > limit
        return (slot in self.slots) == (over or self._used[slot] > limit)

    def check(self) -> None:
        """Assert that bits and their number follow from the known values."""
        assert set(np.flatnonzero(self.busy).tolist()) == self.slots
        for slot, attached in enumerate(self._attached):
            used = self._used[slot]
            load = RankReport(
                self._prefill[slot],
                self._decode[slot],
                None if used == UNREPORTED else used,
                self._total_blocks[slot],
                self._batch_tokens[slot],
            )
            assert self.busy[slot] == (attached and rank_busy(self.thresholds, load))
