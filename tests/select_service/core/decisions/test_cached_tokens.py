"""What engines found reaches the replica that predicted it, whichever received it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from select_service.core.replication.checksum import with_checksum
from select_service.core.replication.message_codec import (
    MalformedReplicaMessage,
    decode_message,
    encode_message,
)
from select_service.core.replication.messages import (
    CACHED_TOKENS_MAX,
    CACHED_TOKENS_TOPIC,
    LOADS_TOPIC,
    OWN_TOPIC,
    CachedTokens,
)
from select_service.errors import InvalidField, ReservationNotFound
from select_service.types import BatchFree, BatchPrefillComplete, CoreLimits
from tests.select_service.core.decisions.doubted import ISL, PROMPT, trust
from tests.select_service.core.fleet.test_kv_events import blind, matched
from tests.select_service.core.replication.replica import Replica
from tests.select_service.core.whole_fleet import Fleet


class Company:
    """Replicas on one plane; `publish` delivers what one of them has just said."""

    def __init__(self, count: int = 2, make: Callable[[int], Replica] = Replica) -> None:
        self.replicas = [make(1000 * number) for number in range(1, count + 1)]
        for _ in range(3):
            self.turn(1.0)
        self.sent: list[CachedTokens] = []

    def publish(self, source: Replica, said: list[Any] | None = None) -> None:
        for message in source.effects.published if said is None else said:
            topic, payload = encode_message(message)
            read = decode_message(topic, with_checksum(payload))
            if isinstance(read, CachedTokens):
                self.sent.append(read)
            for one in self.replicas:
                if one is not source:
                    one.hears(read, peer=f"tcp://of:{source.router_id}")

    def turn(self, seconds: float = 0.1) -> None:
        for one in self.replicas:
            self.publish(one, one.turn(seconds))

    def take(self, at: int, name: str = "r", **wishes: Any) -> None:
        one = self.replicas[at]
        one.take(name, *PROMPT, isl=ISL, allowed_worker_ids=[1], **wishes)
        self.publish(one)

    def done(self, at: int, name: str = "r", found: int | None = None) -> None:
        one = self.replicas[at]
        one._did(one.core.reservations.prefill_complete(name, one.now, found))
        self.publish(one)

    def free(self, at: int, name: str = "r", found: int | None = None) -> None:
        one = self.replicas[at]
        one._did(one.core.reservations.free(name, one.now, found))
        self.publish(one)

    def samples(self, worker_id: int = 1) -> list[int]:
        return [trust(one, worker_id).samples for one in self.replicas]

    def outcomes(self) -> list[dict[str, int]]:
        return [one.core.counters.cached_token_reports for one in self.replicas]


def holding(router_id: int) -> Replica:
    made = Replica(router_id)
    made.hold(1, list(PROMPT))
    return made


def of_pairs(router_id: int) -> Replica:
    made = Replica.__new__(Replica)
    Fleet.__init__(made, router_id=router_id)
    made.router_id = router_id
    made.worker(1, role="prefill")
    made.worker(2, role="decode")
    made.hold(1, list(PROMPT))
    return made


def estimating(router_id: int) -> Replica:
    made = Replica.__new__(Replica)
    Fleet.__init__(made, router_id=router_id)
    made.router_id = router_id
    blind(1, made)
    return made


COMPARED = {"compared": 1}
TOLD = {"told_replicas": 1}


@pytest.mark.parametrize("is_ended", [False, True])
def test_a_completion_elsewhere_before_and_after_the_end(*, is_ended: bool) -> None:
    company = Company(make=holding)
    company.take(0)
    if is_ended:
        company.free(0)
        with pytest.raises(ReservationNotFound):
            company.done(1, found=64)
    else:
        company.done(1, found=64)
    assert company.samples() == [0, 0]
    company.turn()
    assert company.samples() == [1, 0]
    assert company.outcomes() == [COMPARED, TOLD]
    assert trust(company.replicas[0], 1).missing_share == 0.5
    company.turn()
    assert len(company.sent) == 1, "nobody sends it on"


def test_an_end_elsewhere_and_its_repeats() -> None:
    """The end is sent at once, so it is there before what was found."""
    company = Company(make=holding)
    company.take(0)
    company.free(1, found=64)
    company.free(1, found=0)
    company.turn()
    company.free(1, found=0)
    company.turn()
    assert company.samples() == [1, 0]
    assert trust(company.replicas[0], 1).missing_share == 0.5, "the first one counts"
    assert company.outcomes()[0] == COMPARED
    assert company.replicas[0].load(1) == company.replicas[1].load(1) == (0, 0, 0)


def test_of_three_replicas_the_one_that_predicted_compares_once() -> None:
    company = Company(3, holding)
    company.take(1)
    for at in (0, 2, 0):
        company.done(at, found=64)
    company.turn()
    company.done(2, found=0)
    company.free(0)
    company.turn()
    assert company.samples() == [0, 1, 0]
    assert company.outcomes() == [
        TOLD | {"repeated": 1},
        COMPARED,
        TOLD | {"repeated": 1},
    ]
    assert trust(company.replicas[1], 1).missing_share == 0.5


def test_the_end_and_the_report_may_come_from_two_others() -> None:
    company = Company(3, holding)
    company.take(0)
    company.done(1)
    company.free(1)
    with pytest.raises(ReservationNotFound):
        company.done(2, found=64)
    company.turn()
    assert company.samples() == [1, 0, 0]


@pytest.mark.parametrize("receiver", [0, 1])
def test_every_replica_corrects_its_estimate_whoever_is_told(receiver: int) -> None:
    """A rank is silent for all of them, so each has an estimate of its own."""
    company = Company(3, estimating)
    before = (*PROMPT[:4], 99)

    def held() -> list[tuple[int, int]]:
        return [(matched(one, 1, *PROMPT), matched(one, 1, *before)) for one in company.replicas]

    first = company.replicas[0]
    first.take("before", *before)
    company.publish(first)
    company.done(0, "before")
    company.free(0, "before")
    assert held() == [(4, 5)] * 3
    company.turn(1.0)
    company.take(0)
    company.turn(1.0)
    company.done(receiver, found=32)
    company.turn()
    assert held() == [(8, 4)] * 3, "what the other prompt had behind it has gone"
    assert company.samples() == [1, 0, 0]
    assert not company.outcomes()[2]


@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("is_ended", [False, True])
def test_of_a_pair_its_prefill_leg(*, is_done: bool, is_ended: bool) -> None:
    company = Company(make=of_pairs)
    first = company.replicas[0]
    first.pair("p", *PROMPT, isl=ISL)
    company.publish(first)
    if is_done:
        company.done(0, "p")
    if is_ended:
        company.free(0, "p")
        with pytest.raises(ReservationNotFound):
            company.done(1, "p", 64)
    else:
        company.free(1, "p", 64)
    company.turn()
    assert company.samples() == [1, 0]
    assert company.samples(2) == [0, 0]
    assert trust(first, 1).missing_share == 0.5


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("is_ended", [False, True])
def test_by_selection_id(at: int, *, is_ended: bool) -> None:
    company = Company(make=holding)
    company.take(0, selection_id="s")
    if is_ended:
        company.free(0, "s")
    company.free(at, "s", 64)
    company.turn()
    assert company.samples() == [1, 0]


def test_where_its_worker_is_not_registered() -> None:
    company = Company(make=holding)
    company.replicas[1].delete(1)
    company.take(0)
    company.done(1, found=64)
    company.turn()
    assert company.outcomes() == [COMPARED, TOLD]
    assert trust(company.replicas[0], 1).missing_share == 0.5


def test_in_a_batch() -> None:
    company = Company(make=holding)
    first, second = company.replicas
    for name in ("r", "s", "t"):
        company.take(0, name)
    company.free(0, "r")
    operate = second.core.reservations.operate
    results = []
    for operation in (
        BatchPrefillComplete(reservation_id="r", cached_tokens=64),
        BatchPrefillComplete(reservation_id="s", cached_tokens=64),
        BatchFree(reservation_id="t", cached_tokens=64),
        BatchFree(reservation_id="t", cached_tokens=ISL + 1),
        BatchPrefillComplete(reservation_id="nobody's", cached_tokens=64),
    ):
        result, effects = operate(operation, second.now)
        second._did(effects)
        company.publish(second)
        results.append((result.status, result.ended))
    company.turn()
    assert company.samples() == [3, 0]
    assert results == [
        (404, True),
        (200, msgspec.UNSET),
        (200, msgspec.UNSET),
        (200, msgspec.UNSET),
        (404, msgspec.UNSET),
    ]
    assert company.outcomes() == [{"compared": 3}, {"told_replicas": 4, "elsewhere": 1}]
    assert first.core.counters.cached_token_reports == {"compared": 3}


def test_more_than_the_prompt_is_long() -> None:
    """Of what is live everybody can report; of what has ended only its owner."""
    company = Company(make=holding)
    company.take(0)
    with pytest.raises(InvalidField, match="must not exceed isl_tokens"):
        company.done(1, found=ISL + 1)
    company.free(0)
    company.free(1, found=ISL + 1)
    company.turn()
    assert company.samples() == [0, 0]
    assert company.outcomes() == [{"impossible": 1}, TOLD]
    company.free(1, found=64)
    company.turn()
    assert company.samples() == [1, 0]


def test_of_what_nobody_here_has_known_nobody_is_told() -> None:
    company = Company(make=holding)
    for name in ("x", "y"):
        with pytest.raises(ReservationNotFound):
            company.done(1, name, 64)
    company.take(0)
    company.free(0, found=64)
    company.turn()
    assert company.sent == []
    assert company.outcomes() == [COMPARED, {"elsewhere": 2}]


def test_alone_nothing_is_told() -> None:
    fleet = Fleet()
    fleet.worker(1)
    fleet.take("r", *PROMPT, isl=ISL)
    fleet.core.reservations.free("r", fleet.now, 0)
    fleet.core.reservations.free("r", fleet.now, 0)
    assert fleet.core.counters.cached_token_reports == {"compared": 1, "elsewhere": 1}
    assert fleet.core.cached_tokens.take_unsent(9) == []


def test_an_id_that_is_used_again_is_compared_for_itself_only() -> None:
    company = Company(make=holding)
    company.take(0)
    company.free(0)
    company.take(1)
    company.free(1, found=0)
    company.turn()
    company.free(0, found=0)
    company.turn()
    assert company.samples() == [0, 1]


def test_no_more_is_told_than_waits_for_a_turn_and_no_tenant_takes_it_all() -> None:
    company = Company(make=holding)
    first, second = company.replicas
    for one in company.replicas:
        one.core.name_tenants(("acme", "rival"), others=True)
    reports = second.core.cached_tokens
    reports._may_be_known_elsewhere = lambda _: True
    reports.report("rival:r", 1, second.now)
    most = CoreLimits().cached_token_reports_max
    for number in range(most + 5):
        reports.report(f"acme:{number}", 1, second.now)
    company.turn()
    sizes = [len(one.reports) for one in company.sent]
    assert max(sizes) <= CACHED_TOKENS_MAX
    assert 0 < sum(sizes) <= most
    outcomes = second.core.counters.cached_token_reports
    assert outcomes["told_replicas"] - outcomes["left_out"] == sum(sizes)
    assert any(tuple(one) == ("rival:r", 1) for message in company.sent for one in message.reports)
    assert second.core.cached_tokens.take_unsent(9) == []
    assert first.core.counters.cached_token_reports == {}


@pytest.mark.parametrize(
    ("peer", "router_id"), [("tcp://other:1", 2000), ("tcp://of:2000", 77)], ids=["peer", "name"]
)
def test_only_a_replica_that_is_alive_is_believed_and_once(peer: str, router_id: int) -> None:
    company = Company(make=holding)
    first = company.replicas[0]
    company.take(0)
    first.hears(CachedTokens(router_id, 1, 9, [("r", 0)]), peer=peer)
    assert company.samples() == [0, 0]
    first.hears(CachedTokens(2000, 1, 9, [("x", 0)]), peer="tcp://of:2000")
    for number in (8, 9):
        first.hears(CachedTokens(2000, 1, number, [("r", 0)]), peer="tcp://of:2000")
    assert company.samples() == [0, 0]
    assert first.core.replicas.counters.repeated == 2
    first.hears(CachedTokens(2000, 1, 10, [("r", 0)]), peer="tcp://of:2000")
    assert company.samples() == [1, 0]


def test_on_a_topic_of_its_own_and_within_bounds() -> None:
    message = CachedTokens(1, 1, 1, [("r", 5)] * CACHED_TOKENS_MAX)
    topic, payload = encode_message(message)
    assert topic == CACHED_TOKENS_TOPIC
    assert not topic.startswith((OWN_TOPIC, LOADS_TOPIC)), "what older versions subscribe to"
    assert decode_message(topic, payload) == message
    raw = msgspec.msgpack.decode(payload)
    for other in (
        {"reports": [("r", 5)] * (CACHED_TOKENS_MAX + 1)},
        {"reports": [("r", -1)]},
        {"reports": [("r", 2**64 - 1, 1)]},
        {"reports": [(1, 1)]},
        {"epoch": 0},
        {"type": "loads"},
    ):
        with pytest.raises(MalformedReplicaMessage):
            decode_message(topic, msgspec.msgpack.encode(raw | other))
    for wrong in (OWN_TOPIC, LOADS_TOPIC):
        with pytest.raises(MalformedReplicaMessage):
            decode_message(wrong, payload)
