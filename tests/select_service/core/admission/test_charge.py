"""A tenant is charged for the answers that it got, not for those that it expected."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from select_service.core.admission.queue import Ticket
from select_service.core.admission.slo_shed import SloShed
from select_service.core.ledger.charge import answer_tokens
from select_service.types import Selection
from select_service.types.admission import AdmissionSettings
from tests.select_service.core.admission.gated import change, fleet, keeper_of
from tests.select_service.core.replication.replica import Replica, add, pulled, tell
from tests.select_service.core.whole_fleet import Fleet

SIZE = 16  # of a block
BATCH = 3  # its line: behind promised returns


def charged(some: Fleet, tenant: str, line: int = BATCH) -> int:
    policy = keeper_of(some).gate.queue
    assert isinstance(policy, SloShed)
    return policy.queue.counter(line, tenant)


def run(some: Fleet, name: str, tenant: str, blocks: int, **wishes: Any) -> None:
    """One request with so many output blocks, from its booking to its end."""
    answer = some.take(name, len(name), slo_class="batch", fairness_id=tenant, **wishes)
    assert isinstance(answer, Selection)
    some.done(name)
    if blocks:
        some.core.reservations.output_block(name, None, some.now, blocks)
    some.free(name)


@pytest.mark.parametrize(
    ("expected", "blocks", "charged_tokens"),
    [
        (None, 4, 64),  # nothing was expected
        (32, 4, 64),  # more came
        (512, 4, 80),  # less came: at most so much
        (70, 4, 70),  # its last block is not full
        (48, 0, 48),  # nobody reported output
        (None, 0, 0),
    ],
)
def test_an_answer_costs_what_came(expected: int | None, blocks: int, charged_tokens: int) -> None:
    some = fleet(policy="slo-shed")
    run(some, "a", "alice", blocks, expected_output_tokens=expected)
    assert charged(some, "alice") == SIZE + 2 * charged_tokens


def test_a_request_that_waited_costs_what_came_too() -> None:
    some = fleet(policy="slo-shed", max_inflight=1)
    wishes: dict[str, Any] = {"slo_class": "batch", "fairness_id": "alice"}
    assert isinstance(some.take("first", 1), Selection)
    ticket = some.take("second", 2, expected_output_tokens=512, **wishes)
    assert isinstance(ticket, Ticket)
    some.free("first")
    assert isinstance(ticket.answer, Selection)
    assert charged(some, "alice") == SIZE + 2 * 512
    some.core.reservations.output_block("second", None, some.now, 2)
    some.free("second")
    assert charged(some, "alice") == SIZE + 2 * 48


@pytest.mark.parametrize(("blocks", "next_tenant"), [(0, "alice"), (40, "bob")])
def test_who_got_a_long_answer_waits_behind_the_others(blocks: int, next_tenant: str) -> None:
    some = fleet(policy="slo-shed", max_inflight=1)
    answer = some.take("before", 1, slo_class="batch", fairness_id="alice")
    assert isinstance(answer, Selection)
    tickets = {
        tenant: some.take(tenant, 20 + number, slo_class="batch", fairness_id=tenant)
        for number, tenant in enumerate(("alice", "bob"))
    }
    if blocks:
        some.core.reservations.output_block("before", None, some.now, blocks)
    some.free("before")
    gone = [name for name, one in tickets.items() if isinstance(one, Ticket) and one.answer]
    assert gone == [next_tenant]


def test_a_rank_that_leaves_ends_its_answers() -> None:
    some = fleet(2, policy="slo-shed")
    answer = some.take("a", 1, slo_class="batch", fairness_id="alice")
    assert isinstance(answer, Selection)
    some.core.reservations.output_block("a", None, some.now, 3)
    some.delete(answer.worker_id)
    some.tick(1.0)
    assert charged(some, "alice") == SIZE + 2 * 48


def test_another_policy_is_not_charged_for_what_it_did_not_admit() -> None:
    some = fleet(policy="slo-shed")
    assert isinstance(
        some.take("a", 1, slo_class="batch", expected_output_tokens=512, fairness_id="alice"),
        Selection,
    )
    some.core.reservations.output_block("a", None, some.now, 3)
    change(some, "slo-shed", output_weight=3.0)
    some.free("a")
    assert charged(some, "alice") == 0


def replicas(*, have_met: bool = True, **settings: Any) -> tuple[Replica, Replica]:
    made = []
    for number in (1, 2):
        one = Replica.__new__(Replica)
        admission = AdmissionSettings(policy="slo-shed", **settings)
        Fleet.__init__(one, router_id=number, admission=admission)
        one.core.replica_operations.announce(8092)
        one.worker(1)
        made.append(one)
    here, there = made
    if have_met:
        for source, target in ((here, there), (there, here)):
            target.hears(*source.turn())
    return here, there


@pytest.mark.parametrize("ends_here", [True, False])
def test_every_replica_charges_what_one_admitted_and_corrects_it_once(*, ends_here: bool) -> None:
    here, there = replicas()
    wishes: dict[str, Any] = {"slo_class": "batch", "fairness_id": "alice"}
    assert isinstance(here.take("a", 1, expected_output_tokens=512, **wishes), Selection)
    tell(here, there)
    assert charged(here, "alice") == charged(there, "alice") == SIZE + 2 * 512
    source, target = (here, there) if ends_here else (there, here)
    source.core.reservations.output_block("a", None, source.now, 4)
    target.hears(*source.turn(source.core.limits.replica_output_interval_s))
    source.free("a")
    target.hears(*source.effects.published)
    assert charged(here, "alice") == charged(there, "alice") == SIZE + 2 * 80


@pytest.mark.parametrize(("is_told", "next_tenant"), [(False, "alice"), (True, "bob")])
def test_who_was_served_by_one_replica_waits_behind_the_others_at_another(
    *, is_told: bool, next_tenant: str
) -> None:
    here, there = replicas(max_inflight=3)
    for number in range(3):
        assert isinstance(here.take(f"x{number}", 50 + number, slo_class="critical"), Selection)
    tickets = {
        tenant: here.take(tenant, 20 + number, slo_class="batch", fairness_id=tenant)
        for number, tenant in enumerate(("alice", "bob"))
    }
    assert isinstance(there.take("there", 1, slo_class="batch", fairness_id="alice"), Selection)
    if is_told:
        tell(there, here)
        here.free("x1")
    here.free("x0")
    gone = [name for name, one in tickets.items() if isinstance(one, Ticket) and one.answer]
    assert gone == [next_tenant]


def test_a_replica_that_pulls_what_is_booked_charges_nobody_for_it() -> None:
    """It was admitted some time ago, when this one had no part in it."""
    here, there = replicas(have_met=False)
    wishes: dict[str, Any] = {"slo_class": "batch", "fairness_id": "alice"}
    assert isinstance(here.take("a", 1, **wishes), Selection)
    there.hears(*here.turn())
    there.turn()
    pulled(there, here)
    assert there.load(1) == here.load(1)
    assert charged(there, "alice") == 0
    here.core.reservations.output_block("a", None, here.now, 4)
    here.free("a")
    tell(here, there)
    assert charged(there, "alice") == 0, "nor for its answer"


def test_what_waited_or_came_from_an_older_version_is_told_as_it_was_charged() -> None:
    here, there = replicas(max_inflight=1)
    assert isinstance(here.take("first", 1), Selection)
    tell(here, there)
    ticket = here.take("second", 2, slo_class="batch", fairness_id="bob")
    assert isinstance(ticket, Ticket)
    here.free("first")
    assert isinstance(ticket.answer, Selection)
    tell(here, there)
    assert charged(there, "bob") == charged(here, "bob") == SIZE
    there.dynamo(add(3), request_id="other")
    assert charged(there, "default", line=1) == SIZE, "only what was charged where it was admitted"


def test_a_pair_is_charged_once_at_every_replica() -> None:
    here, there = replicas()
    for one in (here, there):
        one.patch(1, role="prefill")
        one.worker(2, role="decode")
    wishes: dict[str, Any] = {"slo_class": "batch", "fairness_id": "alice"}
    here.pair("p", 1, expected_output_tokens=512, **wishes)
    tell(here, there)
    assert charged(here, "alice") == charged(there, "alice") == SIZE + 2 * 512
    here.core.reservations.output_block("p", None, here.now, 4)
    there.hears(*here.turn(here.core.limits.replica_output_interval_s))
    here.free("p")
    tell(here, there)
    assert charged(here, "alice") == charged(there, "alice") == SIZE + 2 * 80


@given(st.integers(0, 10_000), st.integers(1, 500), st.integers(1, 64))
def test_an_answer_is_as_long_as_its_blocks_allow(expected: int, blocks: int, size: int) -> None:
    tokens = answer_tokens(expected, blocks, size)
    assert blocks * size <= tokens <= (blocks + 1) * size
    if expected // size == blocks:
        assert tokens == expected, "what was expected and came is not corrected"
