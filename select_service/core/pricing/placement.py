"""Where a prompt goes, and the facts that chose that: what `partition.place` returns.

Of who may take a pair, too: the plan, and the placement where one rank does better.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
from msgspec import Struct

from select_service.types import Overlap

if TYPE_CHECKING:
    from select_service.core.columns import Floats, Groups, Rows
    from select_service.core.fleet.catalog import Worker
    from select_service.core.fleet.roles import Legs
    from select_service.core.pricing.pairing import Plan
    from select_service.core.pricing.plain_pricer import Pricer
    from select_service.core.pricing.projection import Overlap as OverlapColumns
    from select_service.core.pricing.weights import Weights


Seen: TypeAlias = "tuple[bytes, Groups | OverlapColumns | None, Groups | None, bytes | None]"
"""What one prompt met in a partition, before anything was booked: loads (`books/loads.py`); device
blocks, or blocks of every tier, by slot; blocks in the active chains; how far each slot's index is
believed (None: altogether)."""


class Placement(Struct, frozen=True):
    """The chosen rank and the facts behind the choice."""

    worker: Worker
    dp_rank: int
    slot: int
    cost: float
    overlap: Overlap  # of the worker, in tokens
    device_blocks: float
    host_blocks: float  # extension
    disk_blocks: float  # extension
    effective_prefill_tokens: int
    forgone_tokens: int  # the part of them that another candidate has cached
    potential_decode_blocks: int
    weights: Weights
    seen: Seen | None = None  # inputs of the decision, if they are kept


class Match(NamedTuple):
    """What a request that may take a pair was given, and out of what."""

    legs: Legs
    plan: Plan
    placement: Placement | None  # on one rank, where that does better


def forgone_tokens(
    matched: Groups, rows: Rows, isl_tokens: int, block_size: int, left: int, trust: Floats | None
) -> int:
    """Return how many tokens less the best-matching candidate would have to compute.

    The chosen rank is nearly always that one, which takes a look at each group; otherwise O(ranks
    that hold more).

    Args:
        matched: (blocks, slots) on devices, disjoint.
        rows: the candidates.
        isl_tokens: length of the prompt.
        block_size: tokens per block.
        left: tokens that the chosen rank has to compute.
        trust: factor on the credit of each slot; None: 1.0.
    """
    least = left
    for blocks, slots in matched:
        cached = blocks * block_size
        if isl_tokens - cached >= least:
            continue
        here = slots[slots < rows.stop if isinstance(rows, slice) else np.isin(slots, rows)]
        if not len(here):
            continue
        if trust is not None:
            cached = int(cached * trust[here].max())
        least = min(least, max(0, isl_tokens - cached))
    return left - least


def device_overlap(
    worker: Worker, pricer: Pricer, block_size: int, chosen: int | None = None
) -> Overlap:
    """Return a worker's overlap on its devices, from the pricer's last call, in tokens.

    Args:
        worker: of the chosen rank.
        pricer: has the matched blocks.
        block_size: tokens per block.
        chosen: matched blocks of the chosen rank, if already known.
    """
    best, of_ranks = 0, {}
    for rank, slot in worker.slots.items():
        if chosen is not None and len(worker.slots) == 1:
            blocks = chosen
        else:
            blocks = pricer.matched_at(slot)
        tokens = of_ranks[str(rank)] = blocks * block_size
        if tokens > best:  # noqa: PLR1730 - max() is slow
            best = tokens
    return Overlap(best, best, of_ranks, best, best)


def worker_overlap(worker: Worker, columns: OverlapColumns | None, block_size: int) -> Overlap:
    """Return the matched tokens of a whole worker: cumulative per rank, best rank per tier."""
    if columns is None:
        return Overlap(0, 0, {str(rank): 0 for rank in worker.slots}, 0, 0)
    gpu = cpu = disk = 0
    per_rank: dict[str, int] = {}
    for rank, slot in worker.slots.items():
        device = int(columns.device[slot])
        host = device + int(columns.host[slot])
        last = host + int(columns.disk[slot])
        per_rank[str(rank)] = device * block_size
        gpu, cpu, disk = max(gpu, device), max(cpu, host), max(disk, last)
    return Overlap(
        disk * block_size, gpu * block_size, per_rank, cpu * block_size, disk * block_size
    )
