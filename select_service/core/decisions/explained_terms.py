"""Every term of every rank's cost, recomputed from a record.

The contract's formula, in the order of `scoring.py`, so the numbers match those of the decision to
the last bit. `explaining.py` and `explained_pair.py` present them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from select_service.core.books.loads import unpacked, worked_off
from select_service.core.pricing.projection import Overlap, cached_tokens

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from select_service.core.books.loads import Loads
    from select_service.core.columns import Floats, Groups
    from select_service.core.decisions.record import Record


class Terms:
    """Columns by seat, in blocks unless stated otherwise."""

    def __init__(self, record: Record) -> None:
        """Compute the terms; some 50 µs, plus a µs for every ten differing sets of taints."""
        seating, weights = record.seating, record.weights
        slots, size, isl = seating.slots, seating.block_size, float(record.isl_tokens)
        columns, matched, shared, trust = record.seen
        loads = unpacked(columns)
        rows = len(loads.prefill)
        self._record = record
        self.prefill: Floats = loads.prefill[slots]  # tokens
        self.decode: Floats = loads.decode[slots]
        self.churn: Floats = loads.churn[slots]  # tokens
        self.context: Floats = loads.context[slots] + record.blocks
        self._look_at_queues(loads)
        self.is_priced = record.odds is None or record.odds.refusal is None
        self.considered = _considered(record, rows)[slots]
        self.overlap = _overlap(record, matched, rows)
        self.shared = _column(shared, rows)[slots]
        self.trust: Floats | None = None if trust is None else np.frombuffer(trust)[slots]
        self.cached = cached_tokens(self.overlap, weights, size)  # tokens, weighted by trust
        if self.trust is not None:
            self.cached = np.floor(self.cached * self.trust)
        self.raw: Floats = np.zeros(len(slots))
        if weights.track_prefill_tokens:
            self.raw = (self.prefill - self.worked + np.maximum(isl, self.cached)) / size
        self.bare: Floats = self.decode + record.blocks - self.shared
        self.factors = _factors(record)
        nothing = np.zeros(len(slots))
        self.expected: Floats = nothing  # booked there, and cached by the time it is computed
        self.delay: Floats = nothing  # the delay its own prefill causes those behind it
        self.eviction: Floats = nothing  # the blocks it evicts from the cache
        if weights.is_kv_cost:
            self.credit, adjusted = self.adjusted(self.considered)
            whole = adjusted + self.bare
        else:
            whole = self._ours()
        self.cost: Floats = whole if self.factors is None else whole * self.factors

    def _look_at_queues(self, loads: Loads) -> None:
        record, slots = self._record, self._record.seating.slots
        self.unheard: Floats | None = None  # seconds since the queue was known; None: not used
        self.ahead: Floats = np.zeros(len(slots))  # tokens
        self.worked: Floats = self.ahead  # the part of them that counts as computed
        if loads.heard is not None and loads.ahead is not None:
            heard, self.ahead = loads.heard[slots], loads.ahead[slots]
            self.unheard = np.where(self.ahead > 0.0, record.at - heard, 0.0)
            self.worked = worked_off(heard, self.ahead, record.weights.pace, record.at)

    def adjusted(self, among: NDArray[np.bool_]) -> tuple[Floats, Floats]:
        """Return the credit of overlap, and the remaining prefill, scaled.

        Args:
            among: the decay of the credit is measured from their least load.
        """
        taken: Floats = np.minimum(self._credited(among), self.raw)
        return taken, self._record.weights.prefill_load_scale * (self.raw - taken)

    def _credited(self, among: NDArray[np.bool_]) -> Floats:
        weights, (device, host, disk) = self._record.weights, self.overlap
        credit: Floats | float = weights.overlap_score_credit
        if weights.track_prefill_tokens and weights.overlap_score_credit_decay > 0.0:
            credit = credit * self._decay(among)
        credited = (
            credit * device
            + weights.host_cache_hit_weight * host
            + weights.disk_cache_hit_weight * disk
        )
        if self.trust is not None:
            credited = credited * self.trust
        blocks: Floats = credited
        return blocks

    def _ours(self) -> Floats:
        """Fill the terms that only `first-token` has; returns the cost without preferences."""
        weights, size = self._record.weights, self._record.seating.block_size
        credited = self._credited(self.considered)
        if weights.expects_booked:
            self.expected = np.maximum(self.shared - sum(self.overlap), 0.0)
        tokens = np.maximum(self.cached, float(self._record.isl_tokens))
        own = tokens / size if weights.track_prefill_tokens else np.zeros_like(tokens)
        left = np.maximum(self.raw - credited - self.expected, 0.0)
        own = np.maximum(own - credited - self.expected, 0.0)
        self.credit = np.minimum(credited + self.expected, self.raw)
        self.delay = weights.delay_weight * own
        self.eviction = weights.eviction_weight * self.churn * own
        more = (weights.delay_weight + weights.eviction_weight * self.churn) * own
        whole: Floats = weights.prefill_load_scale * (left + more)
        whole += weights.decode_load_scale * self.bare
        whole += weights.context_load_scale * self.context
        return whole

    def _decay(self, among: NDArray[np.bool_]) -> Floats:
        record = self._record
        size = record.seating.block_size
        least = self.prefill[among].min(initial=np.inf)
        if least == np.inf:
            least = self.prefill.min(initial=0.0)
        excess = np.maximum(self.prefill - least, 0.0) / size
        blocks = -(-record.isl_tokens // size)
        decayed: Floats = 1.0 / (1.0 + record.weights.overlap_score_credit_decay * excess / blocks)
        return decayed


def _considered(record: Record, rows: int) -> NDArray[np.bool_]:
    """Return the candidates, by slot."""
    mask = np.zeros(rows, dtype=np.bool_)
    if record.rows is not None and not (record.odds is not None and record.odds.is_threshold):
        mask[record.rows] = True
    return mask


def _column(groups: Groups | None, rows: int) -> Floats:
    column = np.zeros(rows)
    for blocks, slots in groups or ():
        column[slots] = blocks
    return column


def _overlap(record: Record, found: Groups | Overlap | None, rows: int) -> Overlap:
    slots = record.seating.slots
    if isinstance(found, Overlap):
        return Overlap(*(column[slots] for column in found))
    nothing = np.zeros(len(slots))
    return Overlap(_column(found, rows)[slots], nothing, nothing)


def _factors(record: Record) -> Floats | None:
    """Return the factor of preferred taints on each cost; None: none are preferred."""
    odds = record.odds
    if odds is None or odds.pinned is not None or odds.constraints is None:
        return None
    preferred = odds.constraints.preferred_taints
    if not preferred:
        return None
    known: dict[frozenset[str], float] = {}
    for seat in record.seating.seats:
        if seat.taints not in known:
            weight = sum(w for taint, w in preferred.items() if taint in seat.taints)
            known[seat.taints] = math.exp(-math.tanh(weight))
    return np.array([known[seat.taints] for seat in record.seating.seats])
