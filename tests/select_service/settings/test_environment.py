"""DYN_* variables: what they set, and what happens to nonsense."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest

from select_service.settings import ENVIRONMENT, FLAGS, read_environment
from select_service.types import RouterConfig


def test_nothing_set() -> None:
    read = read_environment({})
    assert (read.config, read.policy, read.warnings) == (RouterConfig(), None, ())


def test_every_field_of_the_router_can_be_set() -> None:
    fields = {variable.field for variable in ENVIRONMENT if variable.field}
    flags = {flag.field for flag in FLAGS}
    assert not fields & flags
    assert {field.name for field in msgspec.structs.fields(RouterConfig)} - flags == fields
    for variable in ENVIRONMENT:
        if variable.field is not None:
            text = "0" if variable.kind == "bool" else "0.125"
            read = read_environment({variable.name: text})
            assert getattr(read.config, variable.field) == float(text)
            assert read.warnings == ()


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("1", True), ("YES", True), ("false", False), ("0", False), (" no ", False)],
)
def test_booleans(text: str, value: bool) -> None:
    assert read_environment({"DYN_USE_KV_EVENTS": text}).config.use_kv_events is value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("DYN_ROUTER_QUEUE_THRESHOLD", "none"),
        ("DYN_ROUTER_QUEUE_THRESHOLD", ""),
        ("DYN_ROUTER_QUEUE_THRESHOLD", "1_0"),
        ("DYN_ROUTER_TEMPERATURE", "nan"),
        ("DYN_ROUTER_TEMPERATURE", "inf"),
        ("DYN_USE_KV_EVENTS", "maybe"),
        ("DYN_USE_KV_EVENTS", ""),
    ],
)
def test_nonsense_keeps_the_default_and_is_named(name: str, text: str) -> None:
    read = read_environment({name: text})
    assert read.config == RouterConfig()
    (warning,) = read.warnings
    assert name in warning


@pytest.mark.parametrize(("text", "value"), [("inf", math.inf), ("-Infinity", -math.inf)])
def test_the_queue_threshold_may_be_infinite(text: str, value: float) -> None:
    read = read_environment({"DYN_ROUTER_QUEUE_THRESHOLD": text})
    assert read.config.queue_threshold == value
    assert read.warnings == ()


def test_values_out_of_range_are_the_operators_business() -> None:
    read = read_environment({"DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT": "-3"})
    assert read.config.overlap_score_credit == -3
    assert read.warnings == ()


@pytest.mark.parametrize(
    ("environ", "scale", "credit"),
    [
        ({"DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT": "2"}, 2, 1),
        ({"DYN_OVERLAP_SCORE_WEIGHT": "0"}, 0, 0),
        ({"DYN_OVERLAP_SCORE_WEIGHT": "0", "DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT": "3"}, 3, 1),
        ({"DYN_OVERLAP_SCORE_WEIGHT": "0", "DYN_ROUTER_PREFILL_LOAD_SCALE": "4"}, 0, 0),
        ({"DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT": "3", "DYN_ROUTER_PREFILL_LOAD_SCALE": "4"}, 3, 1),
        ({"DYN_OVERLAP_SCORE_WEIGHT": "0", "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT": "0.5"}, 0, 0),
        ({"DYN_OVERLAP_SCORE_WEIGHT": "2", "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT": "0.5"}, 2, 0.5),
    ],
)
def test_the_deprecated_weight(environ: dict[str, str], scale: float, credit: float) -> None:
    read = read_environment(environ)
    assert read.config.prefill_load_scale == scale
    assert read.config.overlap_score_credit == credit
    assert "deprecated" in read.warnings[0]


def test_variables_without_effect_say_so() -> None:
    read = read_environment({"DYN_ROUTER_TRACK_ACTIVE_BLOCKS": "false", "DYN_OTHER": "x"})
    assert read.config == RouterConfig()
    assert read.warnings == ("DYN_ROUTER_TRACK_ACTIVE_BLOCKS has no effect on this service",)


def test_the_policy_file(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"

    def read(name: object) -> tuple[str | None, str | None]:
        policy = read_environment({"DYN_ROUTER_POLICY_CONFIG": str(name)}).policy
        assert policy is not None
        return policy.text, policy.error

    path.write_text("models: {}")
    assert read(path) == ("models: {}", None)
    text, error = read(tmp_path / "none")
    assert text is None
    assert error == (
        f"failed to read router policy config {tmp_path}/none: "
        "No such file or directory (os error 2)"
    )
    path.write_bytes(b"\xff\xfe")
    assert read(path)[1] == (
        f"failed to read router policy config {path}: stream did not contain valid UTF-8"
    )
    assert "Is a directory" in str(read(tmp_path)[1])
    assert read_environment({"DYN_ROUTER_POLICY_CONFIG": ""}).policy is None
