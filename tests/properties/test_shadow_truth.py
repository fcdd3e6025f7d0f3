"""A shadow policy does what it says and nothing else: against records of decisions, and twins.

Random fleets, as in `test_decision_truth.py`, each with random other weights that look on. What the
shadow claims is computed again from the JSON of the decision alone, by the formula as it is in
the contract; and the same life without a shadow must be the same to the last byte.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import msgspec
import pytest

from select_service.core import partition
from select_service.core.decisions.record import DecisionRecord
from select_service.core.decisions.shadow import SKIPPED
from select_service.core.decisions.shadow_regret import ShadowTally
from select_service.core.pricing import plain_pricer
from select_service.types import Answer
from select_service.types.shadow import REGRET_BOUNDS, ShadowSettings
from tests.indexer.kernels import twins
from tests.properties.test_decision_truth import Fleet

EITHER = pytest.mark.parametrize("twin", twins("select_service.core._pricer", plain_pricer))


def cost_by(weights: dict[str, Any], told: dict[str, Any], one: dict[str, Any]) -> float:
    """The cost of a rank by the contract, or first-token, with these weights."""
    size, isl = told["prompt"]["block_size"], told["prompt"]["isl_tokens"]
    device, host, disk = one["device_blocks"], one["host_blocks"], one["disk_blocks"]
    per_host, per_disk = weights["host_cache_hit_weight"], weights["disk_cache_hit_weight"]
    cached = cached_by(weights, told, one)
    credit, raw = weights["overlap_score_credit"], 0.0
    if weights["track_prefill_tokens"]:
        worked = 0.0
        if weights["pace"]:
            worked = min(max(0.0, one["unheard_s"] * weights["pace"]), one["ahead_tokens"])
        raw = (one["prefill_tokens"] - worked + max(isl, cached)) / size
        if weights["overlap_score_credit_decay"] > 0.0:
            least = min(other["prefill_tokens"] for other in open_to(told))
            excess = (one["prefill_tokens"] - least) / size
            blocks = -(-isl // size)
            credit *= 1.0 / (1.0 + weights["overlap_score_credit_decay"] * excess / blocks)
    credited = (credit * device + per_host * host + per_disk * disk) * one["trust"]
    decode = one["decode_blocks"] + told["prompt"]["blocks"] - one["shared_blocks"]
    own = more = expected = 0.0
    if weights["expects_booked"]:  # taken off behind the credit: one sum of both rounds otherwise
        expected = max(0, one["shared_blocks"] - device - host - disk)
    if weights["track_prefill_tokens"]:
        own = max(0.0, max(isl, cached) / size - credited - expected)
    if weights["delay_weight"] or weights["eviction_weight"] or weights["interference"]:
        more = weights["delay_weight"] + weights["eviction_weight"] * one["churn_tokens"]
        more = (more + weights["interference"] * (one["requests"] or 0)) * own
    cost = weights["prefill_load_scale"] * (max(0.0, raw - credited - expected) + more)
    cost += weights["decode_load_scale"] * decode
    cost += weights["context_load_scale"] * one["context_cost"]
    cost += weights["decode_active_request_weight"] * (one["requests"] or 0)
    cost *= 1.0 + weights["slowness"] * ((one["slowness"] or 1.0) - 1.0)
    return float(cost * (1.0 if one["taint_factor"] is None else one["taint_factor"]))


def cached_by(weights: dict[str, Any], told: dict[str, Any], one: dict[str, Any]) -> int:
    blocks = one["device_blocks"] + weights["host_cache_hit_weight"] * one["host_blocks"]
    blocks += weights["disk_cache_hit_weight"] * one["disk_blocks"]
    tokens: int = math.floor(blocks * told["prompt"]["block_size"] + 0.5)
    return tokens if one["trust"] == 1.0 else math.floor(tokens * one["trust"])


def open_to(told: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for one in told["candidates"] if one["excluded"] is None]


def check(told: dict[str, Any]) -> None:
    """Compute what the shadow says again."""
    said, ranks = told["shadow"], open_to(told)
    assert len(ranks) > 1
    by = {
        (one["worker_id"], one["dp_rank"]): (
            cost_by(told["weights"], told, one),
            cost_by(said["weights"], told, one),
            one,
        )
        for one in ranks
    }
    chosen = told["chosen"]
    live, own = ((said[side]["worker_id"], said[side]["dp_rank"]) for side in ("live", "shadow"))
    assert live == (chosen["worker_id"], chosen["dp_rank"])
    assert said["agrees"] == (live == own)
    for key, side in ((live, said["live"]), (own, said["shadow"])):
        by_live, by_shadow, one = by[key]
        assert (side["cost_by_live_weights"], side["cost_by_shadow_weights"]) == (
            by_live,
            by_shadow,
        )
        isl = told["prompt"]["isl_tokens"]
        cached = min(isl, cached_by(told["weights"], told, one))
        assert (side["cached_tokens"], side["prefill_tokens"]) == (cached, isl - cached)
        assert side["queued_prefill_tokens"] == one["prefill_tokens"]
        assert side["decode_blocks"] == one["decode_cost"]
    assert said["regret_by_live_weights"] == by[own][0] - by[live][0]
    assert said["regret_by_shadow_weights"] == by[live][1] - by[own][1]
    if told["weights"]["temperature"] == 0.0:
        assert said["regret_by_live_weights"] >= 0.0
    if said["weights"]["temperature"] == 0.0:
        low = min(cost for _, cost, _ in by.values())
        assert by[own][1] == low
        assert said["regret_by_shadow_weights"] >= 0.0
        if by[live][1] == low:
            assert said["agrees"], "among equals it is the live choice"


class Watched(Fleet):
    """A fleet whose decisions other weights look on."""

    def __init__(self, seed: int, settings: ShadowSettings | None) -> None:
        super().__init__(seed)
        self.shadowed: list[dict[str, Any]] = []
        self.core.follow_shadow(settings, self.now)

    def tell(self, record: object, answer: Answer | None) -> None:
        super().tell(record, answer)
        assert isinstance(record, DecisionRecord)
        told = json.loads(self.told[-1][1])
        if "shadow" in told:
            check(told)
            self.shadowed.append(told)

    def live(self, steps: int) -> None:
        for _ in range(steps):
            self.ask()
            self.disturb()
        self.check()


def other_weights(fleet_seed: int) -> dict[str, Any]:
    draw = Fleet(fleet_seed).draw
    weights = {
        "overlap_score_credit": draw.choice([0.0, 0.5, 1.0, 3.0]),
        "overlap_score_credit_decay": draw.choice([0.0, 0.0, 2.0]),
        "prefill_load_scale": draw.choice([0.0, 0.5, 1.0, 8.0]),
        "host_cache_hit_weight": draw.choice([0.0, 0.75, 1.0]),
        "disk_cache_hit_weight": draw.choice([0.0, 0.25, 1.0]),
        "temperature": draw.choice([0.0, 0.0, 0.0, 0.9]),
        "track_prefill_tokens": draw.random() < 0.8,
    }
    said: dict[str, Any] = dict(draw.sample(sorted(weights.items()), draw.randint(1, 7)))
    if draw.random() < 0.5:
        said["policy"] = draw.choice(["kv-cost", "first-token"])
    return said


def sums_of(fleet: Watched) -> ShadowTally:
    sums, room = ShadowTally(), fleet.core.shadow_control
    for there in fleet.core.partitions.values():
        sums.add(there.shadow_tally or ShadowTally())
    assert (room.scored, room.agreed) == (sums.scored, sums.agreed)
    assert room.live_prefill_tokens == sums.live.prefill_tokens
    assert room.own_prefill_tokens == sums.shadow.prefill_tokens
    return sums


def check_sums(fleet: Watched) -> None:
    """What is counted is what follows from the records, one by one."""
    sums = sums_of(fleet)
    assert sums.scored + sum(sums.skipped.values()) == fleet.core.counters.selections
    assert set(sums.skipped) <= set(SKIPPED)
    if fleet.core.counters.selections_waited:
        return  # their decisions are told to who waited, and not here
    assert sums.scored == len(fleet.shadowed)
    assert sums.agreed == sum(told["shadow"]["agrees"] for told in fleet.shadowed)
    for tally, name in (
        (sums.regret_live, "regret_by_live_weights"),
        (sums.regret_shadow, "regret_by_shadow_weights"),
    ):
        regrets = [told["shadow"][name] for told in fleet.shadowed]
        assert tally.total == sum(regrets)
        classes = Counter(sum(bound < one for bound in REGRET_BOUNDS) for one in regrets)
        assert tally.counts == [classes[at] for at in range(len(REGRET_BOUNDS) + 1)]
    for side, name in ((sums.live, "live"), (sums.shadow, "shadow")):
        for field in ("prefill_tokens", "cached_tokens", "queued_prefill_tokens", "decode_blocks"):
            assert getattr(side, field) == sum(
                told["shadow"][name][field] for told in fleet.shadowed
            )


SEEDS = pytest.mark.parametrize(
    "seeds",
    [
        range(30),
        pytest.param(
            range(1000, 1500),
            marks=(pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)),
        ),
    ],
)


@EITHER
@SEEDS
def test_what_it_says_follows_from_the_decision(
    twin: Any, seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition, "Pricer", twin.Pricer)
    scored = differed = 0
    for seed in seeds:
        settings = ShadowSettings(weights=other_weights(seed), sample=1.0)
        fleet = Watched(seed, settings)
        fleet.live(8)
        check_sums(fleet)
        scored += len(fleet.shadowed)
        differed += sum(not told["shadow"]["agrees"] for told in fleet.shadowed)
    assert scored > 2 * len(seeds)
    assert differed > len(seeds) // 5


@EITHER
@SEEDS
@pytest.mark.parametrize("sample", [1.0, 0.3])
def test_decisions_are_the_same_with_it_and_without(
    twin: Any, sample: float, seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last byte, ties and temperatures included; and the generator stands where it stood."""
    monkeypatch.setattr(partition, "Pricer", twin.Pricer)
    drawn = 0
    for seed in seeds:
        without = Watched(seed, None)
        within = Watched(seed, ShadowSettings(weights=other_weights(seed), sample=sample))
        for fleet in (without, within):
            fleet.live(8)
        texts = [json.loads(text) for _, text in within.told]
        drawn += sum(told["weights"]["temperature"] > 0.0 for told in texts)
        for told in texts:
            told.pop("shadow", None)
        alone = [json.loads(text) for _, text in without.told]
        for told in (*texts, *alone):  # told where anybody prices by it
            for one in told["candidates"] if told["weights"]["pace"] == 0.0 else ():
                assert one.pop("worked_off_tokens") in {None, 0.0}
                del one["unheard_s"], one["ahead_tokens"], one["requests"], one["slowness"]
        assert texts == alone
        assert within.core._rng.getstate() == without.core._rng.getstate()
        assert loads(within) == loads(without)
    assert drawn > len(seeds) // 2


def loads(fleet: Watched) -> bytes:
    return msgspec.json.encode(fleet.core.queries.loads())


@EITHER
@SEEDS
def test_equal_weights_agree_always(
    twin: Any, seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is drawn: both draw alike."""
    monkeypatch.setattr(partition, "Pricer", twin.Pricer)
    scored = 0
    for seed in seeds:
        credit = Fleet(seed).core.reader.config.overlap_score_credit
        settings = ShadowSettings(weights={"overlap_score_credit": credit}, sample=1.0)
        fleet = Watched(seed, settings)
        fleet.live(8)
        sums = sums_of(fleet)
        assert sums.agreed == sums.scored >= len(fleet.shadowed)
        assert sums.regret_live.total == sums.regret_shadow.total == 0.0
        for told in fleet.shadowed:
            assert told["shadow"]["live"] == told["shadow"]["shadow"]
        scored += sums.scored
    assert scored > 2 * len(seeds)
