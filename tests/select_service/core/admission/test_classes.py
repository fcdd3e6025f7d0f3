from __future__ import annotations

from typing import Any

import pytest

from select_service.core.admission.classes import SloClasses
from tests.select_service.core.admission.golden import SIMULATOR


@pytest.mark.parametrize("case", SIMULATOR["slo_priorities"], ids=lambda case: case["class"])
def test_recorded_priorities(case: dict[str, Any]) -> None:
    classes = SloClasses()
    assert classes.priority(case["class"]) == case["priority"]
    assert classes.is_sheddable(classes.band(case["class"])) == case["sheddable"]


def test_bands_descend_and_follow_overrides() -> None:
    classes = SloClasses({"batch": 4, "gold": 50})
    assert classes.bands == (50, 4, 3, -2, -3)
    assert classes.band("gold") == 0
    assert classes.band("batch") == classes.band("critical") == 1
    assert classes.band("nobody") == classes.band("") == classes.band("standard")
    assert classes.known("nobody") == "standard"
    assert classes.name_of(1) == "batch"


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ({"batch": 101}, "-100..100"),
        ({"batch": -101}, "-100..100"),
        ({"batch": True}, "whole number"),
        ({"": 1}, "characters"),
        ({"x" * 65: 1}, "characters"),
        ({str(number): 1 for number in range(60)}, "at most"),
    ],
)
def test_bad_overrides_are_refused(overrides: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        SloClasses(overrides)


def test_who_names_no_class_keeps_its_priority_when_the_standard_one_is_moved() -> None:
    """An empty or unknown name is 3, whatever the class of that priority is now."""
    classes = SloClasses({"standard": -1})
    assert [classes.priority(name) for name in ("standard", "", "wat")] == [-1, 3, 3]
    assert classes.bands == (4, 3, -1, -2, -3)
    assert (classes.band("wat"), classes.band("standard")) == (1, 2)
    assert classes.known("wat") == classes.known("") == "unnamed", "counted by itself"
    assert not classes.is_sheddable(classes.band("")), "it is not refused for load alone"
    assert SloClasses({"standard": 3}).known("wat") == "standard"
    assert SloClasses({"standard": 0, "unnamed": -5}).priority("wat") == -5, "if somebody says so"
