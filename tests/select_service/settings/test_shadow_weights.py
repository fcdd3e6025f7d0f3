"""Weights that look on, as they are said: in short, as JSON, out of a file, or in a request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from select_service.core.pricing.weights import weights_in_force
from select_service.settings import ConfigError, Settings
from select_service.settings.layers import plain, read_values
from select_service.types import RouterConfig, RouterConfigOverride
from select_service.types.shadow import ShadowSettings, ShadowWeights, read_shadow_weights


def read(said: object) -> Any:
    return read_values({"shadow-weights": said})["shadow_weights"]


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("", {}),
        ("{}", {}),
        ({}, {}),
        ("temperature=0.5", {"temperature": 0.5}),
        (" temperature=1 , track_prefill_tokens=False,", {"temperature": 1.0}),
        ('{"overlap_score_credit": 0, "temperature": 1}', {"overlap_score_credit": 0.0}),
        ({"prefill_load_scale": 2}, {"prefill_load_scale": 2.0}),
        ("router_temperature=0.5", {"temperature": 0.5}),
        ("policy=first-token,delay_scale=2", {"policy": "first-token", "delay_scale": 2.0}),
        ({"policy": "kv-cost"}, {"policy": "kv-cost"}),
        ("overlap_score_weight=2", {"prefill_load_scale": 2.0}),
        ("overlap_score_weight=0", {"prefill_load_scale": 0.0, "overlap_score_credit": 0.0}),
    ],
)
def test_every_way_to_say_it(said: object, meant: dict[str, Any]) -> None:
    weights = read(said)
    assert meant.items() <= weights.items()
    assert read(plain(weights)) == weights, "as GET /config shows it"
    assert all(
        type(one) in ({str} if name == "policy" else {float, bool}) for name, one in weights.items()
    )


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("temperature", "not name=value"),
        ("warmth=1", "'warmth' is no weight; there are policy, overlap_score_credit, "),
        ("temperature=x", "temperature must be a number at least 0"),
        ("temperature=inf", "temperature must be a number at least 0"),
        ("temperature=-1", "temperature must be a number at least 0"),
        ("temperature=true", "temperature must be a number at least 0"),
        ("track_prefill_tokens=1", "track_prefill_tokens must be true or false"),
        ("policy=best", "policy must be kv-cost or first-token"),
        ("policy=1", "policy must be kv-cost or first-token"),
        ('{"policy": ["kv-cost"]}', "policy must be kv-cost or first-token"),
        ("temperature=1,temperature=2", "temperature comes twice"),
        ("temperature=1,router_temperature=2", "router_temperature says temperature a second time"),
        (
            "overlap_score_credit=1,overlap_score_weight=0",
            "overlap_score_weight says overlap_score_credit a second time",
        ),
        ('{"temperature": null}', "temperature must be a number"),
        ('{"temperature": "1"}', "temperature must be a number"),
        ('{"temperature": NaN}', "not a JSON object"),
        ("{", "not a JSON object"),
        ("@/nowhere/at/all", "cannot read /nowhere/at/all"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(said: str, why: str) -> None:
    with pytest.raises(ConfigError, match="shadow_weights: ") as caught:
        read(said)
    assert why in str(caught.value)
    assert caught.value.field == "shadow_weights"


def test_a_file_of_them(tmp_path: Path) -> None:
    file = tmp_path / "weights.json"
    file.write_text('{"prefill_load_scale": 3}')
    assert read(f"@{file}") == {"prefill_load_scale": 3.0}


def test_they_have_the_names_of_settings_and_overrides() -> None:
    """Whatever decides has a name here, and what has no effect anywhere has none."""
    weights = ShadowWeights.__struct_fields__
    assert set(weights) == set(weights_in_force(RouterConfig(), None)._fields)
    switches = {"track_prefill_tokens", "expects_booked"}
    for weight in weights:
        name = weight.replace("delay_weight", "delay_scale")
        name = name.replace("eviction_weight", "eviction_scale").replace("pace", "pace_scale")
        name = name.replace("interference", "interference_scale")
        name = name.replace("slowness", "slowness_scale")
        assert hasattr(RouterConfig(), name)
        read_shadow_weights({name: True if name in switches else 1.0})
    idle = {"assume_kv_reuse", "shared_cache_multiplier"}
    for name in set(RouterConfigOverride.__struct_fields__) - idle:
        read_shadow_weights({name: True if name == "track_prefill_tokens" else 1.0})
    for name in idle:
        with pytest.raises(ValueError, match="no weight"):
            read_shadow_weights({name: 1.0})


@given(st.floats(0.0, 10.0), st.booleans())
def test_an_overrides_names_mean_what_they_mean_in_an_override(value: float, track: bool) -> None:
    each: tuple[dict[str, Any], ...] = (
        {"overlap_score_weight": value},
        {"router_temperature": value},
        {"prefill_load_scale": value, "track_prefill_tokens": track},
        {"overlap_score_credit": value / 10.0},
    )
    for said in each:
        as_override = weights_in_force(RouterConfig(), RouterConfigOverride(**said))
        config = msgspec.structs.replace(RouterConfig(), **read_shadow_weights(said))
        assert weights_in_force(config, None) == as_override


def test_settings_of_a_program_are_held_to_the_same() -> None:
    assert Settings().shadow is None
    chosen = Settings(shadow_weights={"temperature": 1.0}, shadow_sample=0.5).shadow
    assert chosen == ShadowSettings(weights={"temperature": 1.0}, sample=0.5)
    with pytest.raises(ValueError, match="no weight"):
        ShadowSettings(weights={"warmth": 1.0})
    for wrong in (0.0, 1.1, float("nan")):
        with pytest.raises(ValueError, match="shadow_sample"):
            ShadowSettings(sample=wrong)
        with pytest.raises(ValueError, match="shadow_cost_max"):
            ShadowSettings(cost_max=wrong)
