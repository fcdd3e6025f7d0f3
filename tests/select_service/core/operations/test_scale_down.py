"""Who may go, against the definition: sets of blocks, and every set of workers there is."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET

from indexer.core.packing import pack_u64
from indexer.types import Tier, WorkerRank
from select_service.core.operations.scale_down import COLD
from select_service.types import Role
from select_service.types.workers import ScaleDownCandidate
from tests.effort import examples
from tests.select_service.core.whole_fleet import DEFAULT, Fleet
from tests.sliced import answer_of

Content = tuple[int, ...]
BLOCK = 16
ROLES: list[Role | None] = [None, None, "aggregated", "prefill", "decode"]


@dataclass
class Somebody:
    """What the definition asks of a worker."""

    ranks: int = 1
    blocks: dict[Content, set[tuple[int, Tier]]] = field(default_factory=lambda: defaultdict(set))
    reused: float = 0.0
    drains: bool = False
    requests: int = 0
    role: Role | None = None


@dataclass
class Held:
    who: int
    rank: int
    tier: Tier
    chain: list[int]


@st.composite
def fleets(draw: st.DrawFn) -> tuple[list[Somebody], list[Held]]:
    those = [
        Somebody(
            ranks=draw(st.integers(1, 2)),
            reused=draw(st.sampled_from([0.0, 100.0, 1e4])),
            drains=draw(st.sampled_from([False, False, False, True])),
            requests=draw(st.sampled_from([0, 0, 1, 3])),
            role=draw(st.sampled_from(ROLES)),
        )
        for _ in range(draw(st.integers(1, 5)))
    ]
    held = [
        Held(
            who,
            draw(st.integers(0, those[who].ranks - 1)),
            draw(st.sampled_from([Tier.DEVICE, Tier.DEVICE, Tier.HOST_PINNED])),
            draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)),
        )
        for who in draw(st.lists(st.integers(0, len(those) - 1), max_size=12))
    ]
    return those, held


def build(those: list[Somebody], held: list[Held]) -> Fleet:
    fleet = Fleet()
    for who, one in enumerate(those):
        endpoints = {
            str(rank): f"tcp://127.0.0.1:{6000 + 9 * who + rank}" for rank in range(one.ranks)
        }
        fleet.worker(
            who,
            data_parallel_size=one.ranks,
            kv_events_endpoint=None,
            kv_events_endpoints=endpoints,
            total_kv_blocks=100,
            role=one.role,
        )
    partition = fleet.core.partitions[DEFAULT]
    for what in held:
        chain = tuple(what.chain)
        contents = [chain[: end + 1] for end in range(len(chain))]
        names = [int("".join(map(str, content))) for content in contents]
        rank = WorkerRank(what.who, what.rank)
        partition.index.store(rank, what.tier, None, names, pack_u64(list(chain)))
        for content in contents:
            those[what.who].blocks[content].add((what.rank, what.tier))
    for who, one in enumerate(those):
        for number in range(one.requests):
            fleet.book(f"{who}/{number}", who, 7, 8, 9)
        if one.drains:
            fleet.drain(who)
        partition.demand.reused[who] = one.reused
    return fleet


def asked(
    fleet: Fleet,
    count: int,
    tenant_ids: Collection[str] | None = None,
    role: Role | None = None,
) -> list[ScaleDownCandidate]:
    return answer_of(fleet.core.scale_down.candidates(count, None, tenant_ids, role))


def lost_with(gone: Collection[int], those: list[Somebody]) -> set[Content]:
    """Blocks that somebody held, and nobody does any more."""
    there: set[Content] = set()
    for who, one in enumerate(those):
        if who not in gone:
            there |= one.blocks.keys()
    return {content for who in gone for content in those[who].blocks} - there


def cost_of(gone: Collection[int], those: list[Somebody], fleet: Fleet) -> float:
    cost = 0.0
    for who in gone:
        for rank in range(those[who].ranks):
            load = fleet.load(who, rank)
            if load is not None:
                cost += load[0] + BLOCK * load[1]
    for content in lost_with(gone, those):
        for one in those:
            if content in one.blocks:
                # distinct per rank: a block on two tiers of a rank is found once
                found = sum(len({rank for rank, _ in where}) for where in one.blocks.values())
                cost += one.reused / found + COLD * BLOCK
    return cost


@settings(max_examples=examples(60), deadline=None)
@given(fleets(), st.integers(1, 6), st.sampled_from(ROLES))
def test_no_other_set_costs_less_and_rows_add_up(
    made: tuple[list[Somebody], list[Held]], count: int, role: Role | None
) -> None:
    those, held = made
    fleet = build(those, held)
    advised = asked(fleet, count, role=role)
    may = [who for who, one in enumerate(those) if role in (None, one.role or "aggregated")]
    assert len(advised) == min(count, len(may))
    if not advised:
        return
    order = [one.worker_id for one in advised]
    assert set(order) <= set(may)
    leaving = {who for who in may if those[who].drains}
    forced = order[: min(len(leaving), count)]
    assert set(forced) <= leaving
    assert [one.drains for one in advised] == [one.worker_id in leaving for one in advised]
    others = sorted(set(may) - set(forced))
    least = min(
        cost_of({*forced, *rest}, those, fleet)
        for rest in itertools.combinations(others, len(advised) - len(forced))
    )
    assert advised[-1].cost_tokens_so_far == pytest.approx(least)
    ranks = sum(those[who].ranks for who in may)
    for number, one in enumerate(advised, 1):
        gone, before = order[:number], order[: number - 1]
        assert one.cost_tokens_so_far == pytest.approx(cost_of(gone, those, fleet))
        assert one.sole_blocks == len(lost_with(gone, those)) - len(lost_with(before, those))
        assert one.blocks == sum(map(len, those[one.worker_id].blocks.values()))
        assert one.room_so_far == pytest.approx(sum(those[who].ranks for who in gone) / ranks)
        assert (one.pod_deletion_cost < 0) == one.drains


def test_what_several_share_may_keep_the_cheapest_one() -> None:
    those = [Somebody(), Somebody(), Somebody(), Somebody()]
    shared = [Held(0, 0, Tier.DEVICE, [first, 1, 1, 1]) for first in (1, 2, 3)]
    same = [Held(first, 0, Tier.DEVICE, [first, 1, 1, 1]) for first in (1, 2, 3)]
    alone = [Held(who, 0, Tier.DEVICE, [9, who]) for who in (1, 2, 3)]
    fleet = build(those, shared + same + alone)
    assert [one.worker_id for one in asked(fleet, 1)] == [0], "everything it has others have, too"
    assert [one.worker_id for one in asked(fleet, 2)] == [1, 2], "of either the first still has all"
    assert sorted(one.worker_id for one in asked(fleet, 4)) == [0, 1, 2, 3]


def test_a_worker_that_leaves_while_it_is_counted_is_not_named() -> None:
    those = [Somebody(), Somebody(), Somebody()]
    chain = [1, 2, 3, 1]
    held = [Held(who, 0, Tier.DEVICE, chain[:end]) for who, end in enumerate((4, 2, 3))]
    fleet = build(those, held)
    # one run of blocks whose holders end at different ones: between two cuts others are let in
    look = fleet.core.scale_down.candidates(3, None, None)
    next(look)
    fleet.delete(1)
    advised = answer_of(look)
    assert [one.worker_id for one in advised] == [2, 0]
    assert [one.sole_blocks for one in advised] == [0, 4]


def test_the_room_is_told_where_all_have_named_theirs() -> None:
    fleet = build([Somebody(), Somebody(), Somebody(ranks=2)], [])
    assert [one.room_so_far for one in asked(fleet, 3)] == [0.25, 0.5, 1.0]
    fleet.worker(3)
    assert [one.room_so_far for one in asked(fleet, 4)] == [UNSET] * 4


def test_what_was_found_is_missed_and_what_was_computed_pushes_others_out() -> None:
    fleet = build([Somebody(), Somebody(reused=400.0), Somebody()], [])
    fleet.worker(3, model_name="other")
    partition = fleet.core.partitions[DEFAULT]
    partition.demand.isl_tokens = 1000
    for name, who, blocks in (("a", 0, 2), ("b", 1, 2), ("c", 2, 4)):
        fleet.book(name, who, *range(100 * who, 100 * who + blocks))
    asked_lately = partition.demand.asked_lately
    hit_rate = 400 / asked_lately
    rows = asked(fleet, 4)
    assert [one.worker_id for one in rows] == [3, 0, 1, 2], "by load: nobody holds a block"
    foretold = [one.hit_rate_loss_so_far for one in rows]
    assert foretold[0] == 0.0, "of another scope"
    assert foretold[1] == pytest.approx(hit_rate * (2 / 8) / 2), "what it computes goes elsewhere"
    assert foretold[2] == foretold[3] == pytest.approx(hit_rate), "all that is found at all"
    for most, advised in ((hit_rate / 8 - 1e-9, 1), (hit_rate / 8 + 1e-9, 2), (hit_rate + 1e-9, 4)):
        found = answer_of(fleet.core.scale_down.candidates(4, None, None, None, most))
        assert [one.advised for one in found] == [True] * advised + [False] * (4 - advised)


def test_some_tenants_of_many() -> None:
    fleet = build([Somebody()], [])
    for worker_id, tenant in ((5, "a"), (6, "b"), (7, "c")):
        fleet.worker(worker_id, tenant_id=tenant)
    assert [one.worker_id for one in asked(fleet, 9)] == [0, 5, 6, 7]
    assert [one.worker_id for one in asked(fleet, 9, ["b", "a"])] == [5, 6]
    assert asked(fleet, 9, []) == []
