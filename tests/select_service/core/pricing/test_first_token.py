"""The policy `first-token`: what it must do whatever its weights are, and what it is for."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.core.packing import pack_u64
from indexer.core.registry import StreamRegistry
from indexer.types import Scope, Tier, WorkerRank
from select_service.core import partition as rooms
from select_service.core.ledger.ledger import Ledger
from select_service.core.ledger.loads import PackedLoads
from select_service.core.ledger.slot_loads import CHURN_MEMORY_S
from select_service.core.pricing import plain_pricer
from select_service.core.pricing.cost import Size, TierMatches, terms_of
from select_service.core.pricing.weights import weights_in_force
from select_service.core.service import SelectionCore
from select_service.simulator.core.workloads import WorkloadSettings
from select_service.simulator.runs import run
from select_service.simulator.settings import SimulationSettings
from select_service.types import (
    RouterConfig,
    RouterConfigOverride,
    SelectAndReserveRequest,
    Selection,
    WorkerPatch,
    WorkerSpec,
)
from select_service.types.router_config import Policy
from tests.indexer.kernels import twins
from tests.select_service.core.whole_fleet import is_checked

PRICERS = twins("select_service.core._pricer", plain_pricer)
EITHER = pytest.mark.usefixtures("pricer")
OURS = RouterConfig(policy="first-token")
SIZE = 16
tokens = st.integers(0, 100_000)
blocks = st.integers(0, 40)


@pytest.fixture(params=PRICERS)
def pricer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "Pricer", request.param.Pricer)


def price(
    *,
    prefill: int = 0,
    decode: int = 0,
    device: int = 0,
    booked: int = 0,
    churn: int = 0,
    context: int = 0,
    isl: int = 640,
    waiting: float = 1.0,
) -> float:
    """The price of one rank of a fleet whose ranks compute and evict on average."""
    weights = weights_in_force(OURS, None).at_present(waiting, 1000.0, 8000.0)
    p, d, c, x = (np.array([float(one)]) for one in (prefill, decode, churn, context))
    here = np.array([0])
    found = TierMatches([(device, here)], [], []) if device else None
    shared = [(booked, here)] if booked else None
    terms = terms_of(
        PackedLoads(p, d, c, x, 0.0, 0.0, np.zeros(1), np.zeros(1)),
        here,
        Size(isl, booked, SIZE),  # so that `decode` and `context` are with the prompt
        weights._replace(context_load_scale=0.0),
        found,
        shared,
        None,
        0.0,
    )
    return float(terms.cost[0]) + weights.context_load_scale * context


@given(
    base=st.fixed_dictionaries(
        {
            "prefill": tokens,
            "decode": blocks,
            "device": blocks,
            "booked": blocks,
            "churn": tokens,
            "context": blocks,
        }
    ),
    more=st.integers(1, 1000),
    waiting=st.floats(0.0, 50.0),
)
def test_dearer_with_load_and_cheaper_with_overlap(
    base: dict[str, int], more: int, waiting: float
) -> None:
    here = price(**base, waiting=waiting)
    for name in ("prefill", "decode", "churn", "context"):
        assert price(**base | {name: base[name] + more}, waiting=waiting) >= here, name
    for name in ("device", "booked"):
        longer = min(base[name] + more, 40)
        assert price(**base | {name: longer}, waiting=waiting) <= here, name
    assert price(**base, waiting=waiting + more) >= here
    assert here >= 0.0


def test_a_queue_longer_than_the_prompt_is_worth_computing_it_again() -> None:
    held = {"device": 40, "isl": 640, "waiting": 0.0}
    assert price(prefill=600, **held) < price(isl=640, waiting=0.0)  # type: ignore[arg-type]
    assert price(prefill=700, **held) > price(isl=640, waiting=0.0)  # type: ignore[arg-type]


def test_who_waits_makes_a_prefix_worth_more() -> None:
    queue = price(prefill=1200, device=40, waiting=1.0)
    assert queue < price(waiting=1.0), "two would wait for it"
    assert price(prefill=1200, device=40, waiting=0.0) > price(waiting=0.0)


def test_requests_still_set_weights_of_their_own() -> None:
    override = RouterConfigOverride(overlap_score_credit=0.0, prefill_load_scale=3.0)
    weights = weights_in_force(OURS, override)
    assert (weights.overlap_score_credit, weights.prefill_load_scale) == (0.0, 3.0)
    assert weights.delay_weight == weights_in_force(OURS, None).delay_weight
    assert weights.kv_cost() == weights_in_force(RouterConfig(), override)
    zero = weights_in_force(OURS, RouterConfigOverride(overlap_score_weight=0.0))
    assert zero.prefill_load_scale == 0.0


class Fleet:
    """Workers whose caches are told, and requests that are booked."""

    def __init__(
        self, workers: int, config: RouterConfig = OURS, seats: Sequence[int | None] = ()
    ) -> None:
        config = msgspec.structs.replace(config, use_kv_events=False)
        self.core = SelectionCore(StreamRegistry(), config, random.Random(1))
        for worker_id in range(workers):
            spec = WorkerSpec(worker_id=worker_id, endpoint="x", block_size=SIZE)
            spec.max_num_seqs = seats[worker_id] if seats else None
            self.core.workers.upsert_worker(spec, 0.0)
        self.made = 0
        self.now = 1.0

    def store(self, worker_id: int, prompt: list[int]) -> None:
        index = self.core.partitions[Scope("default", "default")].index
        index.store(WorkerRank(worker_id, 0), Tier.DEVICE, None, prompt, pack_u64(prompt))

    def ask(self, prompt: list[int], **wishes: Any) -> int:
        self.made += 1
        hashes = pack_u64(prompt)
        request = SelectAndReserveRequest(
            reservation_id=f"r{self.made}",
            block_hashes=hashes,
            sequence_hashes=hashes,
            **{"isl_tokens": SIZE * len(prompt)} | wishes,
        )
        answer, _ = self.core.selection.select_and_reserve(request, self.now)
        assert isinstance(answer, Selection)
        if is_checked(self.made):
            self.core.check()
        return answer.worker_id

    def end(self) -> None:
        self.core.reservations.prefill_complete(f"r{self.made}", self.now)
        self.core.reservations.free(f"r{self.made}", self.now)


@EITHER
def test_a_queue_counts_as_worked_off_between_reports() -> None:
    """The longer queue has been computed for longer, and is the shorter one by now."""
    chosen = {}
    for name, config in {
        "as it is": OURS,
        "as booked": RouterConfig(policy="first-token", pace_scale=0.0),
        "kv-cost": RouterConfig(),
    }.items():
        fleet = Fleet(2, config)
        long, short = list(range(1, 401)), list(range(1001, 1351))
        there = fleet.ask(long)
        fleet.now += 0.7  # 5,600 of its 6,400 tokens, as fast as a rank is before it is measured
        other = fleet.ask(short)
        assert other != there
        fleet.now += 0.05
        chosen[name] = fleet.ask(list(range(2001, 2010)), explain=True) == there
    assert chosen == {"as it is": True, "as booked": False, "kv-cost": False}


def sent_to_who_hangs(config: RouterConfig, seconds: float, isl_tokens: int, load: float) -> int:
    """Requests that come to one of four engines after it has stopped for good, and said nothing.

    Engines compute 8,000 tokens a second, one prompt after the other. At a load of 1 three of them
    are just enough.
    """
    fleet = Fleet(4, config)
    free_at = [0.0] * 4
    reports: list[tuple[float, str]] = []
    every = isl_tokens / 8000.0 / 3.0 / load
    sent = number = 0
    while fleet.now < 11.0 + seconds:
        fleet.now += every
        for at, name in sorted(one for one in reports if one[0] <= fleet.now):
            fleet.core.reservations.prefill_complete(name, at)
            fleet.core.reservations.free(name, at)
        reports = [one for one in reports if one[0] > fleet.now]
        number += 1
        chosen = fleet.ask([number * 10 + 10**6, number * 10 + 1 + 10**6], isl_tokens=isl_tokens)
        begins = max(fleet.now, free_at[chosen])
        free_at[chosen] = begins + isl_tokens / 8000.0
        if chosen == 0 and free_at[0] > 11.0:
            sent += fleet.now > 11.0
        else:
            reports.append((free_at[chosen], f"r{number}"))
    fleet.core.check()
    return sent


@pytest.mark.parametrize(("isl_tokens", "load"), [(3000, 1.0), (3000, 1.3), (20_000, 1.3)])
def test_an_engine_that_hangs_draws_one_prompt_more_however_long_it_does(
    isl_tokens: int, load: float
) -> None:
    booked = RouterConfig(policy="first-token", pace_scale=0.0)
    for seconds in (10.0, 20.0):
        without = sent_to_who_hangs(booked, seconds, isl_tokens, load)
        assert without <= sent_to_who_hangs(OURS, seconds, isl_tokens, load) <= without + 1


@EITHER
def test_what_is_booked_counts_before_its_events_come() -> None:
    """It is worth more to compute than three sequences are to decode."""
    prompt = list(range(1, 101))
    fleet = Fleet(4)
    first = fleet.ask(prompt)
    fleet.core.reservations.prefill_complete("r1", fleet.now)
    for tail in range(3):
        assert fleet.ask([*prompt, 100 + tail]) == first, "nobody has told of a block yet"
        fleet.core.reservations.prefill_complete(f"r{fleet.made}", fleet.now)


@EITHER
def test_new_prompts_go_where_little_was_evicted() -> None:
    """All share their first block: by the formula of the contract one cache would get them all."""
    seen: dict[str, list[int]] = {}
    policies: tuple[Policy, ...] = ("kv-cost", "first-token")
    for policy in policies:
        fleet = Fleet(4, RouterConfig(policy=policy))
        for worker_id in range(4):
            fleet.store(worker_id, [1, 2])
        fleet.store(0, [1, 2])
        counts = [0] * 4
        for number in range(40):
            prompt = [1, 2, *range(1000 * number + 10, 1000 * number + 40)]
            chosen = fleet.ask(prompt)
            counts[chosen] += 1
            fleet.end()
        seen[policy] = counts
    assert max(seen["first-token"]) == min(seen["first-token"]) == 10, seen


@EITHER
def test_where_nothing_is_found_nothing_is_lost_by_evicting() -> None:
    """One cache was filled more than another by prompts that nobody asks for again.

    Answers were spread as unevenly as caches had been filled, and took longer for it.
    """
    fleet = Fleet(2)
    for number in range(3):
        first = 100_000 + 1000 * number
        fleet.ask(list(range(first, first + 400)), allowed_worker_ids=[0])
        fleet.end()
    counts = [0, 0]
    for number in range(20):
        counts[fleet.ask(list(range(1000 * number + 1, 1000 * number + 41)))] += 1
        fleet.core.reservations.prefill_complete(f"r{fleet.made}", fleet.now)
    assert counts == [10, 10]


@pytest.mark.parametrize("twin", PRICERS)
@given(data=st.data())
def test_only_those_who_may_be_chosen_are(twin: Any, data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rooms, "Pricer", twin.Pricer)
        fleet = Fleet(6)
        for number in range(data.draw(st.integers(1, 12))):
            allowed = data.draw(st.lists(st.integers(0, 5), min_size=1, unique=True))
            prompt = list(range(1, data.draw(st.integers(2, 20))))
            if data.draw(st.booleans()):
                fleet.store(data.draw(st.integers(0, 5)), prompt)
            assert fleet.ask([*prompt, 1000 + number], allowed_worker_ids=allowed) in allowed


@EITHER
def test_a_prompt_many_share_is_read_for_each_of_them() -> None:
    """Twenty answers over one prompt are more to decode than three over prompts of their own."""
    prompt = list(range(1, 41))
    chosen: dict[str, int] = {}
    policies: tuple[Policy, ...] = ("kv-cost", "first-token")
    for policy in policies:
        fleet = Fleet(2, RouterConfig(policy=policy))
        for worker_id in range(2):
            fleet.store(worker_id, prompt)
        for tail in range(20):
            fleet.ask([*prompt, 100 + tail], allowed_worker_ids=[0])
            fleet.core.reservations.prefill_complete(f"r{fleet.made}", fleet.now)
        for number in range(3):
            fleet.ask(
                list(range(1000 * (number + 1), 1000 * (number + 1) + 40)), allowed_worker_ids=[1]
            )
            fleet.core.reservations.prefill_complete(f"r{fleet.made}", fleet.now)
        chosen[policy] = fleet.ask([*prompt, 999])
    assert chosen == {"kv-cost": 0, "first-token": 1}


@EITHER
def test_many_short_prompts_are_more_to_decode_than_a_few_long_ones() -> None:
    """A step does much the same for every sequence, and each of them has a seat."""
    fleet = Fleet(2)
    for number in range(30):  # 60 blocks in all
        fleet.ask([1000 + number, 2000 + number], allowed_worker_ids=[0])
        fleet.core.reservations.prefill_complete(f"r{fleet.made}", fleet.now)
    for number in range(3):  # 120 blocks in all
        first = 10_000 * (number + 1)
        fleet.ask(list(range(first, first + 40)), allowed_worker_ids=[1])
        fleet.core.reservations.prefill_complete(f"r{fleet.made}", fleet.now)
    assert fleet.ask([999]) == 1


@EITHER
def test_who_has_no_seat_left_is_full_however_little_it_carries() -> None:
    """Four seats and four answers, or five answers and room for more: nobody else would tell."""
    chosen = {}
    for seats in ((None, None), (4, None), (4, 64), (5, 6), (8, 8)):
        fleet = Fleet(2, seats=seats)
        for number in range(9):
            fleet.ask([1000 + number], allowed_worker_ids=[number % 2 ^ 1])
            fleet.core.reservations.prefill_complete(f"r{fleet.made}", fleet.now)
        chosen[seats] = fleet.ask([1])
    assert chosen == {(None, None): 0, (4, None): 1, (4, 64): 1, (5, 6): 0, (8, 8): 0}


def test_seats_follow_the_record() -> None:
    """They may be told later, become fewer, and be those of whoever comes to the slot next."""
    fleet = Fleet(2)
    for number in range(4):
        fleet.ask([1000 + number], allowed_worker_ids=[number % 2])
        fleet.core.reservations.prefill_complete(f"r{fleet.made}", fleet.now)
    assert (
        fleet.core.workers.patch_worker(0, WorkerPatch(max_num_seqs=2), fleet.now)[0].max_num_seqs
        == 2
    )
    fleet.core.check()
    assert fleet.ask([1]) == 1
    fleet.core.workers.patch_worker(1, WorkerPatch(max_num_seqs=1), fleet.now)
    fleet.core.check()
    assert fleet.ask([2]) == 0
    fleet.core.workers.delete_worker(0, fleet.now)
    fleet.core.workers.upsert_worker(
        WorkerSpec(worker_id=0, endpoint="x", block_size=SIZE), fleet.now
    )
    fleet.core.check()
    assert [fleet.ask([3 + number]) for number in range(3)] == [0, 0, 0]


@EITHER
def test_prompts_shorter_than_a_block_are_spread() -> None:
    """They hold no block that anybody could find; to decode they are as much as others."""
    fleet = Fleet(4)
    counts = [0] * 4
    for _ in range(20):
        counts[fleet.ask([], isl_tokens=SIZE - 1)] += 1
        fleet.core.reservations.prefill_complete(f"r{fleet.made}", fleet.now)
    assert counts == [5] * 4


def test_churn_is_forgotten() -> None:
    ledger = Ledger()
    ledger.ensure(2)
    one = ledger.book("a", 0, b"", 100, 10.0)
    ledger.check()
    ledger.free(one)
    assert ledger.loads.churn.tolist() == [100.0, 0.0], "what was computed stays in the cache"
    ledger.book("b", 1, b"", 100, 10.0 + CHURN_MEMORY_S)
    assert ledger.loads.churn.tolist() == pytest.approx([100.0 / np.e, 100.0])
    assert ledger.loads.recent.churned == pytest.approx(100.0 / np.e + 100.0)
    ledger.drop_slot(1)
    assert ledger.loads.churn.tolist()[1] == 0.0, "who comes next has an empty cache"
    ledger.check()


def test_churn_is_measured_by_what_is_found() -> None:
    ledger = Ledger()
    ledger.ensure(2)
    assert ledger.loads.recent.turnover == np.inf
    ledger.book("a", 0, b"", 100, 10.0, isl_tokens=100)
    ledger.check()
    assert ledger.loads.recent.turnover == np.inf, "nothing was found"
    ledger.book("b", 1, b"", 50, 10.0, isl_tokens=100)
    ledger.check()
    assert ledger.loads.recent.turnover == pytest.approx(150.0 / 0.25)
    ledger.book("c", 1, b"", 0, 10.0 + CHURN_MEMORY_S, isl_tokens=200 / np.e)  # type: ignore[arg-type]
    assert ledger.loads.recent.turnover == pytest.approx(150.0 / np.e / 0.625), (
        "as late as the churn"
    )
    ledger.check()


@pytest.mark.parametrize(
    "workload",
    [
        WorkloadSettings(kind="agents", rate=2.0, requests=600),
        WorkloadSettings(kind="rl", requests=512),
    ],
    ids=["agents", "rl"],
)
def test_first_tokens_come_sooner(workload: WorkloadSettings) -> None:
    """On workloads nothing was tuned on; simulated, so the numbers are the same every time."""
    ours, peer = (
        run(SimulationSettings(policy=policy, workloads=[workload], block_size=64))
        for policy in ("first-token", "kv-cost")
    )
    assert ours.ttft_s.p90 < 0.7 * peer.ttft_s.p90
    assert ours.hit_share > peer.hit_share


def test_a_prompt_that_all_share_does_not_gather_them() -> None:
    """Nothing is cached by one rank alone, so nothing may be worse than by the contract's formula.

    It was: while distinct blocks were what decoding cost, a shared prompt cost nothing more.
    """
    workload = WorkloadSettings(kind="shared-prompts", rate=60.0, requests=1_000, prompts=4)
    ours, peer = (
        run(SimulationSettings(policy=policy, workloads=[workload], block_size=64))
        for policy in ("first-token", "kv-cost")
    )
    assert ours.ttft_s.p90 < peer.ttft_s.p90
    assert ours.itl_s.p90 < peer.itl_s.p90
    assert ours.e2e_s.mean < peer.e2e_s.mean
    assert ours.load_cov < peer.load_cov
