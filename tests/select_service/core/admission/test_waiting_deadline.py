"""How long a request waits for a full worker, if no `--queue-deadline-s` says it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from select_service.core.admission.controller import DEADLINE_S
from select_service.core.admission.waiting_deadline import LATER_MAX
from select_service.core.ledger.rank_speeds import SURE
from select_service.errors import AdmissionRefused
from select_service.types.admission import AdmissionSettings
from tests.select_service.core.admission.gated import fleet
from tests.select_service.core.whole_fleet import selection_of, ticket_of

if TYPE_CHECKING:
    from tests.select_service.core.whole_fleet import Fleet

USUAL = AdmissionSettings()


def answers(some: Fleet, seconds: float, count: int = SURE) -> None:
    """Let so many requests be answered one after another, each in so many seconds."""
    for number in range(count):
        selection_of(some.take(f"warm-{number}", 1_000 + number))
        some.done(f"warm-{number}")
        some.now += seconds
        some.free(f"warm-{number}")


def full(seconds: float = 0.0, inflight: int = 1, **settings: Any) -> Fleet:
    """A worker that is full, after answers that took so many seconds each; 0: none."""
    some = fleet(record={"max_inflight": inflight, "max_queued": 8}, **settings)
    if seconds:
        answers(some, seconds)
    for number in range(inflight):
        selection_of(some.take(f"full-{number}", number))
    return some


def waits_s(some: Fleet, name: str, *hashes: int, **wishes: Any) -> float:
    ticket = ticket_of(some.take(name, *hashes, **wishes))
    return ticket.until - ticket.since


def test_while_nothing_is_measured_it_is_constant() -> None:
    assert waits_s(full(), "a", 1) == DEADLINE_S
    some = fleet(record={"max_inflight": 1})
    answers(some, 10.0, SURE - 1)
    some.take("full", 1)
    assert waits_s(some, "a", 2) == DEADLINE_S


def test_it_follows_from_how_long_answers_take_and_from_who_waits_before() -> None:
    """Each that waits before it ends one answer of its worker later."""
    some = full(10.0, inflight=2)
    waits = [waits_s(some, f"w{number}", 10 + number) for number in range(3)]
    assert waits == pytest.approx([LATER_MAX * 10.0 * place / 2 for place in (1, 2, 3)])


def test_it_has_a_least_and_a_most() -> None:
    assert waits_s(full(0.01), "a", 9) == USUAL.queue_deadline_min_s
    assert waits_s(full(1_000.0), "a", 9) == USUAL.queue_deadline_max_s
    some = full(10.0, queue_deadline_min_s=50.0, queue_deadline_max_s=60.0)
    assert [waits_s(some, name, ord(name)) for name in "ab"] == [50.0, 60.0]


def test_a_deadline_given_is_the_deadline() -> None:
    some = full(10.0, queue_deadline_s=7.0)
    assert waits_s(some, "a", 9) == 7.0
    assert waits_s(some, "b", 10, slo_ttft_ms=1_000.0) == 7.0


def test_nobody_waits_longer_than_it_can_be_in_time() -> None:
    """1,600 tokens take a second of the two; half of a target is left for the wait at least."""
    some = full(prefill_tokens_per_s=1_600.0)
    assert waits_s(some, "a", 1, isl=1_600, slo_ttft_ms=3_000.0) == pytest.approx(2.0)
    assert waits_s(some, "b", 2, isl=1_600, slo_ttft_ms=1_500.0) == pytest.approx(0.75)
    assert waits_s(some, "c", 3, isl=1_600, slo_ttft_ms=1e9) == USUAL.queue_deadline_max_s


def test_what_is_cached_need_not_be_computed() -> None:
    some = full(prefill_tokens_per_s=16.0)
    some.hold(1, [1, 2, 3])
    waits = waits_s(some, "a", 1, 2, 3, 4, slo_ttft_ms=10_000.0)
    assert waits == pytest.approx(9.0), "of four blocks, which take a second each, one is left"


def test_who_can_not_be_in_time_any_more_is_refused() -> None:
    some = full()
    ticket = ticket_of(some.take("a", 9, slo_ttft_ms=2_000.0))
    some.tick(1.0)
    assert not some.effects.answered
    some.tick(1.1)
    assert isinstance(ticket.answer, AdmissionRefused)
    assert ticket.answer.code == "expired-waiting"
