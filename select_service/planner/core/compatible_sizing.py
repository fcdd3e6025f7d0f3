"""Replica counts as the reference computes them, for comparison: from means, rounded up once.

Its faults are kept on purpose: the TTFT target is not used, a high prefill correction is cut off at
1, and both the minima and the rounding may exceed the budget. `sizing.py` has our own sizing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from select_service.planner.core.compatible_lookup import CompatibleLookup


@dataclass(frozen=True, slots=True, kw_only=True)
class CompatibleDemand:
    """The expected traffic of the next interval."""

    requests: float
    isl: float
    osl: float
    p_correction: float = 1.0
    d_correction: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CompatibleLimits:
    """Targets and bounds."""

    interval_s: float
    itl_ms: float
    gpus_max: int
    endpoints_min: int
    prefill_gpus: int
    decode_gpus: int


@dataclass(frozen=True, slots=True)
class Intermediate:
    """The terms behind the counts, under the reference's names."""

    pred_prefill_thpt: float
    prefill_thpt_per_gpu: float
    corrected_itl: float
    decode_thpt_per_gpu: float
    pred_decode_thpt: float


@dataclass(frozen=True, slots=True)
class CompatiblePlan:
    """Replicas of prefill and decode."""

    num_p: int
    num_d: int


def terms_of(
    lookup: CompatibleLookup, demand: CompatibleDemand, limits: CompatibleLimits
) -> Intermediate:
    """Return needed and available throughput."""
    corrected = limits.itl_ms / demand.d_correction if demand.d_correction > 0 else limits.itl_ms
    best = lookup.decode.best(corrected, demand.isl + demand.osl / 2)
    return Intermediate(
        pred_prefill_thpt=demand.requests
        * demand.isl
        / limits.interval_s
        * min(1, demand.p_correction),
        prefill_thpt_per_gpu=lookup.prefill.thpt_per_gpu(demand.isl),
        corrected_itl=corrected,
        decode_thpt_per_gpu=best.thpt_per_gpu,
        pred_decode_thpt=demand.requests * demand.osl / limits.interval_s,
    )


def plan_as_they(terms: Intermediate, limits: CompatibleLimits) -> CompatiblePlan:
    """Return the counts.

    Raises:
        ValueError: a term is no number.
    """
    num_p = math.ceil(terms.pred_prefill_thpt / terms.prefill_thpt_per_gpu / limits.prefill_gpus)
    num_d = math.ceil(terms.pred_decode_thpt / terms.decode_thpt_per_gpu / limits.decode_gpus)
    least = limits.endpoints_min
    num_p, num_d = max(num_p, least), max(num_d, least)
    total = num_p * limits.prefill_gpus + num_d * limits.decode_gpus
    if total > limits.gpus_max:
        num_p = max(least, round(num_p * (limits.gpus_max / total)))
        left = limits.gpus_max - num_p * limits.prefill_gpus
        num_d = max(least, round(left / limits.decode_gpus))
    return CompatiblePlan(num_p, num_d)
