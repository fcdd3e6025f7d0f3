"""A record of a decision explains it: from its JSON alone follow every cost and who was cheapest.

Random fleets (ranks, taints, roles, caps, tiers, shared prompts, weights), random requests, both
pricers. Each decision is told at once, and again when workers have gone and load has changed: it
must say the same.
"""

from __future__ import annotations

import json
import math
import random
from typing import Any

import msgspec
import pytest

from indexer.core.packing import pack_u64
from indexer.core.registry import StreamRegistry
from indexer.types import Scope, Tier, WorkerRank
from select_service.core import partition
from select_service.core.admission.queue import Ticket
from select_service.core.decisions.explain import ExplainedRecord
from select_service.core.decisions.record import DecisionRecord
from select_service.core.pricing import plain_pricer
from select_service.core.service import SelectionCore
from select_service.errors import ServiceError
from select_service.types import (
    Answer,
    CacheThreshold,
    CoreLimits,
    PinnedWorker,
    RouterConfig,
    RouterConfigOverride,
    RoutingConstraints,
    SelectAndReserveRequest,
    Selection,
    SelectRequest,
    WorkerSpec,
)
from select_service.types.admission import AdmissionSettings
from tests.effort import share_of
from tests.indexer.kernels import twins

EITHER = pytest.mark.parametrize("twin", twins("select_service.core._pricer", plain_pricer))
TAINTS = ("a", "b", "c")
TIERS = ((Tier.DEVICE,), (Tier.DEVICE, Tier.DEVICE, Tier.HOST_PINNED, Tier.DISK))
HERE = Scope("default", "default")
REASONS = {
    *("not_allowed", "pinned_elsewhere", "taint", "role", "full", "busy", "cache_hit"),
    *("draining", "not_schedulable", "refused"),
}


def priced(told: dict[str, Any], one: dict[str, Any], least: float) -> float:
    """The cost of a rank by the contract, out of what the record says of it."""
    weights, prompt = told["weights"], told["prompt"]
    size, isl, load = prompt["block_size"], prompt["isl_tokens"], one["prefill_tokens"]
    tiers = one["device_blocks"], one["host_blocks"], one["disk_blocks"]
    host, disk = weights["host_cache_hit_weight"], weights["disk_cache_hit_weight"]
    cached = math.floor((tiers[0] + host * tiers[1] + disk * tiers[2]) * size + 0.5)
    if one["trust"] != 1.0:
        cached = math.floor(cached * one["trust"])
    assert one["cached_tokens"] == cached
    credit = weights["overlap_score_credit"]
    raw = 0.0
    if weights["track_prefill_tokens"]:
        raw = (load - worked_off(weights, one) + max(isl, cached)) / size
        if weights["overlap_score_credit_decay"] > 0.0:
            excess = max(load - least, 0.0) / size
            decay = weights["overlap_score_credit_decay"]
            credit = credit * (1.0 / (1.0 + decay * excess / -(-isl // size)))
    credited = (credit * tiers[0] + host * tiers[1] + disk * tiers[2]) * one["trust"]
    decode = one["decode_blocks"] + prompt["blocks"] - one["shared_blocks"]
    if weights["decode_load_scale"] == 1.0:
        cost = weights["prefill_load_scale"] * max(0.0, raw - credited) + decode
        assert one["delay_cost"] == one["eviction_cost"] == one["expected_blocks"] == 0
    else:
        cost = ours(told, one, raw, credited)
    factor = one["taint_factor"]
    assert one["prefill_cost"] == raw
    assert one["decode_cost"] == decode
    whole: float = cost if factor is None else cost * factor
    return whole


def worked_off(weights: dict[str, Any], one: dict[str, Any]) -> float:
    """What of its queue counts as computed, though nobody has said so."""
    if weights["decode_load_scale"] == 1.0:
        assert weights["pace"] == 0.0
        assert one["worked_off_tokens"] in {None, 0.0}
        return 0.0
    assert weights["pace"] > 0.0
    assert one["unheard_s"] >= 0.0
    assert 0 <= one["ahead_tokens"] <= one["prefill_tokens"]
    worked: float = min(one["unheard_s"] * weights["pace"], float(one["ahead_tokens"]))
    assert one["worked_off_tokens"] == worked
    return worked


def ours(told: dict[str, Any], one: dict[str, Any], raw: float, credited: float) -> float:
    """The same by first-token."""
    weights, prompt = told["weights"], told["prompt"]
    size = prompt["block_size"]
    held = one["device_blocks"] + one["host_blocks"] + one["disk_blocks"]
    assert weights["expects_booked"]
    assert one["expected_blocks"] == max(0, one["shared_blocks"] - held)
    own = 0.0
    if weights["track_prefill_tokens"]:
        own = max(prompt["isl_tokens"], one["cached_tokens"]) / size
    own = max(0.0, own - credited - one["expected_blocks"])
    left = max(0.0, raw - credited - one["expected_blocks"])
    eviction = weights["eviction_weight"] * one["churn_tokens"]
    assert one["delay_cost"] == weights["delay_weight"] * own
    assert one["eviction_cost"] == eviction * own
    interference = weights["interference"] * one["requests"]
    assert one["interference_cost"] == interference * own
    more = (weights["delay_weight"] + eviction + interference) * own
    prefill: float = weights["prefill_load_scale"] * (left + more)
    decode = one["decode_blocks"] + prompt["blocks"] - one["shared_blocks"]
    assert (weights["decode_load_scale"], weights["context_load_scale"]) == (0.0, 0.0625)
    whole: float = prefill + weights["decode_load_scale"] * decode
    whole += float(weights["context_load_scale"] * one["context_cost"])
    whole += float(weights["decode_active_request_weight"] * one["requests"])
    return whole * float(one["slowness"])


def check(told: dict[str, Any]) -> None:
    """Compute it all again."""
    assert all(one["excluded"] in REASONS | {None} for one in told["candidates"])
    ranks = [(one["worker_id"], one["dp_rank"]) for one in told["candidates"]]
    assert len(set(ranks)) == len(ranks)
    open_to = [one for one in told["candidates"] if one["excluded"] is None]
    if told["outcome"] == "refused":
        assert not open_to
        assert all(one["cost"] is None for one in told["candidates"])
        return
    loads = [one["prefill_tokens"] for one in open_to or told["candidates"]]
    least = min((load for load in loads if load is not None), default=0.0)
    scale = told["weights"]["prefill_load_scale"]
    for one in told["candidates"]:
        if one["excluded"] in {"draining", "not_schedulable"}:
            assert one["cost"] is None
            continue
        assert one["cost"] == priced(told, one, least)
        prefill = one["prefill_cost"] - one["credit"] + one["delay_cost"] + one["eviction_cost"]
        prefill += one["interference_cost"]
        terms = scale * prefill + told["weights"]["decode_load_scale"] * one["decode_cost"]
        terms += told["weights"]["context_load_scale"] * one["context_cost"]
        terms += told["weights"]["decode_active_request_weight"] * (one["requests"] or 0)
        terms *= (one["slowness"] or 1.0) * (one["taint_factor"] or 1.0)
        if told["weights"]["decode_load_scale"] != 1.0:  # another order of the same sum
            terms = pytest.approx(terms, rel=1e-9)
        assert one["cost"] == terms
        assert one["credit"] >= 0.0
    chosen = told["chosen"]
    if chosen is None:
        assert told["outcome"] == "cache_threshold"
        assert not open_to
        return
    check_choice(told, chosen, open_to)


def check_choice(
    told: dict[str, Any], chosen: dict[str, Any], open_to: list[dict[str, Any]]
) -> None:
    """The chosen one is among the cheapest; its margin and rival are right."""
    cost_of = {(one["worker_id"], one["dp_rank"]): one["cost"] for one in open_to}
    key = chosen["worker_id"], chosen["dp_rank"]
    low = min(cost_of.values())
    assert chosen["cost"] == cost_of[key]
    assert chosen["ties"] == sum(cost == low for cost in cost_of.values())
    if told["weights"]["temperature"] == 0.0:
        assert chosen["cost"] == low
    others = {rank: cost for rank, cost in cost_of.items() if rank != key}
    rival = chosen["runner_up"]
    assert (rival is None) == (not others)
    if not others:
        assert chosen["margin"] is None
        assert chosen["picked_by"] == "only"
        return
    assert rival["cost"] == min(others.values()) == others[rival["worker_id"], rival["dp_rank"]]
    assert chosen["margin"] == rival["cost"] - chosen["cost"]
    drawn = told["weights"]["temperature"] > 0.0
    assert chosen["picked_by"] == (
        "softmax" if drawn else "tie" if chosen["ties"] > 1 else "lowest"
    )


class Fleet:
    """A random service, and what happens to it."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        maybe = draw.random
        config = RouterConfig(
            policy="first-token" if seed % 3 == 0 else "kv-cost",
            use_kv_events=False,
            temperature=draw.choice([0.0, 0.0, 0.0, 0.7]),
            overlap_score_credit=draw.choice([1.0, 1.0, 0.3]),
            overlap_score_credit_decay=draw.choice([0.0, 0.0, 0.0, 1.3]),
            prefill_load_scale=draw.choice([1.0, 1.0, 0.0, 2.7]),
            host_cache_hit_weight=draw.choice([0.75, 0.75, 0.1]),
            track_prefill_tokens=maybe() < 0.9,
            pace_scale=0.01 if seed % 6 == 0 else None,  # some are not done within a step
        )
        admission = None
        if maybe() < 0.3:
            admission = AdmissionSettings(
                mode="token-capacity",
                active_decode_blocks_threshold=draw.choice([None, 0.2]),
                max_inflight=draw.choice([None, 1, 2]),
                cache_hit_threshold=draw.choice([0.0, 0.0, 0.6]),
            )
        self.core = SelectionCore(
            *(StreamRegistry(), config, random.Random(seed)),
            limits=CoreLimits(decision_ring=draw.choice([0, 64])),
            admission=admission,
        )
        self.now = draw.choice([0.0, 100.0])
        self.prompts = [[draw.getrandbits(64) for _ in range(8)] for _ in range(3)]
        self.has_roles = maybe() < 0.15
        self.size = draw.choice([1, 16, 48])
        self.tiers = draw.choice(TIERS)
        self.told: list[tuple[DecisionRecord, bytes]] = []
        for worker_id in range(draw.randint(1, 6)):
            self.worker(worker_id)
        for _ in range(draw.randint(0, 8)):
            self.hold()

    def worker(self, worker_id: int) -> None:
        draw = self.draw
        role = draw.choice(["prefill", "decode", "aggregated", None]) if self.has_roles else None
        spec = WorkerSpec(
            worker_id=worker_id,
            endpoint=None if draw.random() < 0.1 else f"http://w{worker_id}",
            block_size=self.size,
            data_parallel_size=draw.choice([1, 1, 2, 3]),
            taints=[taint for taint in TAINTS if draw.random() < 0.5],
            total_kv_blocks=draw.choice([None, 20]),
            role=role,  # type: ignore[arg-type]
        )
        self.core.workers.upsert_worker(spec, self.now)

    def hold(self) -> None:
        """A rank has the beginning of some prompt, in pieces on several tiers."""
        there = self.core.partitions.get(HERE)
        if there is None or not there.fleet_slots.workers:
            return
        worker = self.draw.choice(list(there.fleet_slots.workers.values()))
        rank = WorkerRank(worker.worker_id, self.draw.choice(list(worker.slots)))
        prompt, parent = self.draw.choice(self.prompts), None
        for at in range(0, self.draw.randint(1, 8), 2):
            piece = prompt[at : at + 2]
            tier = self.draw.choice(self.tiers)
            there.index.store(rank, tier, parent, piece, pack_u64(piece))
            parent = piece[-1]

    def request(self, kind: type[SelectRequest], **wishes: Any) -> SelectRequest:
        draw = self.draw
        prompt = [*draw.choice(self.prompts)[: draw.randint(0, 8)]]
        prompt += [draw.getrandbits(64) for _ in range(draw.randint(0, 3))]
        isl = draw.choice([1, max(1, len(prompt) * self.size), len(prompt) * self.size + 7])
        if draw.random() < 0.2:
            wishes["allowed_worker_ids"] = draw.sample(range(7), draw.randint(1, 6))
        elif draw.random() < 0.1:
            wishes["pinned_worker"] = PinnedWorker(draw.randrange(6), draw.randrange(2))
        if draw.random() < 0.3:
            wishes["routing_constraints"] = RoutingConstraints(
                draw.sample(TAINTS, draw.choice([0, 0, 1])),
                {taint: draw.uniform(-2, 2) for taint in draw.sample(TAINTS, draw.randint(0, 2))},
            )
        if draw.random() < 0.2:
            wishes["router_config_override"] = RouterConfigOverride(
                overlap_score_credit=draw.random(), router_temperature=draw.choice([0.0, 0.5])
            )
        if draw.random() < 0.1:
            wishes["cache_hit_threshold"] = draw.random()
            wishes["on_cache_threshold"] = draw.choice(["reject", "fallback"])
        hashes = pack_u64(prompt)
        return kind(
            block_hashes=hashes, sequence_hashes=hashes, isl_tokens=isl, explain=True, **wishes
        )

    def ask(self) -> None:
        """One request; its decision is told and checked."""
        self.now += 0.1
        try:
            if self.draw.random() < 0.5:
                answer, _ = self.core.selection.select(self.request(SelectRequest), self.now)
            else:
                request = self.request(SelectAndReserveRequest)
                assert isinstance(request, SelectAndReserveRequest)
                answer, _ = self.core.selection.select_and_reserve(request, self.now)
        except ServiceError as refusal:
            if isinstance(refusal.decision, DecisionRecord):
                self.tell(refusal.decision, None)
            return
        if not isinstance(answer, Ticket):
            self.tell(answer.decision, answer)

    def tell(self, record: object, answer: Answer | None) -> None:
        assert isinstance(record, DecisionRecord)
        text = as_json(record)
        told = json.loads(text)
        check(told)
        everybody = {
            (worker.worker_id, rank) for worker in self.core.catalog for rank in worker.ranks
        }
        assert everybody == {(one["worker_id"], one["dp_rank"]) for one in told["candidates"]}
        if isinstance(answer, Selection):
            chosen = told["chosen"]
            assert (chosen["worker_id"], chosen["dp_rank"]) == (answer.worker_id, answer.dp_rank)
            assert chosen["endpoint"] == answer.endpoint
            (mine,) = (
                one
                for one in told["candidates"]
                if (one["worker_id"], one["dp_rank"]) == (answer.worker_id, answer.dp_rank)
            )
            left = max(0, told["prompt"]["isl_tokens"] - mine["cached_tokens"])
            assert left == answer.effective_prefill_tokens
        elif isinstance(answer, CacheThreshold):
            assert told["outcome"] == "cache_threshold"
        else:
            assert told["outcome"] == "refused"
        self.told.append((record, text))

    def disturb(self) -> None:
        """Something happens that a record must not notice."""
        what = self.draw.randrange(6)
        workers = [worker.worker_id for worker in self.core.catalog]
        if what == 0 and workers:
            self.core.workers.delete_worker(self.draw.choice(workers), self.now)
        elif what == 1:
            self.worker(self.draw.randrange(7))
        elif what == 2:
            self.hold()
        elif what == 5 and HERE in self.core.partitions:
            there = self.core.partitions[HERE]
            factor = self.draw.choice([1.0, 0.0, self.draw.random()])
            for _, slot in there.fleet_slots.ranks_and_slots()[:2]:
                there.trust.note_freshness(slot, factor, ("lag",) if factor < 1.0 else ())
        else:
            live = [
                one.reservation.reservation_id
                for one in self.core.lifecycle.bookings.by_id.values()
            ]
            if live and what == 3:
                self.core.reservations.prefill_complete(self.draw.choice(live), self.now)
            elif live:
                self.core.reservations.free(self.draw.choice(live), self.now)

    def check(self) -> None:
        self.core.decisions.check()
        for record, text in self.told:
            assert as_json(record) == text


def as_json(record: DecisionRecord) -> bytes:
    return msgspec.json.encode(ExplainedRecord(record, 1.7e9, 0.1).whole())


def live(seed: int, steps: int) -> int:
    """One fleet's life; returns how many decisions it made."""
    fleet = Fleet(seed)
    for _ in range(steps):
        fleet.ask()
        fleet.disturb()
    fleet.check()
    return len(fleet.told)


@EITHER
def test_the_record_explains_the_choice(twin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "Pricer", twin.Pricer)
    assert sum(live(seed, 8) for seed in range(160)) > 600


@pytest.mark.slow
@pytest.mark.timeout(1800)
@EITHER
@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, 10))]
)
def test_the_record_explains_the_choice_in_100_000_fleets(
    twin: Any, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition, "Pricer", twin.Pricer)
    first, count = 10**6 + part * 5000, max(1500, share_of(5000))
    assert sum(live(seed, 3) for seed in range(first, first + count)) > count
