"""The cost formula (contract 3.2), over all candidates at once.

Pure arithmetic on columns: what the numbers mean is decided in `projection.py`, which candidate
wins in `picking.py`. Lower is better; the unit is blocks.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from select_service.core.columns import Floats
    from select_service.core.projection import Projection
    from select_service.types import RouterConfig, RouterConfigOverride


_WEIGHT_MAX: Final = 1e100
"""No larger weight means anything more, and products of two with 64-bit counts stay numbers: an
infinite cost would make different ranks equal."""


class Weights(NamedTuple):
    """The numbers of the formula in force for one request."""

    overlap_score_credit: float
    overlap_score_credit_decay: float
    prefill_load_scale: float
    host_cache_hit_weight: float
    disk_cache_hit_weight: float
    temperature: float
    track_prefill_tokens: bool


def weights_in_force(config: RouterConfig, override: RouterConfigOverride | None) -> Weights:
    """Merge the process settings with a request's override (contract 2)."""
    credit, scale = config.overlap_score_credit, config.prefill_load_scale
    temperature, track = config.temperature, config.track_prefill_tokens
    if override is not None:
        if override.overlap_score_credit is not None:
            credit = override.overlap_score_credit
        if override.prefill_load_scale is not None:
            scale = override.prefill_load_scale
        if override.overlap_score_weight is not None:  # the old name wins, as in the reference
            scale = override.overlap_score_weight
            credit = 0.0 if scale == 0.0 else credit
        if override.router_temperature is not None:
            temperature = override.router_temperature
        if override.track_prefill_tokens is not None:
            track = override.track_prefill_tokens
    return Weights(
        _bounded(credit),
        _bounded(config.overlap_score_credit_decay),
        _bounded(scale),
        _bounded(config.host_cache_hit_weight),
        _bounded(config.disk_cache_hit_weight),
        temperature,
        track,
    )


def _bounded(weight: float) -> float:
    return max(-_WEIGHT_MAX, min(_WEIGHT_MAX, weight))


def costs(projection: Projection, weights: Weights) -> Floats:
    """Return the cost of each candidate, in blocks.

    raw      = track ? (P + max(isl - cached, 0) + cached) / block_size : 0
    decay    = 1 / (1 + credit_decay · (P - min P)/block_size / ceil(isl/block_size))
    adjusted = max(0, raw - trust·(credit·decay·device + host_weight·host + disk_weight·disk))
    cost     = prefill_load_scale · adjusted + decode blocks with this prompt
    """
    prefill, block_size = projection.prefill, projection.block_size
    isl = float(projection.isl_tokens)
    track = weights.track_prefill_tokens
    if projection.overlap is None:
        if not track:
            return projection.decode
        raw: Floats = (prefill + isl) / block_size
        scale = weights.prefill_load_scale
        return raw + projection.decode if scale == 1.0 else scale * raw + projection.decode
    device, host, disk = projection.overlap
    cached = projection.cached_tokens
    if track and projection.cached_within_isl:
        raw = (prefill + isl) / block_size  # what is cached cancels out, exactly
    elif track:
        raw = (prefill + np.maximum(isl - cached, 0.0) + cached) / block_size
    else:
        raw = np.zeros_like(prefill)
    credit: Floats | float = weights.overlap_score_credit
    if track and weights.overlap_score_credit_decay > 0.0:
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
    adjusted = np.maximum(raw - credited, 0.0)
    if weights.prefill_load_scale != 1.0:
        adjusted *= weights.prefill_load_scale
    adjusted += projection.decode
    return adjusted


def prefer(
    costs: Floats, preferred: Mapping[str, float], taints: Sequence[frozenset[str]]
) -> Floats:
    """Make candidates with preferred taints cheaper: cost · exp(-tanh(Σ weights present))."""
    factors = [
        math.exp(-math.tanh(sum(weight for taint, weight in preferred.items() if taint in have)))
        for have in taints
    ]
    priced: Floats = costs * np.array(factors)
    return priced
