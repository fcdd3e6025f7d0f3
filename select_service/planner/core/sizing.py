"""The engines a forecast needs, per role: from the prefill queue and the decode mix.

If no number of engines meets a target, this is reported, and the pool is sized to keep up with its
traffic instead: an absurd count would not meet it either.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from select_service.planner.core.decode_sizing import KEEP_UP, NEAR, decode_late, decode_need
from select_service.planner.core.prefill_sizing import PrefillQueue

if TYPE_CHECKING:
    from collections.abc import Callable

    from select_service.planner.core.demand import Forecast
    from select_service.planner.core.surface import Surface


@dataclass(frozen=True, slots=True, kw_only=True)
class Goals:
    """The targets promised to one model's users."""

    ttft_ms: float = 500.0
    itl_ms: float = 50.0
    attainment: float | None = None
    """Share of requests for which both hold; None: on average."""
    pooled: bool = True
    """Requests go to whichever engine has the least work, as the selector sends them."""


class Need(NamedTuple):
    """The need of one role."""

    engines: float
    terms: dict[str, float]
    infeasible: str = ""


def size_prefill(surface: Surface, forecast: Forecast, goals: Goals, slowness: float) -> Need:
    """Return the engines that compute the forecast's prompts in time."""
    lengths = forecast.lengths.scaled(forecast.computed)
    queue = PrefillQueue(surface.prefill, lengths, slowness, forecast.lumps_s)
    need = queue.need(
        forecast.rate,
        goals.ttft_ms / 1e3,
        goals.attainment,
        pooled=goals.pooled,
        spread=forecast.spread,
    )
    terms = {"service_s": need.service_s, "rho": need.rho, "rate": forecast.rate}
    engines = need.engines
    if math.isinf(engines):
        engines = forecast.rate * queue.mean_s / KEEP_UP
    return Need(engines, terms, need.why)


def size_decode(
    surface: Surface,
    forecast: Forecast,
    goals: Goals,
    slowness: float,
    *,
    gpus: int,
    reach: float = NEAR,
) -> Need:
    """Return the engines that generate the forecast's outputs fast enough."""
    need = decode_need(
        surface.decode,
        rate=forecast.rate,
        lengths=forecast.lengths,
        osl=forecast.osl,
        itl_ms=goals.itl_ms,
        gpus=gpus,
        attainment=goals.attainment,
        spread=forecast.spread,
        in_lumps=forecast.lumps_s > 0,
        slowness=slowness,
        reach=reach,
    )
    corrected = goals.itl_ms / slowness
    terms = {"corrected_itl": corrected, "rate": forecast.rate, "concurrency": need.concurrency}
    return Need(need.engines, terms, need.why)


def late_prefill(
    surface: Surface, forecast: Forecast, goals: Goals, slowness: float
) -> Callable[[float, int], float]:
    """Return a function from rate and engines to the share of late prompts."""
    lengths = forecast.lengths.scaled(forecast.computed)
    queue = PrefillQueue(surface.prefill, lengths, slowness, forecast.lumps_s)

    def late(rate: float, engines: int) -> float:
        if not engines:
            return 1.0
        return queue.late_on(rate, goals.ttft_ms / 1e3, engines, pooled=goals.pooled)

    return late


def late_decode(
    surface: Surface,
    forecast: Forecast,
    goals: Goals,
    slowness: float,
    *,
    gpus: int,
    reach: float = NEAR,
) -> Callable[[float, int], float]:
    """Return a function from rate and engines to the share of requests slower than the target."""
    return decode_late(
        surface.decode,
        lengths=forecast.lengths,
        osl=forecast.osl,
        itl_ms=goals.itl_ms / slowness,
        gpus=gpus,
        in_lumps=forecast.lumps_s > 0,
        reach=reach,
    )
