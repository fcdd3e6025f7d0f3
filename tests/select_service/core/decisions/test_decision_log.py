"""The ring of decisions: bounds, ids, what is refused a place; against a naive twin."""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from indexer.core.packing import pack_u64
from select_service.core.admission.queue import Ticket
from select_service.core.decisions.decision_log import (
    EXPLAINED_BYTES_MAX,
    EXPLAINED_MAX,
    chosen_workers,
    decision_id,
)
from select_service.core.decisions.explain import ExplainedRecord
from select_service.core.decisions.fleet_snapshot import STREAMS_S
from select_service.core.decisions.record import HASHES_KEPT, DecisionRecord
from select_service.errors import ServiceError
from select_service.types import (
    CoreLimits,
    PinnedWorker,
    RouterConfig,
    RouterConfigOverride,
    SelectAndReserveRequest,
    Selection,
    SelectRequest,
)
from select_service.types.admission import AdmissionSettings
from tests.effort import examples
from tests.select_service.core.whole_fleet import DEFAULT, Fleet

QUIET = RouterConfig(use_kv_events=False)


def fleet_of(workers: int = 2, ring: int = 8, size: int = 1 << 20, **settings: Any) -> Fleet:
    limits = CoreLimits(decision_ring=ring, decision_ring_bytes=size, id_length_max=1 << 20)
    fleet = Fleet(settings.pop("config", QUIET), limits=limits, **settings)
    for worker_id in range(workers):
        fleet.worker(worker_id)
    return fleet


def shown(record: DecisionRecord | None) -> dict[str, Any]:
    assert record is not None
    answer = json.loads(msgspec.json.encode(ExplainedRecord(record, 0.0, 0.1).whole()))
    assert isinstance(answer, dict)
    return answer


def newest(fleet: Fleet) -> dict[str, Any]:
    return shown(next(fleet.core.decisions.newest_first()))


class Ring(RuleBasedStateMachine):
    """The ring beside a plain list of what was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet: Fleet | None = None
        self.asked: list[tuple[str | None, str | None]] = []  # selection id, reservation id
        self.number = 0

    @rule(count=st.integers(0, 6), size=st.sampled_from([0, 700, 3000, 1 << 20]))
    def begin(self, count: int, size: int) -> None:
        if self.fleet is None:
            self.fleet = fleet_of(3, count, size)

    @rule(
        name=st.sampled_from([None, "a", "b", "a long name" * 20]),
        books=st.booleans(),
        blocks=st.sampled_from([0, 3, HASHES_KEPT + 5]),
        explain=st.booleans(),
    )
    def ask(self, name: str | None, books: bool, blocks: int, explain: bool) -> None:
        if self.fleet is None:
            return
        self.number += 1
        hashes = pack_u64(range(self.number, self.number + blocks))
        wishes: dict[str, Any] = {
            "selection_id": name,
            "block_hashes": hashes,
            "sequence_hashes": hashes,
            "isl_tokens": 16 * blocks + 1,
            "explain": explain,
        }
        core, now = self.fleet.core, self.fleet.now
        reservation_id = None
        if books:
            reservation_id = f"r{self.number}"
            ask = SelectAndReserveRequest(reservation_id=reservation_id, **wishes)
            core.selection.select_and_reserve(ask, now)
        else:
            core.selection.select(SelectRequest(**wishes), now)
        self.asked.append((name, reservation_id))

    @rule(worker_id=st.integers(0, 3))
    def change_worker(self, worker_id: int) -> None:
        if self.fleet is not None:
            self.fleet.worker(worker_id, endpoint=f"http://{self.number}")

    @rule()
    def free(self) -> None:
        booked = [name for _, name in self.asked if name is not None]
        if self.fleet is not None and booked:
            self.fleet.core.reservations.free(booked[-1], self.fleet.now)

    @invariant()
    def is_the_end_of_what_was_asked(self) -> None:
        if self.fleet is None:
            return
        ring = self.fleet.core.decisions
        ring.check()
        kept = list(ring.newest_first())
        names = [(one.selection_id, one.reservation_id) for one in kept]
        assert names == self.asked[::-1][: len(kept)]
        if ring.is_on:
            assert len(kept) + ring.evicted == len(self.asked)
        else:
            assert not kept
        for name in {name for pair in self.asked for name in pair} - {None}:
            assert name is not None
            found = ring.find(name)
            expected = next((one for one in kept if name in one[11:13]), None)
            if expected is not None:
                assert found == expected
            elif found is not None:  # explained lately
                assert name == found.reservation_id
        for one in kept:
            if one.selection_id is None:
                assert ring.find(decision_id(one)) == one


Ring.TestCase.settings = hypothesis_settings(
    max_examples=examples(25), stateful_step_count=20, deadline=None
)
TestRing = Ring.TestCase


def test_a_record_holds_nothing_of_its_partition() -> None:
    fleet = fleet_of(ring=8)
    fleet.select(1, 2)  # who sits where is written down for the first
    partition = fleet.core.partitions[DEFAULT]
    held = sys.getrefcount(partition)
    for _ in range(4):
        fleet.select(1, 2)
    assert len(fleet.core.decisions) == 5
    assert sys.getrefcount(partition) == held


def test_a_ring_of_none_keeps_none_and_watches_nothing() -> None:
    for limits in ({"ring": 0}, {"size": 0}):
        fleet = fleet_of(**limits)
        fleet.select(1)
        fleet.take("r", 1)
        assert len(fleet.core.decisions) == 0
        assert fleet.core.decisions.find("r") is None
        assert not any(one.is_watched for one in fleet.core.partitions.values())


def test_nothing_is_left_to_the_collector() -> None:
    fleet = fleet_of(2, 4)
    fleet.select(1)
    while gc.collect():  # what other tests have left may come in several turns
        pass
    gc.disable()
    try:
        for number in range(20):
            fleet.core.selection.select(SelectRequest(token_ids=[number] * 16), 1.0)
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_ids_that_are_used_again_name_the_newest() -> None:
    fleet = fleet_of(1)
    fleet.select(1, selection_id="again")
    fleet.select(2, 3, selection_id="again")
    assert shown(fleet.core.decisions.find("again"))["prompt"]["blocks"] == 2
    fleet.take("r", 1)
    fleet.core.reservations.free("r", fleet.now)
    fleet.core.lifecycle.bookings.freed.purge(fleet.now + 10_000, 100)
    fleet.take("r", 1, 2, 3)
    assert shown(fleet.core.decisions.find("r"))["prompt"]["blocks"] == 3


def test_strange_names_are_not_found() -> None:
    fleet = fleet_of(1)
    fleet.select(1)
    for name in ("", "decision-", "decision-0", "decision-2", "decision-٣", "decision-" + "9" * 99):
        assert fleet.core.decisions.find(name) is None
    assert fleet.core.decisions.find("decision-1") is not None


def test_what_is_somebodys_already_leaves_no_record_in_its_place() -> None:
    fleet = fleet_of(1)
    fleet.take("r", 1)
    with pytest.raises(ServiceError):
        fleet.take("r", 2)
    assert len(fleet.core.decisions) == 1
    assert shown(fleet.core.decisions.find("r"))["prompt"]["block_hashes"] == ["1"]


def test_who_may_not_be_chosen_is_told_why() -> None:
    fleet = fleet_of(0)
    fleet.worker(1, taints=["gpu"])
    fleet.worker(2, taints=["gpu"], data_parallel_size=2)
    fleet.worker(3)
    fleet.worker(4, endpoint=None)
    fleet.worker(5)
    fleet.drain(5)
    fleet.select(1, pinned_worker=PinnedWorker(2, 1))
    reasons = {
        (one["worker_id"], one["dp_rank"]): one["excluded"] for one in newest(fleet)["candidates"]
    }
    assert reasons == {
        (1, 0): "pinned_elsewhere",
        (2, 0): "pinned_elsewhere",
        (2, 1): None,
        (3, 0): "pinned_elsewhere",
        (4, 0): "not_schedulable",
        (5, 0): "draining",
    }
    assert newest(fleet)["chosen"]["picked_by"] == "only"


def test_one_let_in_by_a_worker_that_comes_shows_that_worker() -> None:
    admission = AdmissionSettings(mode="token-capacity", max_inflight=1, max_queued=4)
    fleet = fleet_of(1, admission=admission)
    fleet.take("first", 1)
    assert isinstance(fleet.take("second", 2), Ticket)
    fleet.worker(7)
    chosen = shown(fleet.core.decisions.find("second"))
    assert chosen["chosen"]["worker_id"] == 7
    assert {one["worker_id"]: one["excluded"] for one in chosen["candidates"]} == {
        0: "full",
        7: None,
    }


def test_a_refusal_is_a_record() -> None:
    fleet = fleet_of(1)
    with pytest.raises(ServiceError):
        fleet.select(1, allowed_worker_ids=[], selection_id="s")
    record = shown(fleet.core.decisions.find("s"))
    assert record["outcome"] == "refused"
    assert record["refusal"]["code"] == "no_eligible_worker"
    assert record["chosen"] is None
    (one,) = record["candidates"]
    assert (one["excluded"], one["cost"], one["prefill_tokens"]) == ("not_allowed", None, 0)


def test_the_gates_word_is_in_it() -> None:
    admission = AdmissionSettings(mode="token-capacity", max_inflight=1, max_queued=0)
    fleet = fleet_of(1, admission=admission)
    fleet.take("r", 1)
    admitted = newest(fleet)["admission"]
    assert (admitted["outcome"], admitted["gate"]) == ("admit", None)
    with pytest.raises(ServiceError):
        fleet.select(2)
    record = newest(fleet)
    assert record["outcome"] == "refused"
    assert record["admission"]["outcome"] == "refuse"
    assert record["refusal"]["gate"] == record["admission"]["gate"] == "capacity"
    assert record["candidates"][0]["excluded"] == "full"


def test_who_waited_says_how_long() -> None:
    fleet = fleet_of(0, config=RouterConfig(use_kv_events=False, queue_threshold=0.0))
    fleet.worker(1, max_num_batched_tokens=100)
    fleet.take("first", 1)
    assert newest(fleet)["waited_s"] == 0.0
    waiting = fleet.take("second", 2)
    assert isinstance(waiting, Ticket)
    assert len(fleet.core.decisions) == 1
    fleet.now += 2.5
    fleet.core.reservations.prefill_complete("first", fleet.now)
    record = shown(fleet.core.decisions.find("second"))
    assert record["waited_s"] == 2.5
    assert record["outcome"] == "placed"


def test_long_prompts_are_cut() -> None:
    fleet = fleet_of(1)
    fleet.select(*range(1, HASHES_KEPT + 1))
    assert not newest(fleet)["prompt"]["is_cut"]
    fleet.select(*range(1, HASHES_KEPT + 2))
    prompt = newest(fleet)["prompt"]
    assert prompt["is_cut"]
    assert len(prompt["block_hashes"]) == HASHES_KEPT
    assert prompt["blocks"] == HASHES_KEPT + 1


def test_hashes_are_text_of_unsigned_numbers() -> None:
    fleet = fleet_of(1)
    fleet.select(-1, 2**63)
    assert newest(fleet)["prompt"]["block_hashes"] == [str(2**64 - 1), str(2**63)]


def test_events_are_told_as_they_stood() -> None:
    fleet = fleet_of(0, config=RouterConfig())
    fleet.worker(1)
    stream = fleet.core.membership.streams_of(fleet.core.catalog.get(1))[0]
    fleet.select(1)
    assert newest(fleet)["candidates"][0]["index"]["state"] == "silent"
    stream.last_event_at = fleet.now
    stream.last_batch_ts = fleet.now - 1.5
    fleet.now += STREAMS_S
    fleet.select(2)
    index = newest(fleet)["candidates"][0]["index"]
    assert index == {"state": "current", "lag_s": 1.75, "open_gaps": 0}
    stream.lost_batches = 1
    fleet.now += STREAMS_S
    fleet.select(3)
    assert newest(fleet)["candidates"][0]["index"]["state"] == "uncertain"


def test_explaining_needs_no_ring_and_a_repeat_says_the_same() -> None:
    fleet = fleet_of(2, 0)
    plain = fleet.take("plain", 1)
    assert isinstance(plain, Selection)
    assert plain.decision is msgspec.UNSET
    first = fleet.take("r", 1, 2, explain=True)
    fleet.core.reservations.prefill_complete("r", fleet.now)
    again = fleet.take("r", 1, 2, explain=True)
    silent = fleet.take("r", 1, 2)
    off = fleet.take("r", 1, 2, explain=False)
    assert isinstance(first, Selection)
    assert isinstance(again, Selection)
    assert first == again
    assert silent == off == msgspec.structs.replace(first, decision=msgspec.UNSET)
    kept = fleet.core.lifecycle.bookings.live("r")
    assert kept is not None
    assert isinstance(kept.answer, Selection)
    assert kept.answer.decision is msgspec.UNSET
    for number in range(EXPLAINED_MAX):
        fleet.take(f"other-{number}", 1, explain=True)
    assert fleet.take("r", 1, 2, explain=True) == silent


def test_softmax_says_so() -> None:
    fleet = fleet_of(2)
    override = RouterConfigOverride(router_temperature=1.0)
    fleet.select(1, router_config_override=override)
    record = newest(fleet)
    assert record["chosen"]["picked_by"] == "softmax"
    assert record["weights"]["temperature"] == 1.0


def test_filters_find_whom_a_decision_chose() -> None:
    fleet = fleet_of(3)
    answer = fleet.select(1)
    assert isinstance(answer, Selection)
    (record,) = fleet.core.decisions.newest_first()
    assert chosen_workers(record) == [answer.worker_id]


def legs_of(record: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {one["worker_id"]: one["legs"] for one in record["candidates"]}


def test_a_pair_is_one_record_with_both_legs() -> None:
    fleet = fleet_of(0)
    for worker_id, role in enumerate(("prefill", "prefill", "decode", "decode"), 1):
        fleet.worker(worker_id, role=role)
    fleet.book("busy", 1, 7, 8, 9)
    fleet.book("there", 4, 1, 2)
    fleet.core.reservations.prefill_complete("there", fleet.now)
    answer = fleet.pair("p", 1, 2, 3, explain=True)
    assert not isinstance(answer, Ticket)
    found = fleet.core.decisions.find("p")
    record = shown(found)
    assert (record["route"], record["outcome"]) == ("select_pair", "placed")
    pair, legs = record["pair"], legs_of(record)
    assert (pair["mode"], pair["disaggregated_cost"]) == (answer.mode, answer.disaggregated_cost)
    computing = {worker_id: one["prefill_cost"] for worker_id, one in legs.items()}
    decoding = {worker_id: one["decode_cost"] for worker_id, one in legs.items()}
    assert computing == {1: 6.0, 2: 3.0, 3: None, 4: None}
    assert decoding == {1: None, 2: None, 3: 3 + 0.1 * 3, 4: 2 + 1 + 0.1 * 3}
    assert answer.prefill is not None
    assert pair["prefill"]["worker_id"] == answer.prefill.worker_id == 2
    assert pair["decode"]["worker_id"] == answer.decode.worker_id
    assert pair["prefill"]["cost"] + pair["decode"]["cost"] == pair["disaggregated_cost"]
    assert record["chosen"]["cost"] == answer.disaggregated_cost
    assert found is not None
    assert chosen_workers(found) == [answer.decode.worker_id, 2]
    again = fleet.pair("p", 1, 2, 3, explain=True)
    assert again == answer
    plain = fleet.pair("p", 1, 2, 3)
    assert plain == msgspec.structs.replace(answer, decision=msgspec.UNSET)


def test_one_rank_that_does_better_than_a_pair() -> None:
    fleet = fleet_of(0)
    for worker_id, role in enumerate(("prefill", "decode", "aggregated"), 1):
        fleet.worker(worker_id, role=role)
    fleet.book("busy", 1, 7, 8, 9)
    answer = fleet.pair("p", 1)
    assert not isinstance(answer, Ticket)
    record = newest(fleet)
    assert record["pair"]["mode"] == answer.mode == "aggregated"
    assert record["chosen"]["worker_id"] == answer.decode.worker_id == 3
    assert record["chosen"]["cost"] == answer.aggregated_cost == 2.0
    assert record["pair"]["disaggregated_cost"] == answer.disaggregated_cost
    assert all(one["excluded"] is None for one in record["candidates"])


def test_blocks_that_may_not_move_have_no_cost() -> None:
    fleet = fleet_of(0)
    fleet.worker(
        1,
        role="prefill",
        kv_transfer_domain="rack",
        kv_transfer_enforcement="required",
        topology_domains={"rack": "a"},
    )
    fleet.worker(2, role="decode", topology_domains={"rack": "b"})
    fleet.worker(3, role="decode", topology_domains={"rack": "a"})
    answer = fleet.pair("p", 1)
    assert not isinstance(answer, Ticket)
    assert answer.decode.worker_id == 3
    legs = legs_of(newest(fleet))
    assert legs[2]["decode_cost"] is None
    assert legs[3]["decode_cost"] == newest(fleet)["pair"]["decode"]["cost"]


@pytest.mark.parametrize("letter", ["a", "\N{GRINNING FACE}"])
@pytest.mark.parametrize("member", ["selection_id", "reservation_id"])
def test_ids_as_long_as_a_body_are_paid_for(member: str, letter: str) -> None:
    fleet = fleet_of(1, ring=100, size=1 << 20)
    length = 100_000
    for number in range(40):
        name: dict[str, Any] = {"reservation_id": f"r{number}"}
        name[member] = letter * length + str(number)
        request = SelectAndReserveRequest(
            block_hashes=[1], sequence_hashes=[1], isl_tokens=16, explain=True, **name
        )
        fleet.core.selection.select_and_reserve(request, fleet.now)
        fleet.core.check()
        each = length * (1 if letter == "a" else 4)
        assert each * len(fleet.core.decisions) <= 1 << 20
        assert each * len(fleet.core.decisions._explained) <= EXPLAINED_BYTES_MAX


def test_who_repeats_a_booking_does_not_search_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = fleet_of(1)
    request = SelectAndReserveRequest(
        block_hashes=[1], sequence_hashes=[1], isl_tokens=16, reservation_id="r"
    )
    first, _ = fleet.core.selection.select_and_reserve(request, fleet.now)

    def searched(_: str) -> None:
        raise AssertionError

    monkeypatch.setattr(fleet.core.decisions, "find", searched)
    again, _ = fleet.core.selection.select_and_reserve(request, fleet.now)
    assert again == first
