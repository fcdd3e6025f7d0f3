"""The plain shortcut against the whole line of a request: two services with the same life."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.core.hashing import pack_u64
from indexer.types import Tier, WorkerRank
from select_service.core import service
from select_service.core.verbs.placing import sketch
from select_service.core.verbs.plain_shortcut import Glance, Shortcut
from select_service.core.watching.marks import Recorder
from select_service.core.watching.witness import Witness
from select_service.types import CoreLimits, RouterConfig, SelectAndReserveRequest, SelectRequest
from select_service.types.admission import AdmissionSettings
from select_service.types.shadow import ShadowSettings
from tests.select_service.core.verbs import test_lifecycle_shortcut as lives
from tests.select_service.core.verbs import test_shortcut as choices
from tests.select_service.core.verbs.test_lifecycle_shortcut import Lived, booking, take, tell
from tests.select_service.core.verbs.test_shortcut import Told, ask, request_for
from tests.select_service.core.watching.test_witness import Notes
from tests.select_service.core.whole_fleet import DEFAULT, Fleet

T = TypeVar("T", bound=Told)


def plainly(kind: type[T], config: RouterConfig, **settings: Any) -> T:
    """Return a service whose kernels, if it has any, leave requests to the plain shortcut."""
    with (
        mock.patch.object(service, "Shortcut", None),
        mock.patch.object(service, "Clerk", None),
    ):
        told = kind(direct=True, config=config, **settings)
    told.fleet.core.reserving.shortcut = None  # what the caller has chosen is for the line
    return told


@given(
    steps=st.lists(choices.steps, max_size=25),
    limits=st.sampled_from([{}, {"decision_ring": 0}, {"blocks_per_request_max": 3}]),
    config=st.sampled_from(
        [
            {},
            {"prefill_load_scale": 0.5},
            {"policy": "first-token"},
            {"policy": "first-token", "expects_booked": False, "delay_scale": 3.0},
            {"track_prefill_tokens": False},
        ]
    ),
    queue_threshold=st.sampled_from([16.0, 1.0]),
    mode=st.sampled_from(["none", "none", "none", "reject"]),
)
def test_nobody_can_tell_which_way_a_selection_went(
    steps: list[Callable[[Fleet], object]],
    limits: dict[str, int],
    config: dict[str, Any],
    queue_threshold: float,
    mode: str,
) -> None:
    settings: dict[str, Any] = {
        "config": RouterConfig(use_kv_events=False, queue_threshold=queue_threshold, **config),
        "limits": CoreLimits(**limits),
    }
    first, second = (
        make(admission=AdmissionSettings(mode=mode), **settings)  # type: ignore[arg-type]
        for make in (partial(plainly, Told), partial(Told, direct=False))
    )
    for step in (*choices._beginning(), *steps):
        assert first.do(step) == second.do(step)
    assert second.shortcuts == 0


@given(
    steps=st.lists(lives.steps, max_size=25),
    limits=st.sampled_from(
        [{}, {"decision_ring": 0}, {"reservations_max": 3}, {"freed_ids_max": 1}]
    ),
    ttl_s=st.sampled_from([30.0, 0.0]),
    config=st.sampled_from([{}, {"track_prefill_tokens": False}, {"policy": "first-token"}]),
    router_id=st.sampled_from([0, 0, 77]),
    is_kept=st.booleans(),
)
def test_nobody_can_tell_which_way_a_reservation_went(
    steps: list[lives.Step],
    limits: dict[str, int],
    ttl_s: float,
    config: dict[str, Any],
    router_id: int,
    is_kept: bool,
) -> None:
    settings: dict[str, Any] = {
        "config": RouterConfig(use_kv_events=False, **config),
        "limits": CoreLimits(reservation_ttl_s=ttl_s, **limits),
        "router_id": router_id,
    }
    first, second = plainly(Lived, **settings), Lived(direct=False, **settings)
    for one in (first, second):
        if is_kept:
            one.fleet.core.keep_changes()
    for step in (*lives._beginning(), *steps):
        assert first.do(step) == second.do(step)
    assert second.shortcuts == 0


# -- who takes it ------------------------------------------------------------------------------


def plain(**settings: Any) -> Lived:
    lived = plainly(Lived, settings.pop("config", RouterConfig()), **settings)
    for worker_id in (1, 2, 3):
        lived.fleet.worker(worker_id)
    return lived


def is_taken(lived: Lived, step: Callable[[Fleet], object]) -> bool:
    before = lived.shortcuts
    lived.do(step)
    return lived.shortcuts > before


@pytest.mark.parametrize("policy", ["kv-cost", "first-token"])
def test_plain_requests_take_it_also_where_something_matches(policy: Any) -> None:
    lived = plain(config=RouterConfig(policy=policy))
    assert is_taken(lived, ask(request_for((1, 2), 40)))
    assert is_taken(lived, ask(request_for((1, 2), 40, selection_id="s", tenant_id="default")))
    assert is_taken(lived, take(booking((1, 2, 3), 50, reservation_id="one", selection_id="s")))
    assert is_taken(lived, take(booking((1, 2, 3), 50, expected_output_tokens=7)))
    lived.fleet.hold(2, [1, 2])
    assert is_taken(lived, ask(request_for((1, 2, 3), 50)))
    lived.fleet.worker(4)
    assert is_taken(lived, ask(request_for((1, 2, 3), 50)))


@pytest.mark.parametrize("name", sorted(SelectAndReserveRequest.__struct_fields__))
def test_whoever_says_more_does_not(name: str) -> None:
    """Members that come to be know nothing of the shortcut, so it must not take them."""
    usual = {"model_name", "tenant_id", "routing_group", "selection_id", "expected_output_tokens"}
    for request in (booking((1, 2), 40), request_for((1, 2), 40)):
        if name not in request.__struct_fields__:
            continue
        books = type(request) is SelectAndReserveRequest
        is_usual = name in usual or (books and name == "reservation_id")
        if name in {"block_hashes", "sequence_hashes", "isl_tokens"}:
            setattr(request, name, None)
        else:
            setattr(request, name, "default" if is_usual else object())
        shortcut = plain().shortcut
        done = (shortcut.select_and_reserve if books else shortcut.select)(request, 100.0)
        assert (done is not None) == is_usual


def test_answers_are_made_for_ranks_somebody_is_sent_to() -> None:
    """Whoever is first behind a change of a large fleet must not wait for all of them."""
    lived = plain()
    partition = lived.fleet.core.partitions[DEFAULT]
    glance = Glance(partition)
    assert glance.answers == [None] * 3
    answer = glance.answer(partition, 1)
    assert answer == sketch(partition, 1)
    assert glance.answers == [None, answer, None]
    assert glance.answer(partition, 1) is answer


def test_what_is_not_plain_is_for_the_whole_line() -> None:
    lived = plain()
    once = take(booking((1, 2), 40, reservation_id="one"))
    assert is_taken(lived, once)
    assert not is_taken(lived, once), "a repeat"
    assert not is_taken(lived, take(booking((1, 2), 41, reservation_id="one"))), "a conflict"
    assert not is_taken(lived, take(booking((1, 2), 40, reservation_id="two"), b"{}"))
    assert not is_taken(lived, take(booking((1, 2), 40, reservation_id="a\nb")))
    assert not is_taken(lived, take(booking((1, 2), 40, selection_id="x" * 300)))
    packed = request_for((1, 2), 40)
    for local, chain in ((packed.block_hashes, b""), (b"1234", b"1234"), ([1, 2], [1, 2])):
        odd = SelectRequest(block_hashes=local, sequence_hashes=chain, isl_tokens=40)
        assert not is_taken(lived, ask(odd))
    index = lived.fleet.core.partitions[DEFAULT].index
    index.store(WorkerRank(2, 0), Tier.DISK, None, [11, 12], pack_u64([1, 2]))
    assert not is_taken(lived, ask(packed)), "on a lower tier"
    assert is_taken(lived, ask(request_for((3,), 40)))
    lived.fleet.core.limits.reservations_max = 1
    assert not is_taken(lived, take(booking((3, 4), 40)))


def test_nobody_takes_it_where_requests_are_looked_at() -> None:
    for settings in ({"recorder": Recorder()}, {"witness": Witness(Notes())}):
        assert plain(**settings).shortcut is None
    assert plain(trace_decisions=True).shortcut is None
    assert plain(config=RouterConfig(temperature=0.5)).shortcut is None
    assert isinstance(plain().shortcut, Shortcut)
    lived = plain()
    lived.fleet.core.follow_shadow(ShadowSettings(weights={"overlap_score_credit": 2.0}), 100.0)
    assert not is_taken(lived, ask(request_for((1, 2), 40)))


def test_what_is_booked_by_it_is_found_by_the_line() -> None:
    request = booking((1, 2, 3), 48, reservation_id="one", selection_id="s")
    for first, second in ((True, False), (False, True)):
        fleet = plain().fleet
        ways = {True: fleet.core.selecting.shortcut, False: None}
        answers = []
        for way in (first, second):
            fleet.core.selecting.shortcut = ways[way]
            answers.append(fleet.core.select_and_reserve(request, fleet.now)[0])
        assert answers[0] == answers[1]
        assert fleet.core.counters.reservations_repeated == 1
        for verb in ("prefill_complete", "free"):
            tell(verb, "s", {})(fleet)
        assert fleet.core.partitions[DEFAULT].ledger.live == 0
