"""What engines found, reported with a completed prefill; and whatever happens, promises hold."""

from __future__ import annotations

import contextlib
import gc
import random
import weakref
from typing import Any

import pytest

from indexer.core.packing import pack_u64
from indexer.types import Tier, WorkerRank
from select_service.core.ledger.freed_ids import FREED_MEMORY_S
from select_service.core.ledger.reservation_ids import LiveReservation
from select_service.errors import InvalidField, ReservationNotFound, ServiceError
from select_service.types import PairSelection, RouterConfigOverride, SelectAndReserveRequest
from tests.select_service.core.decisions.doubted import (
    FINDABLE,
    ISL,
    PROMPT,
    fleet_of,
    serve,
    trust,
)
from tests.select_service.core.test_state import Disk, restored
from tests.select_service.core.whole_fleet import DEFAULT, Fleet


def outcomes(fleet: Fleet) -> dict[str, int]:
    return fleet.core.counters.cached_token_reports


# -- what is reported ----------------------------------------------------------------------------


def test_who_sits_elsewhere_by_its_turn_is_told_of_as_it_is() -> None:
    fleet = fleet_of()
    fleet.hold(2, list(PROMPT))
    first, second = fleet.core.trust_monitor.trusted_ranks()
    for number in (1, 2):
        fleet.delete(number)
    fleet.worker(2)  # where the other was
    fleet.hold(2, list(PROMPT))
    serve(fleet, 2, 96)
    assert fleet.core.trust_monitor.row(*second).samples == 1
    fleet.worker(1, tenant_id="another")
    gone = fleet.core.trust_monitor.row(*first)
    assert (gone.samples, gone.trust, gone.index.state) == (0, 1.0, "none")


def test_the_last_token_is_never_found() -> None:
    fleet = fleet_of()
    fleet.hold(1, list(PROMPT))
    fleet.take("r", *PROMPT, allowed_worker_ids=[1])  # 128 tokens, of which 112 can be cached
    fleet.core.reservations.prefill_complete("r", fleet.now, 112)
    assert trust(fleet, 1).missing_share == 0.0


def test_a_report_may_come_with_a_repeat_of_the_completion() -> None:
    """vLLM reports in the last chunk of a stream what it found before the first."""
    fleet = fleet_of()
    fleet.hold(1, list(PROMPT))
    fleet.take("r", *PROMPT, isl=ISL)
    fleet.core.reservations.prefill_complete("r", fleet.now)
    assert trust(fleet, 1).samples == 0
    fleet.core.reservations.prefill_complete("r", fleet.now, 128)
    fleet.core.reservations.prefill_complete("r", fleet.now, 0)
    assert trust(fleet, 1).samples == 1
    assert trust(fleet, 1).missing_share == 0.0
    assert outcomes(fleet) == {"compared": 1, "repeated": 1}


def test_a_report_may_come_with_the_end_or_after_it() -> None:
    fleet = fleet_of()
    fleet.hold(1, list(PROMPT))
    free = fleet.core.reservations.free
    for samples, name in enumerate(("with", "after"), 1):
        fleet.take(name, *PROMPT, isl=ISL)
        if name == "after":
            free(name, fleet.now)
        with pytest.raises(InvalidField, match="must not exceed isl_tokens"):
            free(name, fleet.now, ISL + 1)
        free(name, fleet.now, 128)
        free(name, fleet.now, 0)
        assert trust(fleet, 1).samples == samples
    assert trust(fleet, 1).missing_share == 0.0
    assert outcomes(fleet) == {"compared": 2, "elsewhere": 1, "repeated": 1}
    assert fleet.load(1) == (0, 0, 0)


def test_ended_reservations_are_remembered_for_a_while_and_for_their_rank() -> None:
    """Each takes one place, under however many names it may be reported."""
    fleet = fleet_of()
    fleet.core.limits.cached_token_reports_max = 4
    fleet.hold(1, list(PROMPT))
    reports = fleet.core.cached_tokens
    for number in range(5):
        wishes = {"selection_id": f"s{number}", "allowed_worker_ids": [1]}
        fleet.take(f"r{number}", *PROMPT, isl=ISL, **wishes)
        fleet.core.reservations.free(f"r{number}", fleet.now)
    for name in ("r0", "s0"):
        reports.report(name, 128, fleet.now)
    assert outcomes(fleet) == {"elsewhere": 2}
    assert reports.lost == 1
    reports.report("s1", 128, fleet.now)
    assert outcomes(fleet) == {"elsewhere": 2, "compared": 1}
    fleet.delete(1)
    reports.report("r2", 128, fleet.now)
    assert outcomes(fleet) == {"elsewhere": 3, "compared": 1}


@pytest.mark.parametrize("again", ["booked", "selected", "unpredicted"])
def test_a_name_that_is_used_again_leaves_none_behind(again: str) -> None:
    """Other names take no place, so that only the one with the place bounds their number."""
    fleet = fleet_of()
    fleet.core.limits.cached_token_reports_max = 4
    fleet.hold(1, list(PROMPT))
    reports = fleet.core.cached_tokens

    def end(name: str, selection_id: str, *blocks: int) -> None:
        wishes = {"selection_id": selection_id, "allowed_worker_ids": [1]}
        fleet.take(name, *blocks, isl=ISL, **wishes)
        fleet.core.reservations.free(name, fleet.now)

    for number in range(20):
        end("r", f"s{number}", *PROMPT)
        if again == "selected":
            end("other", "r", *PROMPT)
        elif again == "unpredicted":
            fleet.book("r", 1, *PROMPT, isl=ISL)
            fleet.core.reservations.free("r", fleet.now)
    assert len(reports._freed) <= 2 * 4


def test_what_is_remembered_of_an_ended_reservation_does_not_keep_it() -> None:
    """The next bookings take the memory that the last ones left, which is still in a cache."""
    fleet = fleet_of()
    fleet.hold(1, list(PROMPT))
    for number in range(8):
        fleet.take(f"r{number}", *PROMPT, isl=ISL)
        fleet.core.reservations.free(f"r{number}", fleet.now)
    assert len(fleet.core.cached_tokens._freed) == 8
    ours = list(fleet.core.partitions.values())
    kept = [one for one in gc.get_objects() if type(one) is LiveReservation]
    assert not [one for one in kept if one.partition in ours]


def test_what_is_remembered_keeps_no_service_that_is_gone() -> None:
    """It knows its partition, and through that everything: the collector must see it."""
    fleet = fleet_of()
    fleet.hold(1, list(PROMPT))
    fleet.take("r", *PROMPT, isl=ISL)
    fleet.core.reservations.free("r", fleet.now)
    gone = weakref.ref(fleet.core)
    del fleet
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("theirs", ["own", "second"])
def test_a_second_name_that_is_now_anothers_is_not_forgotten(theirs: str) -> None:
    fleet = fleet_of()
    fleet.hold(1, list(PROMPT))
    for name, wishes in (
        ("a", {"selection_id": "x"}),
        ("x", {}) if theirs == "own" else ("b", {"selection_id": "x"}),
        ("a", {}),
    ):
        fleet.take(name, *PROMPT, isl=ISL, **wishes)
        fleet.core.reservations.free(name, fleet.now)
    for name in ("x", "a"):
        fleet.core.cached_tokens.report(name, 128, fleet.now)
    assert outcomes(fleet) == {"compared": 2}


def test_an_ended_reservation_is_forgotten_with_its_id() -> None:
    fleet = fleet_of()
    fleet.hold(1, list(PROMPT))
    request = SelectAndReserveRequest(
        reservation_id="r",
        block_hashes=list(PROMPT),
        sequence_hashes=list(PROMPT),
        isl_tokens=ISL,
    )
    fleet.core.selection.select_and_reserve(request, fleet.now)
    fleet.core.reservations.free("r", fleet.now)
    later = fleet.now + FREED_MEMORY_S
    fleet.core.cached_tokens.purge(later)
    fleet.core.cached_tokens.report("r", 128, later)
    assert outcomes(fleet) == {"elsewhere": 1}


def test_only_the_first_report_counts() -> None:
    fleet = fleet_of()
    fleet.hold(1, list(PROMPT))
    fleet.take("r", *PROMPT, isl=ISL)
    for found in (128, 0, 0):
        fleet.core.reservations.prefill_complete("r", fleet.now, found)
    assert trust(fleet, 1).samples == 1
    assert outcomes(fleet) == {"compared": 1, "repeated": 2}


def test_who_was_booked_without_a_selection_has_no_prediction() -> None:
    fleet = fleet_of()
    fleet.hold(1, list(PROMPT))
    fleet.book("r", 1, *PROMPT, isl=ISL, effective_prefill_tokens=8)
    fleet.core.reservations.prefill_complete("r", fleet.now, 0)
    assert outcomes(fleet) == {"unpredicted": 1}
    with pytest.raises(ReservationNotFound):
        fleet.core.reservations.prefill_complete("nobody", fleet.now, 0)


def test_by_selection_id_and_without_tracking() -> None:
    fleet = fleet_of()
    fleet.hold(1, list(PROMPT))
    override = RouterConfigOverride(track_prefill_tokens=False)
    fleet.take("r", *PROMPT, isl=ISL, selection_id="s", router_config_override=override)
    fleet.core.reservations.prefill_complete("s", fleet.now, 64)
    assert trust(fleet, 1).missing_share == 0.5


def test_what_is_held_below_the_device_may_be_found_or_not() -> None:
    fleet = fleet_of()
    fleet.hold(1, list(PROMPT[:4]))
    index = fleet.core.partitions[DEFAULT].index
    index.store(
        WorkerRank(1, 0),
        Tier.HOST_PINNED,
        1004,
        [1000 + one for one in PROMPT[4:]],
        pack_u64(list(PROMPT[4:])),
    )
    serve(fleet, 1, FINDABLE)
    assert trust(fleet, 1).missing_share == 0.0
    assert trust(fleet, 1).prediction_error == 112 - 128
    serve(fleet, 1, 64)
    assert trust(fleet, 1).missing_share == pytest.approx(48 / 112 / (1 + 15 / 16), abs=0.01)


def test_of_a_pair_the_leg_that_computes_is_asked() -> None:
    fleet = Fleet()
    fleet.worker(1, role="prefill")
    fleet.worker(2, role="decode")
    fleet.hold(1, list(PROMPT))
    answer = fleet.pair("p", *PROMPT, isl=ISL)
    assert isinstance(answer, PairSelection)
    fleet.core.reservations.prefill_complete("p", fleet.now, 0)
    fleet.core.reservations.prefill_complete("p", fleet.now, 0)
    assert trust(fleet, 1).samples == 1
    assert trust(fleet, 2).samples == 0
    assert outcomes(fleet) == {"compared": 1, "elsewhere": 1}
    fleet.pair("q", *PROMPT, isl=ISL)
    fleet.core.reservations.prefill_complete("q:decode", fleet.now, 0)
    assert outcomes(fleet)["unpredicted"] == 1
    fleet.core.reservations.prefill_complete("q:prefill", fleet.now, 128)
    assert trust(fleet, 1).samples == 2


def test_one_worker_that_does_better_than_a_pair() -> None:
    fleet = Fleet()
    fleet.worker(1)
    fleet.hold(1, list(PROMPT))
    fleet.pair("p", *PROMPT, isl=ISL)
    fleet.core.reservations.prefill_complete("p", fleet.now, 64)
    assert trust(fleet, 1).missing_share == 0.5


def test_a_prediction_outlives_the_process() -> None:
    fleet = fleet_of()
    disk = Disk(fleet.core.keep_changes())
    fleet.worker(1)
    fleet.hold(1, list(PROMPT))
    fleet.take("r", *PROMPT, isl=ISL, allowed_worker_ids=[1])
    disk.write(fleet)
    again = restored(disk, now=5.0)
    again.core.reservations.prefill_complete("r", again.now, 64)
    assert trust(again, 1).missing_share == 0.5


# -- whatever happens ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_every_promise_holds(seed: int) -> None:
    rng = random.Random(seed)
    fleet = fleet_of(4, samples=rng.choice([2, 16]), reread_s=rng.choice([0.5, 5.0]))
    live = [""]
    for number in range(120):
        fleet.now += rng.random()
        worker_id = rng.randrange(1, 5)
        with contextlib.suppress(ServiceError):
            match rng.randrange(7):
                case 0 | 1:
                    blocks = PROMPT[: rng.randrange(1, 9)]
                    wishes: list[dict[str, Any]] = [{}, {"cache_hit_threshold": 0.5}]
                    wish = rng.choice([*wishes, {"allowed_worker_ids": [worker_id]}])
                    fleet.take(f"r{number}", *blocks, isl=16 * len(blocks) + 3, **wish)
                    live.append(f"r{number}")
                case 2 | 3:
                    found = rng.choice([None, 0, 16, 64, 10**6])
                    fleet._did(
                        fleet.core.reservations.prefill_complete(rng.choice(live), fleet.now, found)
                    )
                case 4:
                    fleet.hold(worker_id, list(PROMPT[: rng.randrange(1, 9)]))
                case 5:
                    fleet.free(rng.choice(live))
                case _:
                    fleet.tick(rng.random() * 3)
                    if rng.random() < 0.3:
                        fleet.delete(worker_id)
                        fleet.worker(worker_id)
        fleet.core.check()
        assert all(0.0 <= one.trust <= 1.0 for one in fleet.core.trust_monitor.table().ranks)
