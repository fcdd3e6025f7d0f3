"""No body, whatever is in it, does anything but what the document says."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from typing import Final

import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzz.bodies import TAKING, Body, bodies, each_spoilt
from tests.fuzz.door import House, house

SECONDS: Final = float(os.environ.get("FUZZ_SECONDS", "20"))
SEED: Final = int(os.environ.get("FUZZ_SEED", "7"))


@pytest.fixture(scope="module")
def served() -> Iterator[House]:
    with house() as open_house:
        yield open_house


@settings(max_examples=100, derandomize=True, suppress_health_check=list(HealthCheck))
@given(body=bodies())
def test_some_bodies(served: House, body: Body) -> None:
    served.check(body)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_every_value_in_every_place(served: House) -> None:
    """In an order that is the same every time, as far as the seconds go."""
    spoilt = [body for route in TAKING for body in each_spoilt(route)]
    random.Random(SEED).shuffle(spoilt)
    until = time.monotonic() + SECONDS
    for body in spoilt:
        served.check(body)
        if time.monotonic() > until:
            break
