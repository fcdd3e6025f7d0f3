"""Prices the candidates of one request and picks one: the plain form of `_pricer.pyx`.

Both choose the same to the last bit; `cost.py` has the formula and `pick.py` the choice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from select_service.core.ledger.loads import PackedLoads
from select_service.core.pricing.cost import Size, terms_of
from select_service.core.pricing.pick import pick

if TYPE_CHECKING:
    import random

    from select_service.core.columns import Floats, Groups, Slots
    from select_service.core.pricing.cost import MatchedRows, TierMatches
    from select_service.core.pricing.weights import Weights

_LANES = 8
"""Parallel partial sums that make up one sum."""


class Fill:
    """How full ranks are, computed from live columns.

    Args:
        prefill: booked tokens.
        decode: blocks.
        block_tokens: tokens that fill a rank as much as one of its blocks does.
        floor: minimum fullness of a rank; 1 is full.
    """

    __slots__ = ("_block_tokens", "_decode", "_floor", "_prefill")

    def __init__(
        self, prefill: Floats, decode: Floats, block_tokens: Floats, floor: Floats
    ) -> None:
        if not len(prefill) == len(decode) == len(block_tokens) == len(floor):
            raise ValueError("columns of one length")
        self._prefill = prefill
        self._decode = decode
        self._block_tokens = block_tokens
        self._floor = floor

    def total(self, room: float) -> float:
        """Return the sum over the rows of max(prefill, decode * block_tokens, floor * room)."""
        each = np.maximum(self._decode * self._block_tokens, self._prefill)
        np.maximum(each, self._floor * room, out=each)
        lanes = np.zeros(-(-len(each) // _LANES) * _LANES)
        lanes[: len(each)] = each
        # row after row, in the order of the kernel
        sums = np.add.reduce(lanes.reshape(-1, _LANES), axis=0)
        return float(np.add.accumulate(sums)[-1])


class Pricer:
    """Reads live columns of load, by slot."""

    __slots__ = ("_held", "_loads", "pull_tokens", "pulled")

    def __init__(
        self,
        prefill: Floats,
        decode: Floats,
        churn: Floats,
        context: Floats,
        queue_updated_at: Floats,
        ahead: Floats,
        requests: Slots,
        slowness: Floats,
    ) -> None:
        columns = prefill, decode, churn, context, queue_updated_at, ahead, requests, slowness
        if len({len(one) for one in columns}) > 1:
            raise ValueError("columns of one length")
        self._loads = PackedLoads(
            prefill,
            decode,
            churn,
            context,
            0.0,
            0.0,
            queue_updated_at,
            ahead,
            0.0,
            requests,
            slowness,
        )
        self._held: MatchedRows | None = None  # by slot, of the last call
        self.pulled = 0
        """Blocks that the last choice pulls from another rank; the kernel knows of none."""
        self.pull_tokens = 0
        """Tokens that could be computed while they are moved."""

    def choose(
        self,
        rows: int | Slots,
        isl_tokens: int,
        block_size: int,
        blocks: int,
        weights: Weights,
        found: TierMatches | None,
        shared: Groups | None,
        trust: Floats | None,
        preference: Floats | None,
        now: float,
        rng: random.Random,
    ) -> tuple[int, float, int, int, int]:
        """Return what the chosen candidate is, and what it costs.

        Args:
            rows: how many of the first slots, or which ones; at least one.
            isl_tokens: length of the prompt.
            block_size: tokens per block.
            blocks: of the prompt.
            weights: as they apply now.
            found: in the index; None: nothing.
            shared: blocks in active chains and the slots with that many, disjoint; None: none.
            trust: factor on each slot's credit; None: full trust.
            preference: factor on each candidate's cost; None: 1.0.
            now: monotonic seconds.
            rng: decides among equals, and at a temperature.

        Returns:
            Its slot; its cost, and its decode blocks with the prompt; the tokens that are cached
            or pulled there, and the most that are cached on any candidate, or here.
        """
        among = slice(0, rows) if isinstance(rows, int) else rows
        slots = len(self._loads.prefill)
        count = rows if isinstance(rows, int) else len(rows)
        is_short = trust is not None and len(trust) < slots
        if not 0 < count <= slots or is_short:
            raise ValueError("rows beyond the columns")
        if not isinstance(rows, int) and not 0 <= int(rows.min()) <= int(rows.max()) < slots:
            raise IndexError("rows beyond the columns")
        self._held = None if found is None else found.by_slot(slots)
        size = Size(isl_tokens, blocks, block_size)
        terms = terms_of(self._loads, among, size, weights, found, shared, trust, now)
        costs = terms.cost if preference is None else terms.cost * preference
        at = pick(costs, weights.temperature, rng)
        slot, cached = at if isinstance(rows, int) else int(rows[at]), terms.cached_tokens
        self.pulled = int(terms.pulled[at])
        self.pull_tokens = round(float(terms.pull_cost[at]) * block_size)
        here = int(cached[at]) + self.pulled * block_size
        return slot, float(costs[at]), int(terms.decode[at]), here, max(here, int(cached.max()))

    def held_at(self, slot: int) -> tuple[int, int, int]:
        """Return the blocks that a slot holds of the last prompt: device, host, disk."""
        if not 0 <= slot < len(self._loads.prefill):
            raise IndexError(slot)
        if self._held is None:
            return 0, 0, 0
        device, host, disk = self._held
        return int(device[slot]), int(host[slot]), int(disk[slot])
