"""The choice among priced candidates, compiled and plain, against every term read aloud."""

from __future__ import annotations

import math
import random
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from select_service.core.ledger.loads import ranks_in, unpacked
from select_service.core.ledger.slot_loads import SlotLoads
from select_service.core.pricing import plain_pricer
from select_service.core.pricing.cost import TierMatches
from select_service.core.pricing.pick import pick
from select_service.core.pricing.weights import Weights
from tests.indexer.kernels import twins
from tests.select_service.core.pricing.test_cost import groups

EITHER = pytest.mark.parametrize("twin", twins("select_service.core._pricer", plain_pricer))
ROWS = 12
counts = st.integers(0, 5) | st.integers(0, 2**40)
blocks = st.integers(0, 6)
weights = st.floats(-2.0, 3.0) | st.just(1.0)
shares = st.just(0.0) | st.floats(0.0, 1.0)
factors = st.sampled_from([1.0, 0.0, 0.3]) | st.floats(0.0, 1.0)


def column(of: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    """A value for each slot; often the same for all."""
    return st.lists(of, min_size=ROWS, max_size=ROWS) | of.map(lambda one: [one] * ROWS)


OF_CONTRACT = st.tuples(
    weights,
    st.just(0.0) | st.floats(0.0, 3.0),
    weights,
    *(shares, shares),
    st.just(0.0) | st.floats(0.01, 2.0),
    st.booleans(),
)
OF_OURS = st.tuples(
    *(weights, weights, shares, st.booleans(), weights),
    st.just(0.0) | st.floats(0.0, 1e5) | st.sampled_from([1e-300, 1e200]),
    shares,
    weights,
    shares,
)
CHOSEN = st.tuples(OF_CONTRACT, st.just(()) | OF_OURS).map(lambda two: Weights(*two[0], *two[1]))


@EITHER
@given(
    loads=st.tuples(*(column(counts) for _ in range(6))),
    slowness=column(st.just(0.0) | st.floats(0.0, 15.0)),
    heard=column(st.floats(0.0, 20.0) | st.just(1e15)),
    held=st.none() | st.tuples(*(column(blocks) for _ in range(3))),
    booked=st.none() | column(blocks),
    isl=st.integers(1, 200),
    block_size=st.sampled_from([1, 3, 16, 17]),
    rows=st.integers(1, ROWS) | st.lists(st.integers(0, ROWS - 1), min_size=1, unique=True),
    chosen=CHOSEN,
    trust=st.none() | column(factors),
    preferred=st.none() | column(st.floats(0.4, 2.5)),
    now=st.sampled_from([15.0, 0.0, 1e15]) | st.floats(0.0, 1e12),
    seed=st.integers(0, 3),
)
def test_like_the_terms_read_aloud(
    twin: ModuleType,
    loads: tuple[list[int], ...],
    slowness: list[float],
    heard: list[float],
    held: tuple[list[int], ...] | None,
    booked: list[int] | None,
    isl: int,
    block_size: int,
    rows: int | list[int],
    chosen: Weights,
    trust: list[float] | None,
    preferred: list[float] | None,
    now: float,
    seed: int,
) -> None:
    """Slot by slot, in the order in which `cost.py` states the formula."""
    prefill, decode, churn, context, ahead, requests = loads
    slots = list(range(rows)) if isinstance(rows, int) else rows
    device, host, disk = held or ([0] * ROWS,) * 3
    least, whole = min(prefill[slot] for slot in slots), -(-isl // block_size)
    w, costs, cached_there = chosen, [], []
    for at, slot in enumerate(slots):
        on = device[slot], host[slot], disk[slot]
        tiers = on[0] + w.host_cache_hit_weight * on[1] + w.disk_cache_hit_weight * on[2]
        cached = math.floor(tiers * block_size + 0.5)
        credit = w.overlap_score_credit
        if w.track_prefill_tokens and w.overlap_score_credit_decay > 0.0:
            excess = (prefill[slot] - least) / block_size
            credit *= 1.0 / (1.0 + w.overlap_score_credit_decay * excess / whole)
        credited = credit * on[0]
        credited = credited + w.host_cache_hit_weight * on[1] + w.disk_cache_hit_weight * on[2]
        if trust is not None:
            cached, credited = math.floor(cached * trust[slot]), credited * trust[slot]
        here = booked[slot] if booked else 0
        expected = max(0.0, float(here - sum(on))) if w.expects_booked else 0.0
        worked = min(max(0.0, (now - heard[slot]) * w.pace), ahead[slot]) if w.pace else 0.0
        raw = own = 0.0
        if w.track_prefill_tokens:
            raw = (prefill[slot] - worked + max(cached, isl)) / block_size
            own = max(cached, isl) / block_size
        raw, own = max(0.0, raw - credited - expected), max(0.0, own - credited - expected)
        bare = float(decode[slot] + 6 - here)
        cost = w.prefill_load_scale * (
            raw
            + (w.delay_weight + w.eviction_weight * churn[slot] + w.interference * requests[slot])
            * own
        )
        cost += w.decode_load_scale * bare
        cost += w.context_load_scale * float(context[slot] + 6)
        cost += w.decode_active_request_weight * float(requests[slot])
        cost *= 1.0 + w.slowness * slowness[slot]
        costs.append(cost if preferred is None else cost * preferred[at])
        cached_there.append(cached)
    at = pick(np.array(costs), w.temperature, random.Random(seed))
    columns = [np.array(one, dtype=np.float64) for one in (prefill, decode, churn, context)]
    columns += [np.array(heard), np.array(ahead, dtype=np.float64)]
    pricer = twin.Pricer(*columns, np.array(requests), np.array(slowness))
    found = pricer.choose(
        rows if isinstance(rows, int) else np.array(rows),
        isl,
        block_size,
        6,
        chosen,
        None if held is None else TierMatches(groups(held[0]), groups(held[1]), groups(held[2])),
        groups(booked) if booked else None,
        None if trust is None else np.array(trust),
        None if preferred is None else np.array(preferred[: len(slots)]),
        now,
        random.Random(seed),
    )
    slot = slots[at]
    left = decode[slot] + 6 - (booked[slot] if booked else 0)
    assert found == (slot, costs[at], left, cached_there[at], max(cached_there))
    assert pricer.held_at(slot) == (device[slot], host[slot], disk[slot])


def empty(twin: ModuleType, rows: int) -> Any:
    return twin.Pricer(*np.zeros((6, rows)), np.zeros(rows, dtype=np.int64), np.zeros(rows))


def ask(pricer: Any, rows: Any, **more: Any) -> Any:
    """A choice of which only some things matter."""
    plain = Weights(1.0, 0.0, 1.0, 0.75, 0.25, 0.0, True)
    asked = {
        "isl_tokens": 1,
        "block_size": 1,
        "blocks": 0,
        "weights": plain,
        "found": None,
        "shared": None,
        "trust": None,
        "preference": None,
        "now": 0.0,
        "rng": random.Random(1),
    }
    return pricer.choose(rows, *(asked | more).values())


@EITHER
def test_it_does_not_read_beyond_its_columns(twin: ModuleType) -> None:
    pricer = empty(twin, 4)
    for rows in (0, 5, -1, np.array([], dtype=np.int64)):
        with pytest.raises(ValueError, match="rows"):
            ask(pricer, rows)
    for slot in (-1, 4):
        beyond: list[tuple[int, Any]] = [(1, np.array([slot]))]
        if slot > 0 or twin is not plain_pricer:  # numpy counts negative ones from the end
            for found in (
                TierMatches(beyond, [], []),
                TierMatches([], beyond, []),
                TierMatches([], [], beyond),
            ):
                with pytest.raises(IndexError):
                    ask(pricer, 4, found=found)
            with pytest.raises(IndexError):
                ask(pricer, 4, shared=beyond)
        with pytest.raises(IndexError):
            ask(pricer, np.array([0, slot]))
        with pytest.raises(IndexError):
            pricer.held_at(slot)
    with pytest.raises(ValueError, match="rows"):
        ask(pricer, 4, trust=np.ones(3))
    with pytest.raises(ValueError, match=r"rows|shapes"):
        ask(pricer, 4, preference=np.ones(3))
    for shorter in range(8):
        columns = [np.zeros(3 if at == shorter else 4) for at in range(8)]
        with pytest.raises(ValueError, match="length"):
            twin.Pricer(*columns[:6], columns[6].astype(np.int64), columns[7])


@EITHER
def test_factors_of_one_change_nothing(twin: ModuleType) -> None:
    rng = random.Random(5)
    for _ in range(200):
        columns = [np.array([float(rng.randrange(5000)) for _ in range(ROWS)]) for _ in range(6)]
        device = groups([rng.randrange(9) for _ in range(ROWS)])
        asked = {"isl_tokens": rng.randrange(1, 300), "found": TierMatches(device, [], [])}
        pricer = twin.Pricer(*columns, np.arange(ROWS), np.zeros(ROWS))
        ones = np.ones(ROWS)
        drawn = [
            ask(pricer, ROWS, **asked, **more, rng=random.Random(1))
            for more in ({}, {"trust": ones}, {"preference": ones})
        ]
        assert drawn[0] == drawn[1] == drawn[2]


class AlmostOne(random.Random):
    def random(self) -> float:
        return 1.0 - 2**-53


@EITHER
def test_a_draw_of_almost_one_is_the_last_of_equals(twin: ModuleType) -> None:
    assert ask(empty(twin, 3), 3, rng=AlmostOne())[0] == 2


@EITHER
def test_what_an_earlier_prompt_held_is_forgotten(twin: ModuleType) -> None:
    pricer = empty(twin, 3)
    ask(
        pricer,
        3,
        found=TierMatches([(5, np.array([1]))], [(2, np.array([1]))], [(1, np.array([2]))]),
    )
    assert [pricer.held_at(slot) for slot in range(3)] == [(0, 0, 0), (5, 2, 0), (0, 0, 1)]
    ask(pricer, 3)
    assert [pricer.held_at(slot) for slot in range(3)] == [(0, 0, 0)] * 3


@EITHER
@given(
    ranks=st.lists(st.tuples(counts, counts, st.floats(0, 100), st.floats(0, 3)), max_size=ROWS),
    room=st.floats(1, 1e6),
)
def test_how_full_ranks_are(
    twin: ModuleType,
    ranks: list[tuple[int, int, float, float]],
    room: float,
) -> None:
    columns = np.array(ranks, dtype=np.float64).reshape(len(ranks), 4).T.copy()
    prefill, decode, block_tokens, floor = columns
    lanes = [0.0] * 8
    for row, (booked, blocks, tokens, least) in enumerate(columns.T.tolist()):
        lanes[row % 8] += max(booked, blocks * tokens, least * room)
    total = 0.0
    for lane in lanes:  # not `sum`, which is exact in later Pythons
        total += lane
    fill = twin.Fill(prefill, decode, block_tokens, floor)
    assert fill.total(room) == total
    prefill[:] = 0.0  # it reads what is there, not what was
    decode[:] = 0.0
    assert fill.total(0.0) == 0.0


@EITHER
def test_columns_of_one_length(twin: ModuleType) -> None:
    some, more = np.zeros(3), np.zeros(4)
    for longer in range(4):
        columns = [more if longer == at else some for at in range(4)]
        with pytest.raises(ValueError, match="length"):
            twin.Fill(*columns)


@pytest.mark.parametrize("rows", [0, 1, 9])
def test_columns_are_packed_as_they_are_now(rows: int) -> None:
    loads = SlotLoads(prior_tokens_per_s=1.0)
    loads.ensure(rows)
    for at, one in enumerate((loads.prefill, loads.decode, loads.churn, loads.context), 1):
        one[:] = np.arange(rows) + at
    loads.queue_updated_at[:], loads.ahead[:], loads.prefilling = 1.25, 3.0, 3
    loads.requests[:] = np.arange(rows) * 7
    told = unpacked(loads.pack())
    assert ranks_in(loads.pack()) == rows
    columns = loads.prefill, loads.decode, loads.churn, loads.context
    assert [one.tolist() for one in told[:4]] == [one.tolist() for one in columns]
    assert told[4:6] == (3.0, loads.recent.turnover)
    assert (told.queue_updated_at, told.ahead, told.pace, told.requests) == (None, None, 0.0, None)
    before, loads.follows_queues, loads.packed = loads.pack(), True, b""
    paced = unpacked(loads.pack())
    assert loads.pack().startswith(before)
    assert paced.queue_updated_at is not None
    assert paced.ahead is not None
    assert (paced.queue_updated_at.tolist(), paced.ahead.tolist()) == ([1.25] * rows, [3.0] * rows)
    assert paced.pace == loads.recent.pace
    assert paced.requests is not None
    assert paced.requests.tolist() == loads.requests.tolist()
    assert paced.slowness is None
    loads.slowness[:], loads.has_worn, loads.packed = np.arange(rows) * 0.5, True, b""
    assert ranks_in(loads.pack()) == rows
    worn = unpacked(loads.pack())
    assert worn.slowness is not None
    assert worn.slowness.tolist() == loads.slowness.tolist()
    assert worn.pace == paced.pace
    assert np.array_equal(np.array([*worn[:4]]), np.array([*paced[:4]]))
    queues = (
        (worn.queue_updated_at, paced.queue_updated_at),
        (worn.ahead, paced.ahead),
        (worn.requests, paced.requests),
    )
    assert all(np.array_equal(one, same) for one, same in queues if one is not None)


def test_the_length_says_what_is_told() -> None:
    told = {16 + 32 * ranks: ranks for ranks in range(60)}
    before = {24 + 48 * ranks: ranks for ranks in range(40)}  # recordings without requests
    paced = {-(-(24 + 56 * ranks) // 32) * 32: ranks for ranks in range(40)}
    known = told | before | paced
    assert len(known) == len(told) + len(before) + len(paced)
    for length in range(1800):
        ranks = known.get(length)
        if ranks is None:
            with pytest.raises(ValueError, match="loads of"):
                ranks_in(bytes(length))
            continue
        assert ranks_in(bytes(length)) == ranks
        loads = unpacked(bytes(length))
        assert (loads.queue_updated_at is None) == (length in told)
        assert (loads.requests is None) == (length not in paced)
