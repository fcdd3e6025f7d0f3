"""A replay without a profile, whose engines are small and report no `total_kv_blocks`."""

from __future__ import annotations

import dataclasses

import numpy as np

from select_service.planner.edge.baselines import Contest
from select_service.planner.edge.predictors import PredictorSettings
from select_service.planner.edge.profile_files import read_profile
from tests.select_service.planner.edge.test_replay import SETTINGS, traffic
from tests.select_service.planner.golden import PROFILE

KV_TOKENS = 30_000.0


def test_a_fleet_that_was_made_too_small_grows_and_stays_so() -> None:
    """Its engines are full within the target: they bear four times what was measured, it seemed.

    So it had three where four are needed, again and again.
    """
    profile = read_profile(PROFILE)
    decode = profile.decode
    used = np.minimum(1.0, decode.kv_usage * decode.max_kv_tokens / KV_TOKENS)
    small = dataclasses.replace(
        profile, decode=dataclasses.replace(decode, kv_usage=used, max_kv_tokens=KV_TOKENS)
    )
    settings = dataclasses.replace(SETTINGS, start=(3, 5), engine_speed="learnt")
    contest = Contest(small, traffic(lambda _: 24.0, 960.0), settings, 64)
    result = contest.result("slo", contest.policy("slo", PredictorSettings(interval_s=60.0)))
    counts = [round(count) for now, count in result.replicas["decode"] if now < 960.0]
    fewest = counts.index(min(counts))
    assert counts[fewest] < 4, "it has not met the loads that it plans for"
    grown = next(at for at in range(fewest, len(counts)) if counts[at] >= 4)
    assert grown - fewest <= 24, "two minutes"
    assert min(counts[grown:]) >= 4
    assert result.attainment > 0.85
