"""Which path a pull is priced by and learnt for: that of the nearest level, whatever it costs."""

from __future__ import annotations

import pytest

from select_service.core.decisions.explain import ExplainedRecord
from select_service.core.ledger.pull_speeds import PATHS_MAX, PullPath, PullSpeeds
from select_service.core.ledger.rank_speeds import SURE, RankSpeeds
from select_service.types import PulledBlocks, RouterConfig
from tests.select_service.core.whole_fleet import DEFAULT, Fleet, selection_of

BLOCK, TOKEN_S = 16, 1e-3
RACK, FAR = PullPath("rack", "device"), PullPath("", "device")


def racks() -> Fleet:
    """Two workers in a rack, one in another; a rack is set too cheap, and was measured."""
    config = RouterConfig(kv_pull=True, kv_transfer_cost_by_domain={"rack": 0.02})
    fleet = Fleet(config)
    for worker_id, rack in ((1, "a"), (2, "a"), (3, "b")):
        fleet.worker(worker_id, topology_domains={"rack": rack})
    loads = fleet.core.partitions[DEFAULT].ledger.loads
    for _ in range(2 * SURE):
        for slot in range(3):
            loads.speeds.computed(slot, 1_000, 1_000 * TOKEN_S)
        loads.pull_speeds.pulled(1, RACK, 30, 0, 30 * 0.3 * BLOCK * TOKEN_S)
    return fleet


def test_a_pull_within_a_rack_that_was_set_too_cheap_teaches_nothing_of_others() -> None:
    fleet = racks()
    partition = fleet.core.partitions[DEFAULT]
    (near,) = partition.fleet_slots.workers[2].slots.values()
    (far,) = partition.fleet_slots.workers[3].slots.values()
    pulled = PulledBlocks(1, 30)
    assert partition.pull_path(near, pulled) == RACK
    assert partition.pull_path(far, pulled) == FAR


def test_a_pull_within_a_rack_is_priced_as_it_was_measured() -> None:
    fleet = racks()
    fleet.hold(1, list(range(100, 130)))
    for number in range(8):
        fleet.book(f"busy{number}", 1, *range(9_000 + 50 * number, 9_050 + 50 * number))
    selection_of(fleet.take("r", *range(100, 132)))
    record = fleet.core.decisions.find("r")
    assert record is not None
    candidates = ExplainedRecord(record, 0.0, 0.1).whole().candidates or ()
    cost = {one.worker_id: one.pull_cost or 0.0 for one in candidates}
    assert cost[2] > 2 * cost[3] > 0.0, "the far one is as it was set: nobody measured it"


def test_a_replica_hears_of_a_pull_before_it_priced_any() -> None:
    """Between the first two of three ranks: the table by slot has all of them."""
    fleet = Fleet(RouterConfig(kv_pull=True))
    for worker_id in (1, 2, 3):
        fleet.worker(worker_id)
    partition = fleet.core.partitions[DEFAULT]
    assert partition.pull_path(1, PulledBlocks(1, 30)) == FAR
    fleet.worker(4)
    assert partition.pull_path(1, PulledBlocks(1, 30)) == FAR


@pytest.mark.parametrize("came", [0, 6])
def test_blocks_that_stay_away_teach_nothing_where_most_were_there_already(came: int) -> None:
    """Of 32 blocks the rank holds 24 and pulls 6."""
    fleet = Fleet(RouterConfig(kv_pull=True))
    for worker_id in (1, 2):
        fleet.worker(worker_id)
    loads = fleet.core.partitions[DEFAULT].ledger.loads
    for _ in range(2 * SURE):
        loads.speeds.computed(1, 1_000, 1_000 * TOKEN_S)
    for number in range(8):
        fleet.book(f"busy{number}", 1, *range(9_000 + 50 * number, 9_050 + 50 * number))
    fleet.hold(1, list(range(100, 130)))
    fleet.hold(2, list(range(100, 124)))
    source = selection_of(fleet.take("r", *range(100, 132))).kv_source
    assert source
    assert (source.worker_id, source.blocks) == (1, 6)
    fleet.now += (32 - 24 - came) * BLOCK * TOKEN_S
    fleet.core.reservations.prefill_complete("r", fleet.now, (24 + came) * BLOCK)
    fleet.now += 1.0
    fleet.free("r")
    assert bool(loads.pull_speeds.by_path) == bool(came)


def test_paths_have_a_bound_and_time_does_not_go_back() -> None:
    ranks = RankSpeeds()
    for tokens in range(100, 100 + 20 * SURE, 20):
        ranks.computed(0, tokens, tokens / 1000)
    speeds = PullSpeeds(ranks)
    speeds.pulled(0, PullPath("early", "device"), 8, 100, -1.0)
    assert not speeds.by_path
    for number in range(PATHS_MAX + 1):
        speeds.pulled(0, PullPath(f"rack{number}", "device"), 8, 100, 0.5)
    assert len(speeds.by_path) == PATHS_MAX


def test_of_domains_that_cost_the_same_every_replica_takes_the_same_one() -> None:
    """Not the one that a set has first, which differs from process to process."""
    names = [f"level{number}" for number in range(10)]
    fleet = Fleet(RouterConfig(kv_pull=True, kv_transfer_cost_by_domain=dict.fromkeys(names, 0.0)))
    for worker_id in (1, 2):
        fleet.worker(worker_id, topology_domains=dict.fromkeys(names, "a"))
    partition = fleet.core.partitions[DEFAULT]
    (slot,) = partition.fleet_slots.workers[2].slots.values()
    assert partition.pull_path(slot, PulledBlocks(1, 30)) == PullPath("level0", "device")
