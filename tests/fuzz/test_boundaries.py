"""Nothing a client writes, in a body or in a head, does anything but what the document says."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings

from tests.effort import examples
from tests.fuzz.bodies import TAKING, Body, bodies, each_spoilt
from tests.fuzz.budget import SECONDS, SEED
from tests.fuzz.fuzzed_service import FuzzedService, fuzzed_service
from tests.fuzz.heads import shuffled

T = TypeVar("T")

BODIES: Final = 3000  # some 10 s
HEADS: Final = 800  # some 8 s
HEADS_LIGHT: Final = 25


@pytest.fixture(scope="module")
def served() -> Iterator[FuzzedService]:
    with fuzzed_service() as opened:
        yield opened


@settings(max_examples=examples(45), derandomize=True, suppress_health_check=list(HealthCheck))
@given(body=bodies())
def test_some_bodies(served: FuzzedService, body: Body) -> None:
    served.check(body)


def test_some_heads(served: FuzzedService) -> None:
    for head in shuffled(SEED)[:HEADS_LIGHT]:
        served.check_head(*head)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_every_value_in_every_place(served: FuzzedService) -> None:
    spoilt = [body for route in TAKING for body in each_spoilt(route)]
    random.Random(SEED).shuffle(spoilt)
    _try(served, BODIES, spoilt, served.check)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_every_oddity_of_a_head(served: FuzzedService) -> None:
    _try(served, HEADS, shuffled(SEED), lambda head: served.check_head(*head))


def _try(
    served: FuzzedService, most: int, things: Iterable[T], check: Callable[[T], object]
) -> None:
    """Try so many; or as many as there are and the seconds last, if some are given."""
    until = None if SECONDS is None else time.monotonic() + SECONDS
    count = 0
    for thing in things:
        if count >= most if until is None else time.monotonic() > until:
            break
        check(thing)
        count += 1
    print(f"{count} tried, {served.sent} requests so far, {served.refused} refused")
