"""The load of every slot, as columns of numbers, and their sums: the input of decisions.

Only the ledger writes here, with every booking and lifecycle call (`ledger.py`); the steps common
to all requests update single rows (`_ledger.pyx`). Reservations are not known here. Prices,
gates and queues read the columns, and a decision keeps a copy of them (`loads.py`). The
numbers are those of deploy/docs/contract.md, section 4.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np
from msgspec import UNSET, UnsetType

from indexer.compiled import usable
from select_service.core.ledger.drain_meter import PRIOR_TOKENS_PER_S, DrainMeter, WorkDone
from select_service.core.ledger.loads import PACE, TOTALS, padding, with_worn
from select_service.core.ledger.pull_speeds import PullSpeeds
from select_service.core.ledger.rank_speeds import RankSpeeds

if not TYPE_CHECKING and usable("select_service.core._ledger", 3):
    from select_service.core._ledger import LoadRows
else:
    from select_service.core.ledger.plain_load_rows import LoadRows

if TYPE_CHECKING:
    from select_service.core.columns import Floats, Slots

STEP_TOKENS: Final = 8_192
"""Tokens a rank computes per step if its record does not say (`max_num_batched_tokens`)."""

MAX_NUM_SEQS: Final = 2**62
"""Requests a rank runs at once if its record does not say (`max_num_seqs`); also the maximum."""

CHURN_MEMORY_S: Final = 300.0
"""Time after which a booking counts for a third. Ranks of one fleet are compared with each other:
between a minute and a quarter of an hour the choice makes no measurable difference."""

LOOK_EVERY_S: Final = 1.0
"""Interval between two updates of the decay, and of which ranks are worn."""

TRIED_AGAIN_S: Final = 300.0
"""A worn rank that was not heard of for so long is priced as others are until it is: it may have
been mended."""


class SlotLoads:
    """The columns of one ledger, one row per slot; 0 for an unused slot.

    `ensure` replaces them rather than resizing; read them through this object every time.
    """

    def __init__(self, *, prior_tokens_per_s: float = PRIOR_TOKENS_PER_S) -> None:
        self.prefill: Floats = np.zeros(0)
        """P: booked prefill tokens of reservations whose prefill is not complete."""
        self.prefill_left: list[int] = []
        """P again, by slot, as whole numbers: doubles would drift beyond 2^53."""
        self.prefill_backlog = 0
        """The sum of P."""
        self.decode: Floats = np.zeros(0)
        """D: weight of the distinct live blocks, rounded half up."""
        self.requests: Slots = np.zeros(0, dtype=np.int64)
        """Live reservations."""
        self.computing: Slots = np.zeros(0, dtype=np.int64)
        """The ones whose prefill is not complete."""
        self.prefilling = 0
        """The sum of `computing`."""
        self.context: Floats = np.zeros(0)
        """Blocks that live requests attend to. Shared blocks count for each request, as an engine
        reads them for each, and a prompt without a whole block counts as one. Each request adds
        `Ledger.sequence_blocks`, and those that the next waits for add `wait`. Whole numbers."""
        self.max_num_seqs: Slots = np.zeros(0, dtype=np.int64)
        """Requests each rank runs at once; further requests wait for one of them to end."""
        self.wait: Floats = np.zeros(0)
        """Weight in the context of waiting until one more request has ended."""
        self.churn: Floats = np.zeros(0)
        """Prefill tokens booked lately, decayed by `recent`: what entered a cache."""
        self.queue_updated_at: Floats = np.zeros(0)
        """When P was last known to be accurate, in monotonic seconds: when a request came to an
        empty queue, and whenever a prompt is reported as computed."""
        self.ahead: Floats = np.zeros(0)
        """Tokens of P that may have been computed since without a report: at most what was in it
        then, and at most the steps of the prompt whose turn it was, after which its first token
        would have come. So a rank that hangs is never credited with more, however long it is
        silent."""
        self.step: Floats = np.zeros(0)
        """Tokens that each rank computes in a step."""
        self.slowness: Floats = np.zeros(0)
        """How many times as long as others each rank takes, less one; 0: it is not worn. See
        `RankSpeeds.worn`."""
        self.has_worn = False
        """Whether any of them is above 0."""
        self.follows_queues = False
        """Whether it is known whose turn it is, and `pack` includes the queues, too. Only pricing
        that uses them pays for it."""
        self.speeds = RankSpeeds()
        self.pull_speeds = PullSpeeds(self.speeds)
        """How fast each rank is."""
        self.work = WorkDone()
        self.recent = RecentActivity(self.work, prior_tokens_per_s=prior_tokens_per_s)
        self._write_anew()

    def ensure(self, capacity: int) -> None:
        """Make room for slots below `capacity`; never shrinks."""
        missing = capacity - len(self.prefill_left)
        if missing <= 0:
            return
        zeros = np.zeros(missing)
        self.prefill = np.concatenate([self.prefill, zeros])
        self.decode = np.concatenate([self.decode, zeros])
        self.churn = np.concatenate([self.churn, zeros])
        self.context = np.concatenate([self.context, zeros])
        self.queue_updated_at = np.concatenate([self.queue_updated_at, zeros])
        self.ahead = np.concatenate([self.ahead, zeros])
        self.wait = np.concatenate([self.wait, zeros])
        self.slowness = np.concatenate([self.slowness, zeros])
        self.requests = np.concatenate([self.requests, np.zeros(missing, dtype=np.int64)])
        self.computing = np.concatenate([self.computing, np.zeros(missing, dtype=np.int64)])
        self.step = np.concatenate([self.step, np.full(missing, float(STEP_TOKENS))])
        self.max_num_seqs = np.concatenate([self.max_num_seqs, np.full(missing, MAX_NUM_SEQS)])
        self.prefill_left += [0] * missing
        self.work.ensure(capacity)
        self._write_anew()

    def _write_anew(self) -> None:
        """Rebuild `rows` for new columns."""
        columns = self.prefill, self.decode, self.churn, self.context, self.requests, self.computing
        self.rows = LoadRows(
            *columns, self.queue_updated_at, self.ahead, self.step, self.max_num_seqs, self.wait
        )
        """Single-row updates, for the steps that every request takes."""
        self.packed = b""
        """Cached result of `pack`; b"" after any load has changed."""

    def pack(self) -> bytes:
        """Return P, D, churn and context of every slot, and their `TOTALS`; see `loads.py`.

        The same object is returned as long as nothing changes.
        """
        if not self.packed:
            recent = self.recent
            pace = recent.pace if self.follows_queues else None
            self.packed = self.rows.pack(self.prefilling, recent.turnover, pace)
            if self.has_worn and self.follows_queues:
                self.packed = with_worn(self.packed, self.slowness)
        return self.packed

    def predicted_ms(
        self,
        slots: tuple[int, int],
        tokens: int,
        blocks: int,
        block_size: int,
        pull_tokens: int = 0,
    ) -> tuple[float | UnsetType, float | UnsetType]:
        """Return the milliseconds to the first token and between tokens of a request, before it.

        UNSET: the rank was not measured often enough.

        `slots` are those of the ranks that compute its prompt and its answer; `tokens` are
        to be computed there; `blocks` are added to the context, with
        `Ledger.sequence_blocks`; `pull_tokens` could be computed while blocks are pulled,
        see `Terms`.
        """
        prefill, decode = slots
        by_slot, ttft_s, block_s = self.speeds.by_slot, None, None
        if prefill in by_slot:
            ttft_s = by_slot[prefill].ttft.at(self.prefill_left[prefill] + tokens)
            if ttft_s is not None and pull_tokens:
                ttft_s += pull_tokens * self.speeds.pull_s_per_token
        if decode in by_slot:
            block_s = by_slot[decode].block.at(self.context.item(decode) + blocks)
        return (
            UNSET if ttft_s is None else round(ttft_s * 1e3, 3),
            UNSET if block_s is None else round(block_s * 1e3 / block_size, 3),
        )

    # -- facts about ranks -------------------------------------------------------------------------

    def limit_step(self, slot: int, tokens: int | None) -> None:
        """Set how many tokens the rank on a slot computes per step; None: unknown."""
        step = float(STEP_TOKENS if tokens is None else tokens)
        if step == self.step[slot]:  # the usual case: workers register again and again
            return
        self.step[slot] = step
        self.ahead[slot] = min(self.ahead[slot], step)
        self.packed = b""

    def limit_running_requests(self, slot: int, max_num_seqs: int | None, wait: int) -> None:
        """Set how many requests the rank on a slot runs at once.

        `wait`: blocks added to the context for each request that the next one must wait
        for.
        """
        max_num_seqs = MAX_NUM_SEQS if max_num_seqs is None else min(max_num_seqs, MAX_NUM_SEQS)
        if max_num_seqs == self.max_num_seqs[slot] and wait == self.wait[slot]:  # as above
            return
        self.context[slot] -= self.waits(slot)
        self.max_num_seqs[slot], self.wait[slot] = max_num_seqs, wait
        self.context[slot] += self.waits(slot)
        self.packed = b""

    def waits(self, slot: int) -> float:
        """Return the weight, in a slot's context, of what its next request waits for."""
        before = max(0, int(self.requests[slot]) + 1 - int(self.max_num_seqs[slot]))
        return before * float(self.wait[slot])

    def look(self, now: float) -> None:
        """Update what fades, and which ranks are worn, if a price reads that. O(slots)."""
        self.recent.look(self.churn, now)
        worn = self.speeds.worn() if self.follows_queues else {}
        if worn or self.has_worn:
            self.slowness[:] = 0.0
            for slot, times in worn.items():
                if now - self.queue_updated_at[slot] <= TRIED_AGAIN_S:
                    self.slowness[slot] = times - 1.0
            self.has_worn = bool(self.slowness.any())
            self.packed = b""

    def silent(self, now: float) -> int:
        """Count ranks that have something to compute and seem to hang; see `WorkDone.silent`."""
        return self.work.silent(now, self.prefill, self.ahead, self.recent.pace)

    # -- removal without computing, or all at once ------------------------------------------------

    def give_up(self, slot: int, left: int, begun: int = 0, prompts: int = 0) -> None:
        """Set P of a slot to `left`; the tokens removed were not computed.

        `left` may also be more than before. `begun` tokens were of the prompt whose turn it
        was; `prompts` went as a whole.
        """
        before = self.prefill_left[slot]
        self.prefill_left[slot] = left
        self.prefill_backlog += left - before
        self.prefilling -= prompts
        self.rows.give_up(slot, left, begun, prompts)
        self.packed = b""
        if not before and left:
            self.work.starts(slot)
        elif before and not left:
            self.work.stops(slot)

    def clear(self, slot: int) -> None:
        """Empty a slot whose rank has left, with everything booked there. O(1)."""
        self.give_up(slot, 0, prompts=int(self.computing[slot]))
        self.requests[slot] = 0
        self.decode[slot] = self.context[slot] = 0.0

    def forget_churn(self, slot: int) -> None:
        """Reset the churn of a slot, since a new rank has an empty cache. O(slots)."""
        self.churn[slot] = self.slowness[slot] = 0.0
        self.recent.churned = float(self.churn.sum())
        self.packed = b""

    def check(self) -> None:
        """Assert all invariants; O(slots)."""
        columns = self.prefill, self.decode, self.churn, self.context
        loads = b"".join(column.tobytes() for column in columns)
        loads += TOTALS.pack(self.prefilling, self.recent.turnover)
        if self.follows_queues:
            loads += self.queue_updated_at.tobytes() + self.ahead.tobytes()
            loads += self.requests.astype(np.float64).tobytes() + PACE.pack(self.recent.pace)
            loads += bytes(8 * padding(len(self.requests)))
            if self.has_worn:
                loads = with_worn(loads, self.slowness)
        assert self.pack() == loads, "a true copy"
        assert (self.ahead >= 0.0).all()
        assert (self.ahead <= self.prefill).all(), "no more can be done than there is to do"
        assert (self.queue_updated_at <= self.work.at).all()
        assert (self.churn >= 0.0).all()
        assert (self.slowness >= 0.0).all()
        assert self.has_worn or not self.slowness.any()
        assert self.prefilling == self.computing.sum()
        assert self.prefill.tolist() == [float(left) for left in self.prefill_left]
        assert self.prefill_backlog == sum(self.prefill_left)
        self.work.check(self.prefill_left)
        self.recent.check(self.churn)


class RecentActivity:
    """Recent prefill tokens, and the pace: how fast ranks compute, and how fast caches turn over.

    Prices are measured by it (`pricing/cost.py`). `ledger.py` adds every booking; about once a
    second old values decay, and the pace is read from a meter of its own (`drain_meter.py`). What
    each rank computed is in the churn.

    `prior_tokens_per_s` is the pace of one rank, until it is measured.
    """

    __slots__ = ("_meter", "asked", "churned", "computed", "looked_at", "pace")

    def __init__(self, work: WorkDone, *, prior_tokens_per_s: float) -> None:
        self.asked = 0.0
        """Tokens of recently booked prompts; decays with `CHURN_MEMORY_S`, like everything here."""
        self.computed = 0.0
        """The part of them that was not cached."""
        self.churned = 0.0
        """The sum of the churn of all slots: less than `computed` if ranks have left."""
        self.looked_at = 0.0
        """When the decay was last applied, in monotonic seconds."""
        self.pace = prior_tokens_per_s
        """Tokens per second of a rank that has any to compute; measured at every `look`."""
        # its own meter: reads by others must not influence decisions
        self._meter = DrainMeter(work, prior_tokens_per_s=prior_tokens_per_s)

    @property
    def turnover(self) -> float:
        """The churn of all slots divided by the recent share of prompts found in caches, in tokens.

        It puts a rank's churn in proportion: if little is found, little of what leaves a cache
        would have been asked for again; infinite if nothing is found.
        """
        found = self.asked - self.computed
        return self.churned / (found / self.asked) if found > 0.0 else math.inf

    def look(self, churn: Floats, now: float) -> None:
        """Apply the decay, and measure the pace. O(slots), a µs for a thousand."""
        left = math.exp((self.looked_at - now) / CHURN_MEMORY_S)
        churn *= left
        self.churned = float(churn.sum())
        self.asked *= left
        self.computed *= left
        self.looked_at = now
        self.pace = self._meter.tokens_per_s

    def check(self, churn: Floats) -> None:
        """Assert the invariants, including those with the column."""
        assert self.pace > 0.0
        assert self.turnover >= self.churned, "no more is found than is asked for"
        assert math.isclose(self.churned, churn.sum(), rel_tol=1e-9, abs_tol=1e-3)
