"""Times of steps: sums in closed form, and profiles between their points."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from select_service.simulator.core.latency import (
    AnalyticLatency,
    Latency,
    ProfileLatency,
    SlowedLatency,
)

PROFILE = ProfileLatency(
    {"prefill_isl": [1000, 2000, 4000], "prefill_ttft": [40, 90, 200]},
    {
        "x_kv_usage": [0.1, 0.5, 0.1, 0.5],
        "y_context_length": [1000, 1000, 3000, 3000],
        "z_itl": [5, 10, 8, 16],
        "max_kv_tokens": [100_000],
    },
)
MODELS: list[Latency] = [
    AnalyticLatency(),
    AnalyticLatency(kv_token_s=0.0),
    PROFILE,
    SlowedLatency(AnalyticLatency(), 0.3),
    SlowedLatency(PROFILE, 2.0),
]


@pytest.mark.parametrize("model", MODELS)
@given(
    sequences=st.integers(1, 200),
    context=st.integers(1, 2000),
    steps=st.integers(1, 300),
    share=st.floats(0.0, 1.0),
)
def test_steps_in_a_time_are_those_that_are_over(
    model: Latency, sequences: int, context: int, steps: int, share: float
) -> None:
    kv_tokens = sequences * context
    seconds = model.stretch_s(sequences, kv_tokens, steps) * share
    done = model.steps_in(sequences, kv_tokens, seconds)
    slack = 1e-9 * max(1.0, seconds)
    if done:
        assert model.stretch_s(sequences, kv_tokens, done) <= seconds + slack
    assert model.stretch_s(sequences, kv_tokens, done + 1) >= seconds - slack


@given(sequences=st.integers(1, 50), kv_tokens=st.integers(1, 10**5), steps=st.integers(1, 200))
def test_a_stretch_is_the_sum_of_its_steps(sequences: int, kv_tokens: int, steps: int) -> None:
    model = AnalyticLatency()
    one_by_one = sum(
        model.stretch_s(sequences, kv_tokens + sequences * step, 1) for step in range(steps)
    )
    assert model.stretch_s(sequences, kv_tokens, steps) == pytest.approx(one_by_one)


@given(
    speed=st.floats(0.01, 10.0),
    sequences=st.integers(1, 50),
    kv_tokens=st.integers(1, 10**5),
    steps=st.integers(1, 200),
)
def test_half_the_speed_is_twice_every_time(
    speed: float, sequences: int, kv_tokens: int, steps: int
) -> None:
    usual = AnalyticLatency()
    times = {name: getattr(usual, name) / speed for name in usual.__slots__}
    slow, twin = SlowedLatency(usual, speed), AnalyticLatency(**times)
    for stretch in ((sequences, kv_tokens, steps), (0, 0, 1)):
        assert slow.stretch_s(*stretch) == pytest.approx(twin.stretch_s(*stretch))
    assert slow.prefill_s(steps, kv_tokens) == pytest.approx(twin.prefill_s(steps, kv_tokens))


@pytest.mark.parametrize("speed", [0.0, -1.0, float("inf"), float("nan")])
def test_no_engine_stands_still(speed: float) -> None:
    with pytest.raises(ValueError, match="speed"):
        SlowedLatency(AnalyticLatency(), speed)


@given(chunks=st.lists(st.integers(1, 5000), min_size=1, max_size=6))
def test_a_prompt_costs_the_same_in_chunks(chunks: list[int]) -> None:
    for model in MODELS:
        past, total = 0, 0.0
        for chunk in chunks:
            total += model.prefill_s(chunk, past)
            past += chunk
        assert total == pytest.approx(model.prefill_s(past, 0))


def test_a_profile_says_what_was_measured_and_is_linear_between() -> None:
    assert PROFILE.prefill_s(2000, 0) == pytest.approx(0.090)
    assert PROFILE.prefill_s(3000, 0) == pytest.approx(0.145)
    assert PROFILE.prefill_s(8000, 0) == pytest.approx(0.2 + 4000 * 0.2 / 4000)
    assert PROFILE.step_s(10, 10_000) == pytest.approx(0.005)
    assert PROFILE.step_s(30, 30_000) == pytest.approx(0.0075)
    assert PROFILE.step_s(5, 10_000) == pytest.approx(0.0065), "between two context lengths"
    assert PROFILE.step_s(0, 0) == 0.0


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="kv_token_s"):
        AnalyticLatency(kv_token_s=-1.0)
    with pytest.raises(ValueError, match="takes time"):
        AnalyticLatency(base_s=0.0, sequence_s=0.0)
    with pytest.raises(ValueError, match="prefill_isl"):
        ProfileLatency({"prefill_isl": [1], "prefill_ttft": []}, {"max_kv_tokens": [1]})
    with pytest.raises(KeyError):
        ProfileLatency({"prefill_isl": [1]}, {})
