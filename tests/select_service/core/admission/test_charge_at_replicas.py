"""What one replica admitted is charged once at every other one, whatever becomes of its owner."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from select_service.core.admission.slo_shed import SloShed
from select_service.core.replication.dynamo_events import ReplicaEnvelope, Stamp
from select_service.core.replication.message_codec import decode_message, encode_message
from select_service.core.replication.messages import Heartbeat, Said
from select_service.core.state import RESERVATION
from select_service.errors import InvalidField
from select_service.types import Selection
from select_service.types.admission import AdmissionSettings, ChargedRequest
from tests.select_service.core.admission.gated import keeper_of
from tests.select_service.core.admission.test_charge import SIZE, charged, replicas
from tests.select_service.core.replication.replica import Replica, pulled, silent, tell
from tests.select_service.core.test_state import Disk
from tests.select_service.core.whole_fleet import Fleet

WISHES: dict[str, Any] = {
    "slo_class": "batch",
    "fairness_id": "alice",
    "expected_output_tokens": 512,
}
EXPECTED = SIZE + 2 * 512
CAME = SIZE + 2 * 80
"""After four blocks: at most so much."""


def replica(router_id: int, epoch: int = 1) -> Replica:
    made = Replica.__new__(Replica)
    admission = AdmissionSettings(policy="slo-shed")
    Fleet.__init__(made, router_id=router_id, epoch=epoch, admission=admission)
    made.core.replica_operations.announce(8092)
    made.worker(1)
    return made


@pytest.mark.parametrize("heir", [1, 3])
@pytest.mark.parametrize("order", ["adoption first", "end first"])
def test_an_adoption_charges_nobody_again_and_the_end_is_still_corrected(
    heir: int, order: str
) -> None:
    """Whichever of the two claims is booked in between, and whichever is received first."""
    owner, here, third = replica(2), replica(heir), replica(4)
    assert isinstance(owner.take("a", 1, **WISHES), Selection)
    tell(owner, here)
    tell(owner, third)
    silent(here)
    here.done("a")
    third.hears(*here.effects.published, peer="tcp://heir:1")
    (adoption,) = (one for one in here.turn() if isinstance(one, Said))
    if order == "end first":  # as another replica sends it
        third.hears(Heartbeat(heir, 1, adoption.seq - 1, 0, 0), peer="tcp://heir:1")
        third.hears(Said(2, 1, 9, adoption.items[1:]))
        assert charged(third, "alice") == EXPECTED
    third.hears(adoption, peer="tcp://heir:1")
    assert third.load(1) == here.load(1)
    assert charged(third, "alice") == charged(here, "alice") == EXPECTED
    here.core.reservations.output_block("a", None, here.now, 4)
    for message in here.turn(here.core.limits.replica_output_interval_s):
        third.hears(message, peer="tcp://heir:1")
    here.free("a")
    for message in here.effects.published:
        third.hears(message, peer="tcp://heir:1")
    assert third.load(1) == (0, 0, 0)
    assert charged(third, "alice") == charged(here, "alice") == CAME


def test_an_owner_that_restarts_takes_back_no_charge() -> None:
    """It does not know any more what was charged, and states the same claim without."""
    here, there = replicas(have_met=False)
    disk = Disk(here.core.keep_changes())
    assert isinstance(here.take("a", 1, **WISHES), Selection)
    tell(here, there)
    disk.write(here)
    again = replica(1, epoch=2)
    for key, row in disk.rows.items():
        if key[0] == RESERVATION:
            assert again.core.state.restore(key, row, again.now) is not None
    there.hears(*again.turn(again.core.limits.replica_heartbeat_s))
    there.now = again.now
    there.pulls = there.core.replica_operations.tick(there.now)[1].pulls
    pulled(there, again)
    assert there.core.replicas.counters.claims_corrected == 0
    assert charged(there, "alice") == EXPECTED
    there.core.reservations.output_block("a", None, there.now, 4)
    there.free("a")
    assert charged(there, "alice") == CAME


def test_duplicates_are_charged_once() -> None:
    here, there = replicas()
    assert isinstance(here.take("a", 1, **WISHES), Selection)
    said = list(here.effects.published)
    for _ in range(3):
        tell(here, there, said)
    assert charged(there, "alice") == EXPECTED
    here.core.reservations.output_block("a", None, here.now, 4)
    tell(here, there, here.turn(here.core.limits.replica_output_interval_s))
    here.free("a")
    for _ in range(2):
        tell(here, there)
        tell(here, there, said)
    assert charged(there, "alice") == CAME


def test_tokens_of_a_warm_prompt_are_told() -> None:
    here, there = replicas()
    for one in (here, there):
        one.hold(1, [1, 2, 3])
    assert isinstance(here.take("a", 1, 2, 3, 4, slo_class="batch", fairness_id="alice"), Selection)
    tell(here, there)
    assert charged(there, "alice") == charged(here, "alice") > 0


@pytest.mark.parametrize(
    ("slo_class", "tenant", "is_charged"),
    [("unheard-of", "alice", True), ("batch", "a" * 257, False), ("batch", "a" * 256, True)],
)
def test_names_that_a_client_may_not_use_are_not_kept_for_replicas_either(
    slo_class: str, tenant: str, is_charged: bool
) -> None:
    here, there = replicas()
    assert isinstance(here.take("a", 1, slo_class="batch", fairness_id="alice"), Selection)
    (said,) = here.effects.published
    assert isinstance(said, ReplicaEnvelope)
    assert isinstance(said.select_service, Stamp)
    charge = ChargedRequest(slo_class, SIZE)
    stamp = replace(said.select_service, charged=charge, fairness_id=tenant)
    tell(here, there, [replace(said, select_service=stamp)])
    lines = range(6)
    assert there.load(1) == here.load(1)
    assert there.core.replicas.counters.ignored == (not is_charged)
    assert sum(charged(there, tenant, line) for line in lines) == SIZE * is_charged


def aim(some: Fleet) -> float:
    """The time for which its ranks are kept free, in seconds."""
    policy = keeper_of(some).gate.queue
    assert isinstance(policy, SloShed)
    assert policy.queue.waiting == 0  # and what is pending is charged
    return policy.target_ttft_s


@pytest.mark.parametrize("told_ms", [250.0, 400.0, 15_000.0])
def test_targets_that_requests_bring_are_told(told_ms: float) -> None:
    """A replica that gets only batch work must leave room for what others promise."""
    here, there = replicas()
    for number in range(200):
        taken = here.take(str(number), 1, slo_class="critical", slo_ttft_ms=told_ms)
        assert isinstance(taken, Selection)
        tell(here, there)
        here.free(str(number))
        tell(here, there)
    assert aim(here) == aim(there)
    assert min(told_ms, 5_000.0) / 2e3 == pytest.approx(aim(there), rel=0.2)


@pytest.mark.parametrize(("told_s", "aim_s"), [(1e-300, 0.1), (1e300, 2.5)])
def test_a_target_counts_within_a_tenfold_of_its_class_wherever_it_comes_from(
    told_s: float, aim_s: float
) -> None:
    """The next class up, of 5 s, counts where those of the first have more time than that."""
    here, there = replicas()
    for number in range(400):
        name = str(number)
        ms = min(told_s * 1e3, 1e303)
        assert isinstance(here.take(name, 1, slo_class="critical", slo_ttft_ms=ms), Selection)
        (said,) = here.effects.published
        assert isinstance(said, ReplicaEnvelope)
        assert isinstance(said.select_service, Stamp)
        stamp = replace(said.select_service, charged=ChargedRequest("critical", SIZE, told_s))
        tell(here, there, [replace(said, select_service=stamp)])
        here.free(name)
        tell(here, there)
    assert aim(here) == aim(there) == pytest.approx(aim_s, rel=0.01)


@pytest.mark.parametrize("told_ms", [5e-324, 1e-320, 1e-3, 1.7e308, math.inf])
def test_replicas_read_whatever_target_a_client_may_ask_for(told_ms: float) -> None:
    """What they cannot read they do not book, in snapshots neither."""
    here, there = replicas()
    taken = here.take("a", 1, slo_class="critical", slo_ttft_ms=told_ms)
    assert isinstance(taken, Selection)
    read = [decode_message(*encode_message(one)) for one in here.effects.published]
    tell(here, there, read)
    assert there.load(1) == here.load(1) != (0, 0, 0)
    assert aim(here) == aim(there)


@pytest.mark.parametrize("target_ms", [math.nan, -1.0, 0.0])
def test_targets_that_are_none_are_refused_in_the_same_process_too(target_ms: float) -> None:
    """The mean of all targets would be none either, here and at every replica."""
    here, _ = replicas()
    before = aim(here)
    with pytest.raises(InvalidField, match="slo_ttft_ms must be above 0"):
        here.take("a", 1, slo_class="critical", slo_ttft_ms=target_ms)
    assert aim(here) == before


@pytest.mark.parametrize("form", [["batch", 16], ["batch", 16, None], ["batch", 16, 0.5, "more"]])
def test_shorter_and_longer_forms_are_read(form: list[object]) -> None:
    """Of the version before targets were sent, and of one that will send more."""
    packed = msgspec.msgpack.encode(form)
    read = msgspec.msgpack.decode(packed, type=ChargedRequest)
    assert (read.slo_class, read.prefill_tokens) == ("batch", 16)


@pytest.mark.parametrize("target_s", [math.nan, -1.0, 0.0, "1"])
def test_targets_that_are_none_are_refused(target_s: object) -> None:
    packed = msgspec.msgpack.encode(["batch", 16, target_s])
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(packed, type=ChargedRequest)
