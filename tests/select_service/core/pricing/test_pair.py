"""The choice between one worker and a pair, against every pair tried by hand."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from select_service.core.decisions.explain import ExplainedRecord
from select_service.core.pricing.weights import SEQUENCE_TOKENS
from select_service.errors import ServiceError
from select_service.types import PairSelection, RouterConfig, Selection
from tests.select_service.core.whole_fleet import DEFAULT, Fleet

if TYPE_CHECKING:
    from select_service.types.router_config import Policy

PROMPT = tuple(range(1, 7))
MOVE = 0.375

PLACES = st.sampled_from([None, "a", "b"])
WORKERS = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["prefill", "decode", "aggregated", "prefill", "decode"]),
            "zone": PLACES,
            "enforcement": st.sampled_from([None, None, "required", "preferred"]),
            "weight": st.sampled_from([None, 0.5, 2.0]),
            "held": st.integers(0, len(PROMPT)),
            "load": st.integers(0, 4),
        }
    ),
    min_size=1,
    max_size=6,
)


def register(fleet: Fleet, workers: list[dict[str, Any]]) -> None:
    for worker_id, one in enumerate(workers, 1):
        fleet.worker(
            worker_id,
            role=one["role"],
            topology_domains={} if one["zone"] is None else {"zone": one["zone"]},
            kv_transfer_domain=None if one["enforcement"] is None else "zone",
            kv_transfer_enforcement=one["enforcement"],
            kv_transfer_preferred_weight=one["weight"],
        )
        if one["held"]:
            fleet.hold(worker_id, list(PROMPT[: one["held"]]))
        if one["load"]:
            fleet.book(f"load{worker_id}", worker_id, *range(100, 100 + one["load"]))


def together(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one["zone"] is not None and one["zone"] == other["zone"]


class Naive:
    """The formulas as deploy/docs/policies.md says them, one worker after another."""

    def __init__(self, policy: Policy, workers: list[dict[str, Any]]) -> None:
        self.is_first_token = policy == "first-token"
        computing = sum(one["load"] > 0 for one in workers) / len(workers)
        self.delay = computing if self.is_first_token else 0.0
        self.interference = 0.05 / (1.0 + computing) if self.is_first_token else 0.0

    def prefill(self, one: dict[str, Any]) -> float:
        own = float(len(PROMPT) - one["held"])
        return float(one["load"] + own + (self.delay + self.interference * bool(one["load"])) * own)

    def decode(self, one: dict[str, Any]) -> float:
        blocks = float(one["load"] + len(PROMPT))
        if not self.is_first_token:
            return blocks
        return (blocks + SEQUENCE_TOKENS / 16 * bool(one["load"])) / 16

    def whole(self, one: dict[str, Any]) -> float:
        return self.prefill(one) + self.decode(one)

    def pair(self, prefill: dict[str, Any], decode: dict[str, Any]) -> float:
        """Infinite where blocks may not move."""
        for one, other in ((prefill, decode), (decode, prefill)):
            if one["enforcement"] == "required" and not together(one, other):
                return math.inf
        cost: float = self.decode(decode) + MOVE * (len(PROMPT) - decode["held"])
        if prefill["enforcement"] == "preferred" and together(prefill, decode):
            cost *= math.exp(-math.tanh(1.0 if prefill["weight"] is None else prefill["weight"]))
        return self.prefill(prefill) + cost


@pytest.mark.parametrize("policy", ["kv-cost", "first-token"])
@given(workers=WORKERS)
def test_nobody_is_cheaper_than_what_is_chosen(
    policy: Policy, workers: list[dict[str, Any]]
) -> None:
    fleet = Fleet(RouterConfig(policy=policy, kv_transfer_cost_per_block=MOVE))
    register(fleet, workers)
    naive = Naive(policy, workers)
    by_role = {
        role: [one for one in workers if one["role"] == role]
        for role in ("prefill", "decode", "aggregated")
    }
    ready = [one for one in by_role["decode"] if one["held"] == len(PROMPT)]
    whole = min(map(naive.whole, by_role["aggregated"] + ready), default=math.inf)
    pairs = itertools.starmap(naive.pair, itertools.product(by_role["prefill"], by_role["decode"]))
    pair = min(pairs, default=math.inf)
    if math.isinf(pair) and math.isinf(whole):
        with pytest.raises(ServiceError):
            fleet.pair("p", *PROMPT)
        return
    answer = fleet.pair("p", *PROMPT)
    assert isinstance(answer, PairSelection), "nobody is busy"
    assert answer.aggregated_cost == (None if math.isinf(whole) else pytest.approx(whole))
    assert answer.disaggregated_cost == (None if math.isinf(pair) else pytest.approx(pair))
    if pair != pytest.approx(whole):  # else rounding decides
        assert answer.mode == ("disaggregated" if pair < whole else "aggregated")
    decode = workers[answer.decode.worker_id - 1]
    record = fleet.core.decisions.find("p")
    assert record is not None
    told = ExplainedRecord(record, 0.0, MOVE).decision()
    assert told.pair
    assert told.chosen is not None
    if answer.prefill is None:
        assert naive.whole(decode) == pytest.approx(whole)
        assert told.chosen.cost == answer.aggregated_cost
    else:
        prefill = workers[answer.prefill.worker_id - 1]
        assert naive.pair(prefill, decode) == pytest.approx(pair)
        assert told.pair.prefill is not None
        assert told.pair.decode is not None
        assert told.pair.prefill.cost + told.pair.decode.cost == answer.disaggregated_cost


@given(WORKERS)
def test_advice_is_what_a_pair_would_get(workers: list[dict[str, Any]]) -> None:
    fleet = Fleet(RouterConfig(kv_transfer_cost_per_block=MOVE))
    register(fleet, [*workers, dict(workers[0], role="aggregated", held=0)])
    selection = fleet.select(*PROMPT)
    assert isinstance(selection, Selection)
    answer = fleet.pair("p", *PROMPT)
    assert isinstance(answer, PairSelection)
    advice = selection.advice
    assert advice
    assert (advice.mode, advice.reason) == (answer.mode, answer.reason)
    assert advice.aggregated_cost == answer.aggregated_cost
    assert advice.disaggregated_cost == answer.disaggregated_cost
    assert (advice.prefill is None) == (answer.prefill is None)


def test_a_scope_knows_its_roles_when_workers_change() -> None:
    fleet = Fleet()

    def given_roles() -> bool:
        return fleet.core.partitions[DEFAULT].fleet_slots.roles.given

    fleet.worker(1)
    assert not given_roles()
    fleet.patch(1, role="decode")
    assert given_roles()
    fleet.delete(1)
    assert not given_roles()
