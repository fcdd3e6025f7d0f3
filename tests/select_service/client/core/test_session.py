"""Whatever the network does, nothing stays booked that nobody uses, and nothing is lost."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from select_service.client.core.booking import ClientBooking
from select_service.client.core.options import Options
from select_service.client.core.problems import ClientError, TimedOut, Unreachable
from select_service.client.core.session import ClientSession
from select_service.errors import (
    NoEligibleWorker,
    NoSchedulableWorker,
    ReservationConflict,
    ServiceError,
    UnknownModel,
)
from select_service.types import PairSelection
from tests.effort import examples, share_of
from tests.select_service.client.core.stage import Book, FakeService, Network, Stage

PROMPT: dict[str, Any] = {"token_ids": bytes(4 * 32)}
FATES = ("ok", "request lost", "reply lost", "reply slow", "reply by a proxy", "request late")


def stage(count: int = 1, *, shared: bool = False, **options: Any) -> Stage:
    book = Book()
    services = [FakeService(book if shared else Book()) for _ in range(count)]
    return Stage(Network(services), Options(**options))


def reserve(on: Stage, name: str = "r", timeout_s: float | None = None) -> ClientBooking:
    booking = on.do(on.session.reserve(dict(PROMPT), name, on.now, timeout_s))
    assert isinstance(booking, ClientBooking)
    return booking


def test_a_life() -> None:
    on = stage()
    book = on.network.services[0].book
    booking = reserve(on)
    assert book.live["r"].lease_id in book.leases
    on.session.prefill_complete(booking, 16, on.now)
    for _ in range(50):
        on.session.output_tokens(booking, 1, None, on.now)
    on.keep_up(on.now + 1)
    on.session.prefill_complete(booking, None, on.now)
    assert on.session.is_settled, "said again it changes nothing"
    assert (book.live["r"].blocks, book.live["r"].is_prefilled) == (3, True)
    batches = [one for one in on.network.services[0].asked if one.path == "/reservations/batch"]
    assert len(batches) == 1
    on.session.end(booking, on.now)
    on.keep_up(on.now + 1)
    assert not book.live
    on.say_farewell()
    assert not book.leases


def test_what_was_cached_may_be_reported_after_the_end() -> None:
    on = stage()
    first, second = reserve(on), reserve(on, "s")
    on.session.end(first, on.now)
    on.session.prefill_complete(first, 16, on.now)  # the end waits, too
    on.session.end(second, on.now)
    on.keep_up(on.now + 1)
    on.session.prefill_complete(second, 32, on.now)
    on.session.prefill_complete(second, None, on.now)
    on.keep_up(on.now + 1)
    batches = [one for one in on.network.services[0].asked if one.path == "/reservations/batch"]
    bodies = [msgspec.msgpack.decode(batch.body or b"") for batch in batches]
    operations = [one for body in bodies for one in body["operations"]]
    assert operations == [
        {"op": "prefill_complete", "reservation_id": "r", "cached_tokens": 16},
        {"op": "free", "reservation_id": "r"},
        {"op": "free", "reservation_id": "s"},
        {"op": "free", "reservation_id": "s", "cached_tokens": 32},
    ]
    assert on.session.is_settled


@pytest.mark.parametrize("shared", [False, True])
def test_the_next_selector_takes_over(shared: bool) -> None:
    on = stage(2, shared=shared)
    first, second = (one.book for one in on.network.services)
    booking = reserve(on)
    on.session.prefill_complete(booking, None, on.now)
    on.session.output_tokens(booking, 32, None, on.now)
    on.network.is_dead[0] = True
    on.keep_up(on.now + 2)
    assert on.session.selectors.current == 1
    assert list(second.live) == [booking.reservation_id]
    assert booking.reservation_id == ("r" if shared else "r~1")
    assert (
        second.live[booking.reservation_id].blocks,
        second.live[booking.reservation_id].is_prefilled,
    ) == (2, True)
    on.session.end(booking, on.now)
    on.keep_up(on.now + 60)
    first.expire(on.now)
    assert not second.live
    assert not first.live


def test_all_gone_and_back() -> None:
    on = stage(2)
    on.keep_up(on.now + 1)  # the catalog
    on.network.is_dead = [True, True]
    booking = reserve(on)
    assert booking.is_degraded
    assert on.network.services[0].book.bookings == 0
    on.session.output_tokens(booking, 100, None, on.now)
    on.session.end(booking, on.now)
    on.network.is_dead = [False, False]
    on.keep_up(on.now + 1)
    assert not reserve(on, "again").is_degraded
    assert on.session.stats.degraded == 1


def test_nobody_and_no_catalog() -> None:
    on = stage()
    on.network.is_dead = [True]
    with pytest.raises(Unreachable):
        reserve(on)


def test_a_queue_is_no_absence() -> None:
    on = stage(attempts_max=1, rounds_max=1)
    on.keep_up(on.now + 1)
    reserve(on, "a")
    on.network.fates = itertools.repeat("reply slow")
    with pytest.raises(TimedOut):
        reserve(on, "b")
    on.network.fates = itertools.repeat("ok")
    on.keep_up(on.now + 60)
    assert list(on.network.services[0].book.live) == ["a"]


@pytest.mark.parametrize("status", [429, 503, 529])  # any, with --overload-status-code
def test_retry_after_is_honoured_within_the_deadline(status: int) -> None:
    on = stage(lease_ttl_s=None)
    service = on.network.services[0]
    service.refuse["/select_and_reserve"] = (status, "queue_full")
    service.retry_after_s = 2.0
    begun = on.now
    with pytest.raises(ServiceError) as caught:
        reserve(on, timeout_s=7.0)
    assert caught.value.code == "queue_full"
    assert 2 <= len(service.asked) <= 4
    assert on.now - begun <= 7.0


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (503, "no_eligible_worker", NoEligibleWorker),
        (409, "reservation_conflict", ReservationConflict),
    ],
)
def test_what_time_does_not_change_is_said_at_once(
    status: int, code: str, kind: type[ServiceError]
) -> None:
    on = stage(2, lease_ttl_s=None)
    on.network.services[0].refuse["/select_and_reserve"] = (status, code)
    with pytest.raises(kind):
        reserve(on)
    assert len(on.network.services[0].asked) == 1
    assert not on.network.services[1].asked


def test_a_model_that_no_selector_knows_is_said_at_once() -> None:
    on = stage(2, lease_ttl_s=None)
    for service in on.network.services:
        service.refuse["/select_and_reserve"] = (503, "no_schedulable_worker")
        service.details, service.retry_after_s = {"is_known": False}, 1.0
    begun = on.now
    with pytest.raises(UnknownModel) as caught:
        reserve(on)
    assert (caught.value.status, caught.value.code) == (404, "unknown_model")
    assert [len(service.asked) for service in on.network.services] == [1, 1]
    assert on.now - begun < 1.0, "nobody has waited"
    on.network.services[0].details = {"is_known": True}  # its workers may come back
    on.network.services[1].details = {"is_known": True}
    with pytest.raises(NoSchedulableWorker) as away:
        reserve(on)
    assert away.value.status == 503
    assert on.now - begun > 1.0
    del on.network.services[1].refuse["/select_and_reserve"]
    assert reserve(on).selection.endpoint


def test_the_first_reasons_of_a_refusal_are_in_its_text() -> None:
    on = stage(1, lease_ttl_s=None)
    service = on.network.services[0]
    service.refuse["/select_and_reserve"] = (503, "no_schedulable_worker")
    reasons = ["a", "b", "c", "d", "e"]
    for sent, text in ((reasons, ": a; b; c; and 2 more"), (reasons[:1], ": a"), ([], "")):
        service.details = {"reasons": sent, "is_known": False}
        with pytest.raises(UnknownModel) as caught:
            reserve(on)
        assert str(caught.value) == f"no_schedulable_worker{text}"
        assert caught.value.details == service.details


def test_json_where_msgpack_is_not_taken() -> None:
    on = stage()
    on.network.services[0].json_only = True
    booking = reserve(on)
    assert booking.reservation_id == "r"
    types = [one.content_type for one in on.network.services[0].asked]
    assert types.count("application/msgpack") == 1


def test_what_comes_late_goes_with_its_lease() -> None:
    on = stage()
    on.network.fates = itertools.chain(["ok", "request late"], itertools.repeat("ok"))
    booking = reserve(on)
    on.session.end(booking, on.now)
    book = on.network.services[0].book
    on.keep_up(on.now + 0.02)
    assert not book.live
    on.keep_up(on.now + 1)
    on.network.deliver(on.now)  # the first attempt arrives after everything
    assert not book.live


def test_a_request_is_repeated_under_the_lease_it_began_under() -> None:
    """Another would make another body of it, and what comes late would be nobody's."""
    on = stage()
    book = on.network.services[0].book
    on.network.fates = itertools.chain(["ok", "request lost"], itertools.repeat("ok"))
    reserve(on, "other")  # keeps its lease open, under which a reply was lost: the next comes soon
    on.keep_up(on.now + 1)
    on.network.fates = itertools.chain(
        ["request lost", "request late", "reply slow"], itertools.repeat("ok")
    )
    on.start(on.session.reserve(dict(PROMPT), "r", on.now, None))
    on.keep_up(on.now + 20)
    assert list(book.live) == ["other", "r"]
    on.session.end(on.session.bookings["r"], on.now)
    on.keep_up(on.now + 1)
    on.network.deliver(on.now)
    on.keep_up(on.now + 30)
    assert list(book.live) == ["other"]


def test_an_opening_that_comes_late_opens_nothing() -> None:
    on = stage()
    on.network.fates = itertools.chain(["request late"], itertools.repeat("ok"))
    booking = reserve(on)
    on.session.end(booking, on.now)
    on.say_farewell()
    book = on.network.services[0].book
    assert book.closed
    on.network.deliver(on.now)
    assert not book.leases


def test_a_lease_that_was_closed_meanwhile_is_not_asked_for_again() -> None:
    on = stage()
    book = on.network.services[0].book
    lease = on.session.leases.take(on.now)
    book.closed[lease.lease_id] = on.now
    assert reserve(on).reservation_id in book.live
    assert lease.lease_id not in book.leases


def test_a_pair_is_not_booked_again_and_a_rank_chosen_elsewhere_is() -> None:
    on = stage()
    prompt = {"sequence_hashes": [1, 2, 3], "isl_tokens": 50, "worker_id": 2, "dp_rank": 0}
    booked = on.do(on.session.book(dict(prompt), "mine", on.now, None, block_size=16))
    pair = on.do(on.session.reserve_pair(dict(PROMPT), "pair", on.now, None))
    assert (booked.ranks, pair.legs) == (((2, 0),), 2)
    on.network.services[0].book = book = Book()
    on.keep_up(on.now + 11)
    assert list(book.live) == ["mine~1"] == [booked.reservation_id]
    body = book.live["mine~1"].bodies
    assert (body["sequence_hashes"], body["effective_prefill_tokens"]) == ([1, 2, 3], 50)
    assert (on.session.stats.replays, on.session.stats.lost_bookings) == (1, 1)
    assert not pair.is_booked
    on.session.end(pair, on.now)
    on.session.end(booked, on.now)
    on.keep_up(on.now + 1)
    assert not book.live
    assert not on.session.catalog.under_way


def test_what_ends_while_it_is_booked_again_may_be_booked_late() -> None:
    """The end overtakes the request, which a slow path delivers when its lease is still renewed."""
    on = stage(lease_rotate_s=1e6)
    other, booking = reserve(on, "other"), reserve(on)
    on.network.services[0].book = book = Book()
    sent: list[str] = []

    def fates() -> Iterator[str]:
        while True:
            send = on.network.under_way
            if send is None or send.path != "/reservations" or not on.session.stats.replays:
                yield "ok"
                continue
            sent.append(send.path)
            on.session.end(booking, on.now)
            yield "request late"

    on.network.fates = fates()
    on.keep_up(on.now + 11)
    on.network.fates = itertools.repeat("ok")
    assert sent
    on.keep_up(on.now + 30)
    on.network.deliver(on.now)
    assert len(book.live) > other.legs, "it is booked, and nobody uses it"
    on.keep_up(on.now + 30)
    assert list(book.live) == [other.reservation_id]


def test_without_selectors_a_choice_stands_and_one_worker_does_for_a_pair() -> None:
    on = stage()
    on.keep_up(on.now + 1)
    on.network.is_dead = [True]
    body = {"token_ids": bytes(4 * 32), "worker_id": 7, "dp_rank": 1}
    booked = on.do(on.session.book(body, "mine", on.now, None, block_size=16))
    assert (booked.is_degraded, booked.ranks) == (True, ((7, 1),))
    pair = on.do(on.session.reserve_pair(dict(PROMPT), "pair", on.now, None))
    assert (pair.is_degraded, pair.answer.mode, pair.answer.prefill) == (True, "aggregated", None)


def test_a_pair_another_selector_does_not_know_of_is_freed_where_it_is() -> None:
    """It is not booked again; where it was it stayed for as long as the lease was renewed."""
    on = stage(2)
    book = on.network.services[0].book
    pair = on.do(on.session.reserve_pair(dict(PROMPT), "pair", on.now, None))
    other = reserve(on, "other")
    away = ["request lost"] * 3, ["ok"]  # it goes to the second, which answers
    back = ["request lost"] * 2, ["reply slow"]  # and so does the renewal, which comes back
    on.network.fates = itertools.chain(*away, *back, itertools.repeat("ok"))
    on.session.prefill_complete(pair, None, on.now)
    on.keep_up(on.now + 30)
    assert on.session.stats.lost_bookings == 1
    assert book.live.keys() == {other.reservation_id}


ACTIONS = (
    "reserve",
    "pair",
    "book",
    "report",
    "end",
    "drop",
    "wait",
    "long",
    "kill",
    "wake",
    "wipe",
)
ELSEWHERE: dict[str, Any] = {**PROMPT, "worker_id": 2, "dp_rank": 0}
VERBS: dict[str, Callable[[ClientSession, str, float], Any]] = {
    "reserve": lambda session, name, now: session.reserve(dict(PROMPT), name, now, 20.0),
    "pair": lambda session, name, now: session.reserve_pair(dict(PROMPT), name, now, 20.0),
    "book": lambda session, name, now: session.book(
        dict(ELSEWHERE), name, now, 20.0, block_size=16
    ),
}
CASE = (
    st.data(),
    st.integers(1, 3),
    st.booleans(),
    st.lists(st.sampled_from(ACTIONS), max_size=40),
)


@given(*CASE)
@settings(max_examples=examples(40))
def test_nothing_leaks_and_nothing_is_lost(
    data: st.DataObject, count: int, shared: bool, actions: list[str]
) -> None:
    live_through(data, count, shared, actions)


@pytest.mark.slow
@pytest.mark.long
@given(*CASE)
@settings(max_examples=share_of(4000))
def test_nothing_leaks_and_nothing_is_lost_in_many_lives(
    data: st.DataObject, count: int, shared: bool, actions: list[str]
) -> None:
    live_through(data, count, shared, actions)


def report(on: Stage, booking: ClientBooking, tokens: int, *, is_end: bool) -> None:
    if is_end:
        on.session.end(booking, on.now)
    else:
        on.session.prefill_complete(booking, None, on.now)
        on.session.output_tokens(booking, tokens, None, on.now)


def live_through(data: st.DataObject, count: int, shared: bool, actions: list[str]) -> None:
    on = stage(count, shared=shared, lease_ttl_s=30.0)
    on.network.on_step = note
    note(f"{count} {shared} {actions}")
    fates = st.sampled_from(("ok", "ok", *FATES))
    on.network.fates = iter(lambda: data.draw(fates), None)
    held: list[ClientBooking] = []
    begun: list[Any] = []
    for number, action in enumerate(actions):
        if action in VERBS:
            run = VERBS[action](on.session, f"r{number}", on.now)
            begun.append(on.start(run, held.append, _expected))
        elif action == "drop" and begun:
            on.drop(begun.pop(data.draw(st.integers(0, len(begun) - 1))))
        elif action in {"report", "end"} and held:
            booking = held[data.draw(st.integers(0, len(held) - 1))]
            report(on, booking, data.draw(st.integers(0, 40)), is_end=action == "end")
        elif action == "kill":
            on.network.is_dead[data.draw(st.integers(0, count - 1))] = True
        elif action == "wake":
            on.network.is_dead = [False] * count
        elif action == "wipe" and not shared:
            on.network.services[data.draw(st.integers(0, count - 1))].book = Book()
        on.keep_up(on.now + (12.0 if action == "long" else 0.05))
        on.session.check()
    settle(on, held)


def settle(on: Stage, held: list[ClientBooking]) -> None:
    """The network is well again: compare what is booked with what is held."""
    services = on.network.services
    on.network.fates = itertools.repeat("ok")
    on.network.is_dead = [False] * len(services)
    on.keep_up(on.now + 200.0)  # everything that was begun has ended, abandoned leases have lapsed
    on.network.deliver(on.now)
    on.keep_up(on.now + 60.0)
    books = {id(one.book): one.book for one in services}.values()
    for book in books:
        book.expire(on.now)
    live = {name: booked for book in books for name, booked in book.live.items()}
    expected = {one.reservation_id: one for one in held if one.is_booked and not one.is_over}
    assert live.keys() == expected.keys()
    for name, booking in expected.items():
        assert live[name].blocks == booking.output_blocks
        assert live[name].is_prefilled == booking.is_prefilled
        assert isinstance(booking.answer, PairSelection) or (
            live[name].worker_id == booking.answer.worker_id
        )
    on.say_farewell()
    assert not any(book.live or book.leases for book in books)


def _expected(error: Exception) -> None:
    assert isinstance(error, ClientError | ServiceError), repr(error)
