"""Single calculations for the command line: `plan` and `predict`.

`compatible` answers what the reference would do, faults included; `slo` what we would.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import TYPE_CHECKING

from select_service.planner.core.budget import PoolNeed, share_out
from select_service.planner.core.compatible_lookup import CompatibleLookup
from select_service.planner.core.compatible_sizing import (
    CompatibleDemand,
    CompatibleLimits,
    plan_as_they,
    terms_of,
)
from select_service.planner.core.decode_sizing import size_decode
from select_service.planner.core.demand import Forecast
from select_service.planner.core.lengths import Lengths
from select_service.planner.core.prefill_sizing import size_prefill
from select_service.planner.core.sizing import Goals, Need
from select_service.planner.core.surface import surface_of
from select_service.planner.edge.predictors import make_predictor
from select_service.planner.edge.sources.trace import TOKENS_MAX
from select_service.planner.errors import SettingsError
from select_service.planner.types import ModelKey, PoolKey

if TYPE_CHECKING:
    from select_service.planner.core.profile import Profile
    from select_service.planner.edge.predictors import PredictorSettings
    from select_service.planner.settings import PlanSettings

_POOLS = (PoolKey(ModelKey("model"), "prefill"), PoolKey(ModelKey("model"), "decode"))


def plan_compatible(profile: Profile, question: PlanSettings) -> dict[str, object]:
    """Answer with the reference's formulas; an `error` is one that they raise themselves."""
    limits = CompatibleLimits(
        interval_s=question.adjustment_interval,
        itl_ms=question.itl,
        gpus_max=question.max_gpu_budget,
        endpoints_min=question.min_endpoint,
        prefill_gpus=question.prefill_engine_num_gpu,
        decode_gpus=question.decode_engine_num_gpu,
    )
    demand = CompatibleDemand(
        requests=question.num_req,
        isl=question.isl,
        osl=question.osl,
        p_correction=question.p_correction,
        d_correction=question.d_correction,
    )
    lookup = CompatibleLookup(profile)
    try:
        terms = terms_of(lookup, demand, limits)
    except (ValueError, ArithmeticError) as error:  # a length that is no number
        return {"error": type(error).__name__, "message": str(error), "intermediate": {}}
    intermediate = {"intermediate": _json_numbers(dataclasses.asdict(terms))}
    try:
        plan = plan_as_they(terms, limits)
    except (ValueError, ArithmeticError) as error:
        return {"error": type(error).__name__, "message": str(error), **intermediate}
    return {"num_p": plan.num_p, "num_d": plan.num_d, **intermediate}


def plan_slo(profile: Profile, question: PlanSettings) -> dict[str, object]:
    """Answer with our own sizing: TTFT and ITL targets, a hard ceiling, and infeasible targets.

    Raises:
        InfeasiblePlan: the minima cost more GPUs than there are.
        SettingsError: a number is invalid.
    """
    _check(question)
    surface = surface_of(profile)
    goals = Goals(
        ttft_ms=question.ttft,
        itl_ms=question.itl,
        attainment=question.attainment,
        pooled=question.pooled,
    )
    rate = question.num_req / question.adjustment_interval
    forecast = Forecast(rate, Lengths.single(question.isl), question.osl, 1.0)
    gpus = (question.prefill_engine_num_gpu, question.decode_engine_num_gpu)
    if question.num_req:
        # 0 means not measured, not infinitely fast
        slow_prefill, slow_decode = question.p_correction or 1.0, question.d_correction or 1.0
        needs = (
            size_prefill(surface, forecast, goals, slow_prefill),
            size_decode(surface, forecast, goals, slow_decode, gpus=gpus[1]),
        )
    else:
        needs = (Need(0.0, {}), Need(0.0, {}))
    pools = [
        PoolNeed(
            pool,
            cost,
            question.min_endpoint,
            max(question.min_endpoint, math.ceil(need.engines - 1e-9)),
            need.engines,
        )
        for pool, cost, need in zip(_POOLS, gpus, needs, strict=True)
    ]
    counts = share_out(pools, question.max_gpu_budget)
    return {
        "num_p": counts[_POOLS[0]],
        "num_d": counts[_POOLS[1]],
        "intermediate": {
            f"{pool.role}_{name}": value
            for pool, need in zip(_POOLS, needs, strict=True)
            for name, value in _json_numbers({"engines": need.engines, **need.terms}).items()
        },
        "gpus": sum(one.gpus * counts[one.pool] for one in pools),
        "short_of_gpus": [str(one.pool.role) for one in pools if counts[one.pool] < one.wanted],
        "infeasible": [need.infeasible for need in needs if need.infeasible],
    }


def _check(question: PlanSettings) -> None:
    lengths, goals = ("isl", "osl"), ("ttft", "itl")
    for name in ("num_req", *lengths, "p_correction", "d_correction", *goals):
        value, flag = getattr(question, name), "--" + name.replace("_", "-")
        if not math.isfinite(value):
            raise SettingsError(f"{flag} is not a finite number")
        if value < 0:
            raise SettingsError(f"{flag} is below 0")
        if question.num_req and not value and name in (*lengths, *goals):
            raise SettingsError(f"{flag} is 0")
        if value > TOKENS_MAX and name in lengths:
            raise SettingsError(f"{flag} is above {TOKENS_MAX:,}")


def predict(settings: PredictorSettings, series: list[float]) -> dict[str, object]:
    """Return the forecast after each value; NaN: of an interval in which nothing was measured.

    For the reference such an interval has no load; for us it is time that passes.
    """
    predictor = make_predictor(settings)
    forecasts = []
    for value in series:
        if math.isnan(value) and not settings.compatible:
            predictor.skip(1)
        else:
            predictor.add(value)
        forecasts.append(predictor.predict())
    return {"pred_after_each": forecasts}


def read_series(text: str) -> list[float]:
    """Read a JSON list of numbers; null and NaN are intervals without a number.

    Raises:
        SettingsError: it is none.
    """
    try:
        raw = json.JSONDecoder().decode(text.strip())  # the strict one knows no NaN
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"standard input is no JSON: {error}") from error
    if not isinstance(raw, list):
        raise SettingsError("standard input is no JSON list")
    for index, one in enumerate(raw):
        if one is not None and (isinstance(one, bool) or not isinstance(one, int | float)):
            raise SettingsError(f"standard input: [{index}] is no number")
    try:
        return [math.nan if one is None else float(one) for one in raw]
    except OverflowError as error:
        raise SettingsError(f"standard input: {error}") from error


def _json_numbers(terms: dict[str, float]) -> dict[str, float | str]:
    """Express infinities and NaN as text, for JSON."""
    return {name: one if math.isfinite(one) else str(one) for name, one in terms.items()}
