"""Where another rank holds more of a prompt: pulling, computing and waiting cost what they cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from indexer.core.packing import pack_u64
from indexer.core.tiers import Matches, SlotTable
from indexer.types import Tier, WorkerRank
from select_service.core.decisions.explain import ExplainedRecord
from select_service.core.pricing.cost import tier_matches
from select_service.core.pricing.estimated_matches import expecting
from select_service.core.pricing.weights import SEQUENCE_TOKENS
from select_service.core.recording.items import Decided
from select_service.simulator.recording_replay import replay
from select_service.simulator.recordings import play
from select_service.types import CoreLimits, KvSource, PairSelection, PinnedWorker, RouterConfig
from tests.models.recorded_fleet import RecordedFleet
from tests.select_service.core.batches.test_batch_selection import place, prompt
from tests.select_service.core.whole_fleet import DEFAULT, Fleet, selection_of

if TYPE_CHECKING:
    from select_service.types.router_config import Policy

PROMPT = tuple(range(1, 9))
ANYWHERE, IN_ZONE, READING = 0.5, 0.125, 0.75

WORKERS = st.lists(
    st.fixed_dictionaries(
        {
            "zone": st.sampled_from([None, "a", "b"]),
            "enforcement": st.sampled_from([None, None, None, "required"]),
            "held": st.integers(0, len(PROMPT)),
            "external": st.integers(0, 4),
            "load": st.integers(0, 6),
        }
    ),
    min_size=1,
    max_size=5,
)


def fleet_of(config: RouterConfig, workers: list[dict[str, Any]]) -> Fleet:
    fleet = Fleet(config)
    for worker_id, one in enumerate(workers, 1):
        fleet.worker(
            worker_id,
            topology_domains={} if one["zone"] is None else {"zone": one["zone"]},
            kv_transfer_domain=None if one["enforcement"] is None else "zone",
            kv_transfer_enforcement=one["enforcement"],
        )
        held, reach = one["held"], reach_of(one)
        if held:
            fleet.hold(worker_id, list(PROMPT[:held]))
        if reach > held:
            rest = PROMPT[held:reach]
            index = fleet.core.partitions[DEFAULT].index
            parent = 1000 + PROMPT[held - 1] if held else None
            names = [1000 + block for block in rest]
            rank = WorkerRank(worker_id, 0)
            index.store(rank, Tier.EXTERNAL, parent, names, pack_u64(list(rest)))
        if one["load"]:
            fleet.book(f"load{worker_id}", worker_id, *range(100, 100 + one["load"]))
    return fleet


def reach_of(one: dict[str, Any]) -> int:
    reach: int = min(len(PROMPT), one["held"] + one["external"])
    return reach


def offers(target: dict[str, Any], source: dict[str, Any]) -> list[tuple[int, float]]:
    """Blocks and their cost, as deploy/docs/policies.md says."""
    base, held, reach = reach_of(target), source["held"], reach_of(source)
    is_near = target["zone"] is not None and target["zone"] == source["zone"]
    is_bound = "required" in {target["enforcement"], source["enforcement"]}
    found = []
    if is_near or not is_bound:
        cost = IN_ZONE if is_near else ANYWHERE
        for end in (held, reach):
            stored = max(0, end - max(base, held))
            found.append((end - base, (end - base) * cost + stored * READING))
    if base >= held:
        found.append((reach - base, (reach - base) * READING))
    return [(blocks, cost) for blocks, cost in found if blocks > 0]


@pytest.mark.parametrize("policy", ["kv-cost", "first-token"])
@given(workers=WORKERS)
def test_no_other_rank_or_source_is_cheaper(policy: Policy, workers: list[dict[str, Any]]) -> None:
    ours = policy == "first-token"
    computing = sum(one["load"] > 0 for one in workers) / len(workers)

    def cost(one: dict[str, Any], blocks: int, moving: float) -> float:
        busy = bool(one["load"])
        own = len(PROMPT) - one["held"] - 0.25 * (reach_of(one) - one["held"]) - blocks
        own = max(0.0, own)
        each = computing + 0.05 / (1.0 + computing) * busy if ours else 0.0
        decode = one["load"] + len(PROMPT)
        if ours:
            decode = (decode + SEQUENCE_TOKENS / 16 * busy) / 16
        return float(one["load"] + own + moving + each * own + decode)

    everyone = []
    for one in workers:
        offered = [(0, 0.0)]
        for other in workers:
            offered += offers(one, other)
        everyone.append(min(cost(one, *offer) for offer in offered))
    config = RouterConfig(
        policy=policy,
        kv_pull=True,
        kv_transfer_cost_per_block=ANYWHERE,
        kv_transfer_cost_by_domain={"zone": IN_ZONE},
    )
    fleet = fleet_of(config, workers)
    answer = selection_of(fleet.take("r", *PROMPT))
    record = fleet.core.decisions.find("r")
    assert record is not None
    explained = ExplainedRecord(record, 0.0, ANYWHERE).whole()
    assert [one.cost for one in explained.candidates or ()] == pytest.approx(everyone)
    assert explained.chosen is not None
    assert explained.chosen.cost == pytest.approx(min(everyone))
    assert explained.chosen.kv_source == answer.kv_source
    chosen = workers[answer.worker_id - 1]
    expected = (len(PROMPT) - chosen["held"]) * 16 - round(4 * (reach_of(chosen) - chosen["held"]))
    source = answer.kv_source
    if source:
        expected -= source.blocks * 16
        holder = workers[source.worker_id - 1]
        end = reach_of(chosen) + source.blocks
        assert (source.tier, end) in {("device", holder["held"]), ("external", reach_of(holder))}
        assert fleet.core.counters.selected_pulled_tokens == source.blocks * 16
    assert answer.effective_prefill_tokens == max(0, expected)
    assert fleet.take("r", *PROMPT) == answer, "a repeat says the same"


def test_nothing_is_pulled_without_the_flag() -> None:
    workers = [
        {"zone": None, "enforcement": None, "held": 8 * one, "external": 0, "load": 3 * one}
        for one in (0, 1)
    ]
    off = selection_of(fleet_of(RouterConfig(), workers).take("r", *PROMPT))
    on = selection_of(fleet_of(RouterConfig(kv_pull=True), workers).take("r", *PROMPT))
    assert (off.worker_id, off.kv_source) == (2, UNSET)
    source = KvSource(worker_id=2, dp_rank=0, endpoint="http://w2", tier="device", blocks=8)
    assert (on.worker_id, on.effective_prefill_tokens, on.kv_source) == (1, 0, source)


def of_pairs(**config: Any) -> Fleet:
    """A busy worker that has the prompt, an idle one that could pull it, and a pair."""
    fleet = Fleet(RouterConfig(kv_pull=True, **config))
    for worker_id, role in enumerate(("aggregated", "aggregated", "prefill", "decode"), 1):
        fleet.worker(worker_id, role=role)
    fleet.hold(2, list(PROMPT))
    fleet.book("load2", 2, *range(100, 106))
    return fleet


def test_one_worker_that_pulls_is_compared_with_a_pair_and_explained_so() -> None:
    fleet = of_pairs(kv_transfer_cost_per_block=0.25)
    answer = fleet.pair("p", *PROMPT)
    assert isinstance(answer, PairSelection)
    leg, source = answer.decode, answer.decode.kv_source
    assert (answer.mode, leg.worker_id, leg.effective_prefill_tokens) == ("aggregated", 1, 0)
    assert source
    assert (source.worker_id, source.blocks) == (2, 8)
    assert answer.aggregated_cost == 8 * 0.25 + 8, "moving, and decoding"
    counters = fleet.core.counters
    assert (counters.selections_pulling, counters.selected_pulled_tokens) == (1, 8 * 16)
    record = fleet.core.decisions.find("p")
    assert record is not None
    explained = ExplainedRecord(record, 0.0, 0.25).whole()
    assert explained.chosen is not None
    assert (explained.chosen.cost, explained.chosen.kv_source) == (answer.aggregated_cost, source)
    legs = {one.worker_id: one.legs for one in explained.candidates or ()}
    assert legs[3], "its prefill leg could pull, too"
    assert legs[3].prefill_cost == 8 * 0.25


def test_a_domain_that_costs_more_than_anywhere_costs_as_much_for_pairs_and_pulls() -> None:
    """Blocks may take the way that is open to everybody."""
    fleet = Fleet(
        RouterConfig(
            kv_pull=True,
            kv_transfer_cost_per_block=0.25,
            kv_transfer_cost_by_domain={"zone": 3.0},
        )
    )
    for worker_id, role in enumerate(("prefill", "decode"), 1):
        fleet.worker(worker_id, role=role, topology_domains={"zone": "a"})
    pair = fleet.pair("p", *PROMPT)
    assert isinstance(pair, PairSelection)
    assert pair.disaggregated_cost == 8 + 8 * 0.25 + 8, "computing, moving, decoding"


@pytest.mark.parametrize("is_pair", [False, True])
def test_a_rank_is_not_distrusted_for_blocks_that_it_did_not_pull(*, is_pair: bool) -> None:
    """Its events are right, whether or not the caller had it pull."""
    fleet = of_pairs()
    if is_pair:
        fleet.pair("p", *PROMPT)
    else:
        fleet.take("p", *PROMPT)
    fleet.core.cached_tokens.report("p", 0, fleet.now)
    slot = fleet.core.lifecycle.bookings.get("p").reservation.slot
    trust = fleet.core.partitions[DEFAULT].trust
    rank = trust.find(slot)
    assert rank is None or rank.missing_share == 0.0


@pytest.mark.parametrize("credit", [0.0, 0.5, 1.0, 1.5])
@pytest.mark.parametrize("decay", [0.0, 1.0])
def test_blocks_that_are_pulled_count_for_no_more_than_those_that_are_held(
    credit: float, decay: float
) -> None:
    """Else an idle rank pulled them from the idle rank that holds them. The terms add up."""
    config = RouterConfig(
        kv_pull=True, overlap_score_credit=credit, overlap_score_credit_decay=decay
    )
    fleet = Fleet(config)
    fleet.worker(1)
    fleet.worker(2)
    fleet.hold(1, list(PROMPT))
    answer = selection_of(fleet.take("r", *PROMPT, isl=130))
    assert answer.worker_id == 1 or not credit
    record = fleet.core.decisions.find("r")
    assert record is not None
    for one in ExplainedRecord(record, 0.0, 0.1).whole().candidates or ():
        assert one.prefill_cost is not None
        assert one.credit is not None
        assert one.decode_cost is not None
        moving = one.pull_cost or 0.0
        assert one.cost == one.prefill_cost - one.credit + moving + one.decode_cost
        assert moving == 0.1 * (one.pulled_blocks or 0)


def test_blocks_that_a_batch_has_yet_to_compute_are_no_source() -> None:
    matches = Matches(SlotTable(), [], [], [])
    assert tier_matches(expecting(matches, 1, 8)).estimated == [1]


@pytest.mark.parametrize("seed", [2, 6])  # 6: with pairs
def test_what_was_pulled_is_decided_again(tmp_path: Path, seed: int) -> None:
    fleet = RecordedFleet(seed, kv_pull=True)
    fleet.play(200)
    path = fleet.recorded_file.into(tmp_path / "recording")
    report = replay([path])
    assert report.first_difference is None
    assert report.reproduced == report.decisions > 50
    items = [one.item for one in play([path])]
    assert any(isinstance(one, Decided) and one.found and one.found.pulls for one in items)
    assert fleet.core.counters.selections_pulling > 5


@pytest.mark.parametrize("policy", ["kv-cost", "first-token"])
def test_the_prefill_leg_of_a_pair_pulls_and_is_explained_so(policy: Policy) -> None:
    fleet = Fleet(RouterConfig(policy=policy, kv_pull=True, kv_transfer_cost_per_block=0.25))
    for worker_id, role in enumerate(("prefill", "prefill", "decode"), 1):
        fleet.worker(worker_id, role=role)
    fleet.hold(2, list(PROMPT[:6]))
    fleet.book("load2", 2, *range(100, 108))
    answer = fleet.pair("p", *PROMPT)
    assert isinstance(answer, PairSelection)
    leg = answer.prefill
    assert leg is not None
    source = KvSource(worker_id=2, dp_rank=0, endpoint="http://w2", tier="device", blocks=6)
    assert (leg.worker_id, leg.effective_prefill_tokens, leg.kv_source) == (1, 2 * 16, source)
    assert (answer.decode.kv_source, answer.transfer_blocks) == (UNSET, 8)
    counters = fleet.core.counters
    assert (counters.selections_pulling, counters.selected_pulled_tokens) == (1, 6 * 16)
    assert fleet.pair("p", *PROMPT) == answer, "a repeat says the same"
    record = fleet.core.decisions.find("p")
    assert record is not None
    explained = ExplainedRecord(record, 0.0, 0.25).whole()
    assert explained.pair
    assert explained.pair.prefill
    assert explained.pair.prefill.kv_source == source
    legs = {one.worker_id: one.legs for one in explained.candidates or ()}
    assert legs[1]
    assert explained.pair.prefill.cost == legs[1].prefill_cost
    assert explained.pair.disaggregated_cost == answer.disaggregated_cost
    if policy == "kv-cost":
        assert legs[1].prefill_cost == 2 + 6 * 0.25
    advice = selection_of(fleet_with_whole(fleet).select(*PROMPT)).advice
    assert advice
    assert advice.prefill
    assert advice.prefill.kv_source == source


def fleet_with_whole(fleet: Fleet) -> Fleet:
    """Add a worker for whole requests, so busy that a pair is advised."""
    fleet.worker(4, role="aggregated")
    fleet.book("load4", 4, *range(200, 290))
    return fleet


def test_a_batch_is_planned_with_what_ranks_may_pull() -> None:
    """As a single request: one rank pulls what the busier one holds."""
    places = []
    for is_batch in (False, True):
        fleet = Fleet(RouterConfig(kv_pull=True, kv_transfer_cost_per_block=0.125))
        fleet.worker(1)
        fleet.worker(2)
        fleet.hold(2, list(PROMPT))
        fleet.book("load1", 1, 100)
        fleet.book("load2", 2, *range(200, 204))
        answer: Any = fleet.select(*PROMPT)
        if is_batch:
            answer = place(fleet, prompt(*PROMPT)).results[0].selection
        places.append((answer.worker_id, answer.effective_prefill_tokens, answer.kv_source))
    source = KvSource(worker_id=2, dp_rank=0, endpoint="http://w2", tier="device", blocks=8)
    assert places == [(1, 0, source)] * 2


def test_a_batch_pulls_a_common_prefix_once_and_keeps_what_it_pulls_out_of_its_load() -> None:
    fleet = Fleet(RouterConfig(kv_pull=True, kv_transfer_cost_per_block=0.125))
    for worker_id in (1, 2, 3):
        fleet.worker(worker_id)
    fleet.hold(3, list(PROMPT))
    for number in range(4):
        fleet.book(f"load{number}", 3, *range(100 * number + 100, 100 * number + 120))
    answer = place(fleet, *(prompt(*PROMPT, 50 + one, 60 + one) for one in range(2)))
    selections: list[Any] = [one.selection for one in answer.results]
    assert all(selections)
    first, second = sorted(selections, key=lambda one: not one.kv_source)
    assert first.worker_id == second.worker_id in {1, 2}
    assert first.kv_source.blocks == 8
    assert [one.effective_prefill_tokens for one in (first, second)] == [32, 32]
    assert second.kv_source is UNSET, "its mate has pulled it"


def source_of(fleet: Fleet, **wishes: Any) -> int | None:
    """Return whom the idle worker 1 pulls the prompt from; 2 and 3 have it."""
    answer = selection_of(fleet.select(*PROMPT, **wishes))
    assert answer.worker_id == 1
    return answer.kv_source.worker_id if answer.kv_source else None


def of_two_holders(**limits: Any) -> Fleet:
    """Worker 1 is idle; 2 and 3, which is busier, have the prompt."""
    fleet = Fleet(RouterConfig(kv_pull=True), limits=CoreLimits(**limits))
    for worker_id in (1, 2, 3):
        fleet.worker(worker_id)
        if worker_id > 1:
            fleet.hold(worker_id, list(PROMPT))
            first = 100 * worker_id
            fleet.book(f"load{worker_id}", worker_id, *range(first, first + 18 + worker_id))
    return fleet


def test_a_worker_that_the_caller_left_out_is_no_source() -> None:
    """Gateways leave out those that they could not reach."""
    fleet = of_two_holders()
    assert source_of(fleet) == 2
    assert source_of(fleet, allowed_worker_ids=[1, 3]) == 3
    assert source_of(fleet, allowed_worker_ids=[1]) is None
    assert source_of(fleet, pinned_worker=PinnedWorker(1, 0)) == 2, "it says who serves"
    answer: Any = place(fleet, prompt(*PROMPT, allowed_worker_ids=[1, 3])).results[0].selection
    assert (answer.worker_id, answer.kv_source.worker_id) == (1, 3)


def test_a_rank_that_fails_is_no_source_before_it_has_shown_a_sign_of_life() -> None:
    fleet = of_two_holders(outlier_failures=1, outlier_ejection_s=10.0, outlier_ejection_max_s=10.0)
    reservations = fleet.core.reservations
    fleet.book("f", 2, 97)
    fleet.now += 1.0
    fleet._did(reservations.free("f", fleet.now, None, "failed"))
    assert source_of(fleet) == 3
    fleet.tick(20.0)
    assert 2 not in fleet.core.partitions[DEFAULT].outliers.ejected, "it is due for a probe"
    assert source_of(fleet) == 3
    fleet.book("probe", 2, 98)
    fleet.now += 1.0
    fleet._did(reservations.free("probe", fleet.now, None, "completed"))
    assert source_of(fleet) == 2


def test_a_worker_that_drains_is_no_source() -> None:
    fleet = of_two_holders()
    fleet.drain(2)
    assert source_of(fleet) == 3
    fleet.undrain(2)
    assert source_of(fleet) == 2
