"""Look-ups and replica counts, exactly as recorded from the reference."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from select_service.planner.core.compatible_lookup import CompatibleLookup
from select_service.planner.core.compatible_sizing import (
    CompatibleDemand,
    CompatibleLimits,
    plan_as_they,
    terms_of,
)
from select_service.planner.edge.profile_files import read_profile
from select_service.planner.errors import ProfileError
from tests.select_service.planner.golden import GOLDEN, golden

pytest.importorskip("scipy", reason="the extra `planner`")

INTERPOLATORS = golden("interpolators_golden")
CASES = golden("replicas_golden")["cases"]


@cache
def lookup(name: str) -> CompatibleLookup:
    return CompatibleLookup(read_profile(GOLDEN / name))


@pytest.mark.parametrize("name", ["profile_a", "profile_a_json"])
def test_lookups_are_the_reference_s(name: str) -> None:
    found, expected = lookup(name), INTERPOLATORS[name]
    for one in expected["prefill"]:
        assert found.prefill.ttft_ms(one["isl"]) == pytest.approx(one["ttft_ms"], rel=1e-12)
        assert found.prefill.thpt_per_gpu(one["isl"]) == pytest.approx(one["thpt_per_gpu"])
    for one in expected["decode"]:
        where = (one["concurrency"], one["context_length"])
        assert list(found.decode.cell(*where)) == one["ix_iy"]
        speeds = (one["itl_ms"], one["thpt_per_gpu"])
        assert found.decode.at(*where) == pytest.approx(speeds, rel=1e-9)
    for one in expected["best"]:
        best = found.decode.best(one["itl_target_ms"], one["context_length"])
        expected_best = (one["thpt_per_gpu"], one["itl_ms"], one["kv_usage"])
        assert best == pytest.approx(expected_best, rel=1e-9)


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_replica_counts_are_the_reference_s(case: dict[str, Any]) -> None:
    args = case["args"]
    limits = CompatibleLimits(
        interval_s=args["adjustment_interval"],
        itl_ms=args["itl"],
        gpus_max=args["max_gpu_budget"],
        endpoints_min=args["min_endpoint"],
        prefill_gpus=args["prefill_engine_num_gpu"],
        decode_gpus=args["decode_engine_num_gpu"],
    )
    demand = CompatibleDemand(
        requests=case["next_num_req"],
        isl=case["next_isl"],
        osl=case["next_osl"],
        p_correction=case["p_correction"],
        d_correction=case["d_correction"],
    )
    terms = terms_of(lookup(case["profile"]), demand, limits)
    for name, value in case["intermediate"].items():
        assert getattr(terms, name) == pytest.approx(float(value), rel=1e-12, nan_ok=True)
    if "error" in case:
        with pytest.raises(ValueError, match=case["message"]):
            plan_as_they(terms, limits)
        return
    plan = plan_as_they(terms, limits)
    assert (plan.num_p, plan.num_d) == (case["num_p"], case["num_d"])


def test_samples_on_one_line_are_no_surface() -> None:
    """A profile of one context length: scipy's own error came out as a traceback."""
    profile = read_profile(GOLDEN / "profile_a")
    line = replace(profile.decode, context_length=np.full(len(profile.decode.kv_usage), 3000.0))
    with pytest.raises(ProfileError, match="on one line"):
        CompatibleLookup(replace(profile, decode=line))
