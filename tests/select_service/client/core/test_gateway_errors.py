"""Whoever stands between may answer in the service's place, and a selector may say anything."""

from __future__ import annotations

import decimal
import math
from typing import Any

import msgspec
import pytest

from select_service.client.core.exchange import ExchangeOutcome
from select_service.client.core.problems import NotAnAnswer, TimedOut, Unreachable, refusal
from select_service.errors import ServiceError
from tests.select_service.client.core.stage import POISON, Stage
from tests.select_service.client.core.test_session import reserve, stage

HTML = b"<html>no</html>"
RESERVE, BATCH, HEALTH = "/select_and_reserve", "/reservations/batch", "/health"
NOBODY = [
    (502, "text/html", HTML, Unreachable),
    (503, "text/plain", b"no healthy upstream", Unreachable),
    (504, "text/html", HTML, TimedOut),
    (404, "text/html", HTML, NotAnAnswer),
    (200, "text/html", HTML, NotAnAnswer),
]
ANSWERS = pytest.mark.parametrize(
    ("status", "kind", "text", "error"), NOBODY, ids=[str(one[0]) for one in NOBODY]
)


def booked(on: Stage, selector: int = 0) -> list[str]:
    return list(on.network.services[selector].book.live)


@ANSWERS
def test_what_may_have_been_booked_behind_a_proxy_is_freed(
    status: int, kind: str, text: bytes, error: type[Exception]
) -> None:
    on = stage(degraded=False)
    service = on.network.services[0]
    service.between[RESERVE] = (status, kind, text)
    with pytest.raises(error, match=f"s0: .*status {status}"):
        reserve(on, timeout_s=5.0)
    assert booked(on) == ["r"], "it was booked; nobody has said so"
    on.keep_up(on.now + 1)
    assert booked(on) == []


def test_what_a_service_booked_before_it_failed_is_freed() -> None:
    on = stage()
    on.network.services[0].between[RESERVE] = (500, "application/json", b'{"code": "internal"}')
    with pytest.raises(ServiceError) as caught:
        reserve(on)
    assert caught.value.status == 500
    on.keep_up(on.now + 1)
    assert booked(on) == []


@pytest.mark.parametrize("status", [200, 404, 500, 502, 503, 504])
def test_the_next_selector_is_asked_when_there_is_only_a_proxy(status: int) -> None:
    on = stage(2)
    on.network.services[0].between[RESERVE] = (status, "text/html", HTML)
    assert reserve(on).reservation_id == "r~1"
    on.keep_up(on.now + 1)
    assert booked(on, 1) == ["r~1"]


@pytest.mark.parametrize("status", [429, 503, 529])
@pytest.mark.parametrize(
    "body",
    [
        {"code": "exceeds-capacity", "gate": "policy", "retry_after_s": None},
        {"code": "batch_not_placed", "details": {"never_fits": "exceeds-capacity"}},
    ],
    ids=["request", "batch"],
)
def test_what_never_fits_is_asked_once(status: int, body: dict[str, Any]) -> None:
    on = stage()
    text = msgspec.json.encode({"error": "it never fits", "reason": body["code"]} | body)
    on.network.services[0].between[RESERVE] = (status, "application/json", text)
    with pytest.raises(ServiceError) as caught:
        reserve(on, timeout_s=60.0)
    assert caught.value.code == body["code"]
    assert (on.session.stats.retries, on.session.stats.failovers) == (0, 0)
    assert caught.value.retry_after_s == math.inf


@pytest.mark.parametrize(("status", "kind"), [(502, "text/html"), (503, "text/plain")])
def test_a_proxy_with_nobody_behind_it_is_no_selector(status: int, kind: str) -> None:
    on = stage()
    on.keep_up(on.now + 1)  # reads the catalog
    service = on.network.services[0]
    for path in ("/leases", RESERVE, BATCH, HEALTH):
        service.between[path] = (status, kind, HTML)
    booking = reserve(on)
    assert booking.is_degraded
    on.session.end(booking, on.now)
    on.keep_up(on.now + 5)
    assert on.session.selectors.is_down, "its answers are not the service's"
    service.between.clear()
    on.keep_up(on.now + 1)
    assert not reserve(on, "s").is_degraded


@pytest.mark.parametrize("answer", [
    (200, "text/html", HTML),
    (200, "application/json", b"{}"),
    (200, "application/json", b'{"results": []}'),
    (404, "text/html", HTML),
    (401, "application/json", b'{"code": "unauthorized"}'),
])  # fmt: skip
def test_an_end_is_reported_until_the_service_says_so(answer: tuple[int, str, bytes]) -> None:
    on = stage(degraded=False)
    booking = reserve(on)
    service = on.network.services[0]
    service.between[BATCH] = answer
    carried_out = service._operate
    service._operate = lambda one: {"status": 200}  # type: ignore[method-assign]
    on.session.end(booking, on.now)
    on.keep_up(on.now + 3)
    service._operate = carried_out  # type: ignore[method-assign]
    service.between.clear()
    on.keep_up(on.now + 15)
    assert booked(on) == []
    assert on.session.is_settled


def test_one_call_that_is_refused_takes_no_other_with_it() -> None:
    on = stage(lease_ttl_s=None)
    bookings = [reserve(on, f"r{number}") for number in range(5)]
    on.session.prefill_complete(bookings[2], POISON, on.now)
    for booking in bookings:
        on.session.end(booking, on.now)
    on.keep_up(on.now + 5)
    assert booked(on) == []
    assert on.session.stats.operations_dropped == 1
    assert on.session.is_settled


@pytest.mark.parametrize("value", [-1, 2**64, 0.5, decimal.Decimal(3), "3"])
def test_what_cannot_be_sent_is_refused_at_once(value: Any) -> None:
    on = stage()
    booking = reserve(on)
    with pytest.raises((TypeError, ValueError), match="cached_tokens"):
        on.session.prefill_complete(booking, value, on.now)
    if value != 2**64:
        with pytest.raises((TypeError, ValueError), match="count"):
            on.session.output_tokens(booking, value, None, on.now)
    if value != 0.5:
        with pytest.raises((TypeError, ValueError), match="decay_fraction"):
            on.session.output_tokens(booking, 16, value, on.now)
    on.session.prefill_complete(booking, None, on.now)
    on.session.output_tokens(booking, 16, 0.5, on.now)
    on.keep_up(on.now + 1)
    assert on.network.services[0].book.live["r"].is_prefilled


def test_numbers_of_other_libraries_are_numbers() -> None:
    class Index:
        def __index__(self) -> int:
            return 16

    on = stage()
    booking = reserve(on)
    on.session.prefill_complete(booking, Index(), on.now)  # type: ignore[arg-type]
    on.session.output_tokens(booking, Index(), None, on.now)  # type: ignore[arg-type]
    on.keep_up(on.now + 1)
    assert on.network.services[0].book.live["r"].blocks == 1


@pytest.mark.parametrize("said", ["soon", [], {}, True])
def test_a_time_that_is_none_is_not_read(said: object) -> None:
    body = msgspec.json.encode({"code": "c", "error": "e", "retry_after_s": said})
    error = refusal(ExchangeOutcome(0.0, 400, body, "application/json"))
    assert error.code == "c"


def test_an_internal_error_is_reported_as_what_it_is() -> None:
    body = msgspec.json.encode({"code": "internal_error", "error": "internal error"})
    error = refusal(ExchangeOutcome(0.0, 500, body, "application/json"))
    assert (type(error), error.code, str(error)) == (
        *(ServiceError, "internal_error"),
        "internal error",
    )
