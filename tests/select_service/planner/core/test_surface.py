"""Repaired curves: monotone whatever was measured."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from select_service.planner.core.profile import decode_of
from select_service.planner.core.surface import DecodeSurface, MonotoneCurve, isotonic, surface_of
from select_service.planner.edge.profile_files import read_profile
from tests.select_service.planner.golden import PROFILE

SURFACE = surface_of(read_profile(PROFILE))
VALUES = arrays(np.float64, st.integers(2, 12), elements=st.floats(0.1, 100.0))


@given(VALUES)
def test_pooled_values_never_fall_and_keep_their_sum(values: np.ndarray) -> None:
    repaired = isotonic(values)
    assert np.all(np.diff(repaired) >= 0)
    assert repaired.sum() == pytest.approx(values.sum())
    ascending = np.sort(values)
    assert isotonic(ascending).tolist() == ascending.tolist()


@given(VALUES)
def test_a_curve_through_rising_points_never_falls(values: np.ndarray) -> None:
    x = np.arange(len(values), dtype=np.float64)
    curve = MonotoneCurve(x, isotonic(values))
    values_at = [curve.at(at) for at in np.linspace(-1.0, len(values), 101).tolist()]
    assert all(two >= one - 1e-9 for one, two in pairwise(values_at))


def test_a_looser_target_never_gives_less() -> None:
    """The reference finds 1611 tokens/s within 30 ms, and 1736 within 25."""
    for context in (300.0, 3075.0, 9000.0, 50_000.0):
        found = [SURFACE.decode.best(target, context) for target in np.linspace(1, 60, 200)]
        given_ = [0.0 if one is None else one.thpt_per_gpu for one in found]
        assert given_ == sorted(given_)
        assert given_[0] == 0.0
        assert given_[-1] > 0.0


def test_more_requests_are_never_faster_and_longer_prompts_neither() -> None:
    itl = [SURFACE.decode.itl_ms(live, 3075.0) for live in np.linspace(0, 300, 100)]
    assert itl == sorted(itl)
    ttft = [SURFACE.prefill.ttft_ms(isl) for isl in np.linspace(0, 100_000, 200)]
    assert ttft == sorted(ttft)
    assert ttft[-1] > 3 * SURFACE.prefill.ttft_ms(16_384)  # beyond the profile it grows on


def test_what_was_measured_is_found_again() -> None:
    profile = read_profile(PROFILE).decode
    for kv, context, itl in zip(
        *(profile.kv_usage, profile.context_length, profile.itl_ms), strict=True
    ):
        live = kv * profile.max_kv_tokens / context
        assert SURFACE.decode.itl_ms(live, context) == pytest.approx(itl, rel=0.02)


def test_a_scatter_without_rows_is_a_surface_too() -> None:
    rng = np.random.default_rng(3)
    kv, context = rng.uniform(0, 1, 60), rng.uniform(500, 16_000, 60)
    scatter = {
        "x_kv_usage": kv,
        "y_context_length": context,
        "z_itl": 6 + 25 * kv + rng.normal(0, 0.5, 60),
        "z_thpt_per_gpu": 1 + 1e6 * kv / context,
        "max_kv_tokens": 200_000,
    }
    surface = DecodeSurface(decode_of(scatter, "test"))
    for target in (10.0, 20.0, 30.0):
        assert surface.best(target, 4000.0) is not None
    itl = [surface.itl_ms(live, 4000.0) for live in (1, 10, 20, 40)]
    assert itl == sorted(itl)
