"""Read-only: the load every candidate would carry with this prompt.

It joins the ledger's columns with the index's matches; `scoring.py` prices the result and the
inspection routes print it. Nothing here changes state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from indexer.types import HASH_BYTES
from select_service.core.columns import no_floats

if TYPE_CHECKING:
    from indexer.core.index import KvIndex
    from indexer.core.tiers import Matches
    from select_service.core.books.ledger import Ledger
    from select_service.core.columns import Floats, Rows, Slots
    from select_service.core.pricing.prompt import Prompt
    from select_service.core.pricing.weights import Weights


class Overlap(NamedTuple):
    """Matched blocks per row: on the device, then the extensions on host and disk."""

    device: Floats
    host: Floats
    disk: Floats


class Projection(NamedTuple):
    """Columns over the candidates, in the candidates' order."""

    prefill: Floats  # active prefill tokens now
    decode: Floats  # active decode blocks including the prompt's new blocks
    overlap: Overlap | None  # of the candidates; None: nothing matched anywhere
    matched: Overlap | None  # of every slot
    cached_tokens: Floats  # tier-weighted tokens that need no prefill, scaled by trust
    has_lower_tiers: bool
    isl_tokens: int
    block_size: int
    cached_within_isl: bool = False  # nobody can have more cached than the prompt is long
    trust: Floats | None = None  # factor on `overlap`; None: full trust
    shared: list[tuple[int, Slots]] | None = None  # blocks in active chains, slots, disjoint
    booked: Floats | None = None  # the same for the candidates; None: nothing shared
    churn: Floats | float = 0.0  # recently computed tokens
    context: Floats | float = 0.0  # blocks attended to by all requests there, including the prompt
    worked: Floats | float = 0.0  # tokens of `prefill` that count as computed; `loads.worked_off`


def matched(index: KvIndex, matches: Matches) -> tuple[Overlap | None, bool]:
    """Return the overlap of every slot of the index, and whether lower tiers are involved."""
    if matches.empty:
        return None, False
    rows = index.capacity
    if not (matches.host or matches.disk):
        device, nothing = np.zeros(rows), no_floats(rows)
        matches.fill(device, nothing, nothing)
        return Overlap(device, nothing, nothing), False
    device, host, disk = np.zeros((3, rows))
    matches.fill(device, host, disk)
    return Overlap(device, host, disk), True


def cached_tokens(
    overlap: Overlap, weights: Weights, block_size: int, *, has_lower_tiers: bool = True
) -> Floats:
    """Return (device + host_weight·host + disk_weight·disk) · block_size, rounded half up."""
    if not has_lower_tiers:
        return overlap.device * block_size  # whole numbers already
    blocks = (
        overlap.device
        + weights.host_cache_hit_weight * overlap.host
        + weights.disk_cache_hit_weight * overlap.disk
    )
    return np.floor(blocks * block_size + 0.5)


def project(  # noqa: PLR0917 - what is known, and for whom
    ledger: Ledger,
    index: KvIndex,
    prompt: Prompt,
    rows: Rows,
    weights: Weights,
    matches: Matches | None = None,
    trust: Floats | None = None,
) -> Projection:
    """Project the prompt onto the given rows (slots); `matches` if already looked up.

    With `trust`, a factor by slot, only that part of the cached tokens is expected to be there; the
    overlap itself stays what the index says.
    """
    if matches is None:
        matches = index.find_matches(prompt.block_hashes)
    loads = ledger.loads
    decode = loads.decode[rows] + prompt.blocks
    shared = booked = None
    if ledger.blocks.begins(prompt.first_hash):
        shared = ledger.shared_groups(prompt.sequence_hashes)
        if shared is not None:
            booked = ledger.column_of(shared)[rows]
            decode -= booked
    overlap, has_lower = matched(index, matches)
    prefill = loads.prefill[rows]
    if overlap is None:
        cached, taken, trust = no_floats(len(prefill)), None, None
    else:
        taken = Overlap(overlap.device[rows], overlap.host[rows], overlap.disk[rows])
        cached = cached_tokens(taken, weights, index.block_size, has_lower_tiers=has_lower)
        if trust is not None:
            trust = trust[rows]
            cached = np.floor(cached * trust)
    size, isl_tokens = index.block_size, prompt.isl_tokens
    within = not has_lower and len(prompt.block_hashes) // HASH_BYTES * size <= isl_tokens
    return Projection(
        *(prefill, decode, taken, overlap, cached, has_lower, isl_tokens, size, within, trust),
        *(shared, booked, loads.churn[rows], loads.context[rows] + prompt.blocks),
    )
