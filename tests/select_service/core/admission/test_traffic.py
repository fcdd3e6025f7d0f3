from __future__ import annotations

import pytest

from select_service.core.admission.traffic import MEMORY_S, AdmittedTraffic


def steady(traffic: AdmittedTraffic, since: float, seconds: float, rate: float = 10.0) -> float:
    """Requests of 100 tokens in the first line; returns when they end."""
    for number in range(int(seconds * rate)):
        traffic.add(0, 100.0, since + number / rate)
    return since + seconds


@pytest.mark.parametrize("before_s", [0.0, 300.0])
@pytest.mark.parametrize("idle_s", [0.0, 60.0, 3600.0])
@pytest.mark.parametrize("is_read", [False, True])
def test_a_steady_rate_is_believed_as_soon_after_an_idle_hour_as_at_the_start(
    before_s: float, idle_s: float, *, is_read: bool
) -> None:
    traffic = AdmittedTraffic(2)
    began = steady(traffic, 1.0, before_s) + idle_s
    if is_read:
        for second in range(int(idle_s)):
            traffic.above(1, began - idle_s + second)
    ends = steady(traffic, began, 2 * MEMORY_S)
    assert traffic.above(1, ends) > 800.0
    assert traffic.requests_above(1, ends) > 8.0


@pytest.mark.parametrize("idle_s", [0.0, 3600.0])
def test_a_burst_after_an_idle_hour_is_no_rate_that_goes_on(idle_s: float) -> None:
    traffic = AdmittedTraffic(2)
    ends = steady(traffic, 1.0, 300.0, rate=1.0) + idle_s
    for _ in range(200):
        traffic.add(0, 100.0, ends)
    assert traffic.above(1, ends) < 600.0, "20 a second within ten seconds"


def test_a_rate_that_has_ended_is_forgotten() -> None:
    traffic = AdmittedTraffic(2)
    ends = steady(traffic, 1.0, 300.0)
    assert traffic.above(1, ends + 100.0) < 1.0
