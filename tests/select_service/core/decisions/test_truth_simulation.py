"""A fleet of simulated engines, one of which lies: its credit falls, the hit rate comes back.

The engines evict; that alone must never change a decision.
"""

from __future__ import annotations

import pytest

from tests.models.truth_fleet import Shape, TruthFleet, hit_rate, keep_removed

LIAR = 3
K = 32
"""Prompts a liar computes before its credit has fallen: twice the window that errors are kept for.
Half of what it promises at first is true, for it goes on to hold what it held."""

CACHED = Shape(
    pool_blocks=1000, prefixes=32, prefix_blocks=64, output_tokens=16, requests_per_step=0.8
)
"""Nearly everything is cached somewhere, and load leaves a choice."""

TIGHT = Shape(pool_blocks=400, requests_per_step=2.5, output_tokens=64)
"""Every engine evicts all the time."""

NARROW = Shape(workers=3, pool_blocks=300, prefixes=12, prefix_blocks=16, requests_per_step=1.0)


def lying(seed: int, *, feedback: bool = True) -> TruthFleet:
    fleet = TruthFleet(CACHED, seed=seed, feedback=feedback)
    fleet.run(400)
    fleet.ranks[LIAR].lie = fleet.claim_everything
    return fleet


def fall(fleet: TruthFleet) -> int:
    """Run until the liar is found out; how many prompts of it that took."""
    before = fleet.trust(LIAR).samples
    while fleet.trust(LIAR).trust == 1.0 and fleet.trust(LIAR).samples - before <= K:
        fleet.run(1)
    return fleet.trust(LIAR).samples - before


def recover(fleet: TruthFleet) -> None:
    """Let the engine report the truth, and run until it is believed."""
    fleet.ranks[LIAR].correct()
    until = fleet.asked + 3000
    while fleet.trust(LIAR).trust < 1.0 and fleet.asked < until:
        fleet.run(20)


def test_a_liar_is_found_out_and_believed_again() -> None:
    fleet = lying(seed=5)
    assert fall(fleet) <= K
    fleet.run(20)
    assert [row.worker_id for row in fleet.core.trust_monitor.table().ranks if row.reasons] == [
        LIAR
    ]
    assert fleet.news == [(LIAR, ("prediction",))], "logged once"
    recover(fleet)
    fleet.run(20)
    assert fleet.trust(LIAR).trust == 1.0
    assert fleet.trust(LIAR).rereads > 0
    assert fleet.news == [(LIAR, ("prediction",)), (LIAR, ())]
    fleet.core.check()


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 5))]
)
def test_the_hit_rate_comes_back(seed: int) -> None:
    clean = TruthFleet(CACHED, seed=seed)
    clean.run(600)
    best = hit_rate(clean.run(600))
    fleet = lying(seed)
    assert fall(fleet) <= K
    fleet.run(max(0, 600 - fleet.asked))
    believed = lying(seed, feedback=False)
    believed.run(200)
    assert hit_rate(fleet.run(600)) >= 0.95 * best
    assert hit_rate(believed.run(600)) < 0.96 * best, "or the lie would do no harm"
    recover(fleet)
    assert fleet.trust(LIAR).trust == 1.0
    assert hit_rate(fleet.run(600)) >= 0.95 * best


@pytest.mark.slow
def test_an_engine_that_never_says_what_it_drops() -> None:
    fleet = TruthFleet(TIGHT, seed=2)
    fleet.run(400)
    fleet.ranks[LIAR].lie = keep_removed
    until = fleet.asked + 3000
    while fleet.trust(LIAR).trust == 1.0 and fleet.asked < until:
        fleet.run(20)
    assert fleet.trust(LIAR).reasons == ["prediction"]
    assert all(
        row.trust == 1.0 for row in fleet.core.trust_monitor.table().ranks if row.worker_id != LIAR
    )
    recover(fleet)
    assert fleet.trust(LIAR).trust == 1.0


def decisions_agree(shape: Shape, seed: int, requests: int) -> None:
    with_feedback, without_feedback = (
        TruthFleet(shape, seed=seed),
        TruthFleet(shape, seed=seed, feedback=False),
    )
    without_feedback.core.trust_monitor.wall_ahead = None
    for fleet in (with_feedback, without_feedback):
        fleet.run(requests)
        fleet.drain()
    assert with_feedback.decisions == without_feedback.decisions
    assert sum(rank.engine.evictions for rank in with_feedback.ranks.values()) > requests
    rows = with_feedback.core.trust_monitor.table().ranks
    assert sum(row.samples for row in rows) > requests / 4
    assert all(row.trust == 1.0 and not row.reasons for row in rows)
    assert all(
        partition.trust.column is None for partition in with_feedback.core.partitions.values()
    )
    assert not with_feedback.news


@pytest.mark.parametrize("seed", range(2))
def test_honest_engines_change_no_decision(seed: int) -> None:
    decisions_agree(NARROW, seed, 250)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [CACHED, TIGHT, NARROW, Shape()])
@pytest.mark.parametrize("seed", [10, pytest.param(11, marks=pytest.mark.long)])
def test_honest_engines_change_no_decision_for_long(shape: Shape, seed: int) -> None:
    decisions_agree(shape, seed, 3000)


def test_past_that_is_gone_is_forgotten_when_nothing_of_it_is_true() -> None:
    fleet = TruthFleet(NARROW, seed=1, reread_s=2.0)
    fleet.run(100)
    stream = fleet.stream(1)
    stream.has_replay = False
    partition = next(iter(fleet.core.partitions.values()))
    slot = partition.index.slot_of(stream.rank)
    assert slot is not None
    for _ in range(40):
        partition.trust.compare(slot, 100, 0, fleet.now)
    assert partition.index.blocks_of(stream.rank)[0] > 0
    others = [partition.index.blocks_of(fleet.stream(worker).rank) for worker in (2, 3)]
    fleet.core.tick(fleet.now)
    assert partition.index.blocks_of(stream.rank)[0] == 0
    assert [partition.index.blocks_of(fleet.stream(worker).rank) for worker in (2, 3)] == others
    assert fleet.core.counters.rereads == {"forgotten": 1}
    fleet.run(600)
    assert fleet.trust(1).trust == 1.0, "what came since was true"
    fleet.core.check()
