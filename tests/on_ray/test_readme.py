"""`examples/ray`, which deploy/docs/ray.md shows, does what it says."""

from __future__ import annotations

import types

import pytest

from tests.on_ray.cluster import Cluster, Selectors, wait_until
from tests.readme import document

pytestmark = [pytest.mark.heavy, pytest.mark.e2e]


def test_the_example(cluster: Cluster) -> None:
    module = types.ModuleType("example")
    example = document.README.parent / "examples/ray/engines.py"
    exec(compile(example.read_text("utf-8"), str(example), "exec"), module.__dict__)
    selectors = Selectors(cluster, "select-service")
    wait_until(lambda: len(selectors.urls()) == 2, "both selectors are there")
    wait_until(selectors.loads_are_zero, "what was booked is freed")
