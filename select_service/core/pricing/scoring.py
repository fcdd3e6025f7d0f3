"""The cost formula over all candidates at once: the contract's (3.2), and our own policy's.

Pure arithmetic on columns: what the numbers mean is decided in `projection.py`, by which they are
weighed in `weights.py`, which candidate wins in `picking.py`. Lower is better; the unit is blocks.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from msgspec import UNSET

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from select_service.core.columns import Floats
    from select_service.core.pricing.projection import Overlap, Projection
    from select_service.core.pricing.weights import Weights
    from select_service.types import SelectRequest


def costs(projection: Projection, weights: Weights) -> Floats:
    """Return the cost of each candidate, in blocks.

    raw      = track ? (P + max(isl - cached, 0) + cached) / block_size : 0
    decay    = 1 / (1 + credit_decay · (P - min P)/block_size / ceil(isl/block_size))
    adjusted = max(0, raw - trust·(credit·decay·device + host_weight·host + disk_weight·disk))
    cost     = prefill_load_scale · adjusted + decode blocks with this prompt

    `first-token` counts blocks booked by live requests as cached, takes what may already be
    computed (`loads.worked_off`) off the queue P, and adds three terms:

    own      = track ? max(0, max(isl, cached)/block_size - credited) : 0
    cost     = prefill_load_scale · (adjusted + (delay_weight + eviction_weight · churn) · own)
               + decode_load_scale · decode blocks with this prompt
               + context_load_scale · context with this prompt
    """
    if not weights.is_kv_cost:
        return _costs_of_ours(projection, weights)
    prefill, block_size = projection.prefill, projection.block_size
    isl = float(projection.isl_tokens)
    track = weights.track_prefill_tokens
    if projection.overlap is None:
        if not track:
            return projection.decode
        raw: Floats = (prefill + isl) / block_size
        scale = weights.prefill_load_scale
        return raw + projection.decode if scale == 1.0 else scale * raw + projection.decode
    cached = projection.cached_tokens
    if track and projection.cached_within_isl:
        raw = (prefill + isl) / block_size  # cached tokens cancel out, exactly
    elif track:
        raw = (prefill + np.maximum(isl - cached, 0.0) + cached) / block_size
    else:
        raw = np.zeros_like(prefill)
    adjusted = np.maximum(raw - _credited(projection, projection.overlap, weights), 0.0)
    if weights.prefill_load_scale != 1.0:
        adjusted *= weights.prefill_load_scale
    adjusted += projection.decode
    return adjusted


def _credited(projection: Projection, overlap: Overlap, weights: Weights) -> Floats:
    """Return the blocks that overlap takes off."""
    device, host, disk = overlap
    credit: Floats | float = weights.overlap_score_credit
    if weights.track_prefill_tokens and weights.overlap_score_credit_decay > 0.0:
        block_size, prefill = projection.block_size, projection.prefill
        excess = (prefill - prefill.min()) / block_size
        blocks = -(-projection.isl_tokens // block_size)
        credit = credit * (1.0 / (1.0 + weights.overlap_score_credit_decay * excess / blocks))
    credited = credit * device
    if projection.has_lower_tiers:
        credited = (
            credited + weights.host_cache_hit_weight * host + weights.disk_cache_hit_weight * disk
        )
    if projection.trust is not None:
        credited = credited * projection.trust
    taken: Floats = credited
    return taken


def _costs_of_ours(projection: Projection, weights: Weights) -> Floats:
    """Return the costs of `first-token`, computed in the order of the kernel."""
    prefill, block_size = projection.prefill, projection.block_size
    track = weights.track_prefill_tokens
    tokens = np.maximum(projection.cached_tokens, float(projection.isl_tokens))
    raw = (prefill - projection.worked + tokens) / block_size if track else np.zeros_like(prefill)
    own = tokens / block_size if track else raw
    held: Floats | float = 0.0
    if projection.overlap is not None:
        device, host, disk = projection.overlap
        held = device + host + disk if projection.has_lower_tiers else device
        credited = _credited(projection, projection.overlap, weights)
        raw, own = raw - credited, own - credited
    if weights.expects_booked and projection.booked is not None:
        expected = np.maximum(projection.booked - held, 0.0)
        raw, own = raw - expected, own - expected
    raw, own = np.maximum(raw, 0.0), np.maximum(own, 0.0)
    more = (weights.delay_weight + weights.eviction_weight * projection.churn) * own
    priced: Floats = weights.prefill_load_scale * (raw + more)
    priced += weights.decode_load_scale * projection.decode
    priced += weights.context_load_scale * projection.context
    return priced


def is_plain(request: SelectRequest, weights: Weights) -> bool:
    """Tell whether nothing but the formula decides, without its rarer terms."""
    constraints = request.routing_constraints
    return (
        weights.temperature == 0.0
        and weights.overlap_score_credit_decay <= 0.0
        and (constraints is UNSET or not constraints.preferred_taints)
    )


def prefer(
    costs: Floats, preferred: Mapping[str, float], taints: Sequence[frozenset[str]]
) -> Floats:
    """Make candidates with preferred taints cheaper."""
    priced: Floats = costs * preferences(preferred, taints)
    return priced


def preferences(preferred: Mapping[str, float], taints: Sequence[frozenset[str]]) -> Floats:
    """Return the factor on each candidate's cost: exp(-tanh(Σ weights present)).

    Computed once per set of taints: there are few sets, and many ranks.
    """
    factor_of = {
        have: math.exp(
            -math.tanh(sum(weight for taint, weight in preferred.items() if taint in have))
        )
        for have in set(taints)
    }
    return np.array([factor_of[have] for have in taints])
