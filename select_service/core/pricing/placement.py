"""Where a prompt goes, and the facts that chose that: what `place.choose` returns.

Of a pair, too: the plan, and the placement where one rank does better.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from msgspec import Struct

from select_service.types import Overlap

if TYPE_CHECKING:
    from collections.abc import Callable

    from select_service.core.columns import Groups
    from select_service.core.fleet.catalog import Worker
    from select_service.core.fleet.roles import Legs
    from select_service.core.pricing.cost import TierMatches
    from select_service.core.pricing.pair import PairPlan
    from select_service.core.pricing.weights import Weights
    from select_service.types import KvSource


Seen: TypeAlias = "tuple[bytes, TierMatches | None, Groups | None, bytes | None]"
"""What one prompt met in a partition, before anything was booked: loads (`ledger/loads.py`);
what the index had; blocks in the active chains; how far each slot's index is believed (None:
altogether)."""


class Placement(Struct, frozen=True):
    """The chosen rank and the facts behind the choice."""

    worker: Worker
    dp_rank: int
    slot: int
    cost: float
    overlap: Overlap  # of the worker, in tokens
    held: tuple[int, int, int]  # matched blocks: device, and the extensions on host and disk
    effective_prefill_tokens: int
    forgone_tokens: int  # the part of them that another candidate has cached
    potential_decode_blocks: int
    weights: Weights
    seen: Seen | None = None  # inputs of the decision, if they are kept
    kv_source: KvSource | None = None  # where it pulls blocks from; None: nowhere
    pull_tokens: int = 0  # that could be computed while those are moved


class PairMatch(NamedTuple):
    """What a request that may take a pair was given, and out of what."""

    legs: Legs
    plan: PairPlan
    placement: Placement | None  # on one rank, where that does better


def worker_overlap(
    worker: Worker, held_at: Callable[[int], tuple[int, int, int]], block_size: int
) -> Overlap:
    """Return the matched tokens of a whole worker: cumulative per rank, best rank per tier.

    `held_at` gives the blocks of a slot: device, host, disk.
    """
    gpu = cpu = last = 0
    per_rank: dict[str, int] = {}
    for rank, slot in worker.slots.items():
        device, host, disk = held_at(slot)
        per_rank[str(rank)] = device * block_size
        gpu, cpu, last = max(gpu, device), max(cpu, device + host), max(last, device + host + disk)
    return Overlap(
        last * block_size, gpu * block_size, per_rank, cpu * block_size, last * block_size
    )
