"""How many decode engines keep the ITL target: what the mix of context lengths takes of an engine.

Every class of requests takes the share of an engine that its output tokens are of the throughput at
its own context length; shares add up. The mean of lengths would promise too much: throughput falls
faster than context grows. Where a share of requests must be in time, the live requests are let
swing by their Poisson deviation.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from select_service.planner.core.lengths import Lengths
    from select_service.planner.core.surface import DecodeSurface

__all__ = ["DecodeNeed", "decode_need"]


class DecodeNeed(NamedTuple):
    """Engines, as a fraction."""

    engines: float
    concurrency: float  # live requests at the target, of all engines
    why: str = ""  # the target cannot be met, in words


def decode_need(  # noqa: PLR0913 - one formula
    surface: DecodeSurface,
    *,
    rate: float,
    lengths: Lengths,
    osl: float,
    itl_ms: float,
    gpus: int,
    deviations: float = 0.0,
) -> DecodeNeed:
    """Return the engines for `rate` requests per second.

    Args:
        surface: of one engine.
        rate: requests per second.
        lengths: of prompts, all tokens: cached ones take room, too.
        osl: mean output tokens.
        itl_ms: what the profile may show at most, corrections applied.
        gpus: of one engine.
        deviations: how far above their mean live requests are planned for.
    """
    engines = concurrency = variance = 0.0
    for isl, share in lengths.points:
        context = isl + osl / 2
        best = surface.best(itl_ms, context)
        if best is None:
            why = (
                f"an engine with a single request of {context:.0f} tokens is slower than the ITL "
                f"target ({itl_ms:.1f} ms as profiled)"
            )
            return DecodeNeed(math.inf, math.inf, why)
        live = rate * share * osl * best.itl_ms / 1e3
        concurrency += live
        engines += rate * share * osl / (best.thpt_per_gpu * gpus)
        variance += live * (1 / best.concurrency) ** 2
    return DecodeNeed(engines + deviations * math.sqrt(variance), concurrency)
