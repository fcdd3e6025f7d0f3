"""A replay makes every decision again, and says so of no decision that it does not."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from select_service.core.ledger.loads import ranks_in, unpacked
from select_service.core.pricing.weights import Weights, weights_in_force
from select_service.core.recording.decoder import BadRecording, ScopeFleet, slots_of
from select_service.core.recording.items import Decided, Item, PlannedBatch, Prompted
from select_service.errors import ServiceError
from select_service.simulator.cli import main
from select_service.simulator.core.decision_replay import (
    DecisionReplay,
    changed_weights,
    recorded_choice,
)
from select_service.simulator.recording_replay import RecordedRandom, replay
from select_service.simulator.recordings import play, requests_of
from select_service.simulator.replay_text import as_text
from select_service.types import Answer, RouterConfig
from select_service.types.admission import AdmissionSettings
from tests.models.recorded_fleet import RecordedFleet

PACE = Weights._fields.index("pace")

GOLDEN = Path(__file__).parents[2] / "golden"


def recorded(folder: Path, seed: int, steps: int = 200, **more: Any) -> tuple[RecordedFleet, Path]:
    fleet = RecordedFleet(seed, **more)
    fleet.play(steps)
    return fleet, fleet.recorded_file.into(folder / f"recording{seed}")


@pytest.fixture(scope="module")
def again(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[RecordedFleet, Path]]:
    """Recordings of random services that nobody changes, each made once."""
    folder = tmp_path_factory.mktemp("recordings")
    return cache(lambda seed: recorded(folder, seed))


def single(path: Path) -> list[tuple[ScopeFleet, Decided]]:
    """Decisions of requests that came alone, with who sat where then."""
    played = ((one.recorded_file, one.item) for one in play([path]))
    return [
        (recorded_file.fleet(one.scope), one)
        for recorded_file, one in played
        if isinstance(one, Decided) and not one.in_batch
    ]


@pytest.mark.parametrize("seed", range(8))
def test_every_decision_of_a_random_service_is_made_again(
    again: Callable[[int], tuple[RecordedFleet, Path]], seed: int
) -> None:
    _, path = again(seed)
    result = replay([path])
    assert result.first_difference is None
    assert result.reproduced == result.decisions > 50
    assert {one.why for one in result.missing} <= {"workers"}


class SheddingFleet(RecordedFleet):
    """One before which requests wait, are refused, come back, and of which speeds are learnt."""

    def __init__(self, seed: int) -> None:
        config = {"quotas": {"standard": 3, "batch": 2}, "targets_ms": {"critical": 500.0}}
        shed = AdmissionSettings(policy="slo-shed", policy_config=config)
        super().__init__(seed, admission=shed)
        self.codes: Counter[str] = Counter()
        self.waited = self.predicted = 0

    def wishes(self) -> dict[str, Any]:
        classes = ["critical", "standard", "batch", "background"]
        return {
            **super().wishes(),
            "slo_class": self.draw.choice(classes),
            "fairness_id": self.draw.choice("xyz"),
        }

    def ask(self) -> None:
        self.now += self.draw.choice([0.0, 0.02, 0.2])
        before = len(self.waiting)
        super().ask()
        self.waited += len(self.waiting) > before

    def answered(self, answer: Answer) -> None:
        super().answered(answer)
        self.predicted += getattr(answer, "predicted_ttft_ms", None) is not None

    def refused(self, error: ServiceError) -> None:
        super().refused(error)
        self.codes[str((error.details or {}).get("code", error.code))] += 1


@pytest.mark.parametrize("seed", [1, 2])
def test_what_slo_shed_let_in_is_decided_again(tmp_path: Path, seed: int) -> None:
    """At once, from its queue, and after a refusal, with the speed of ranks learnt."""
    fleet = SheddingFleet(seed)
    fleet.play(600)
    result = replay([fleet.recorded_file.into(tmp_path / "recording")])
    assert result.first_difference is None
    assert result.reproduced == result.decisions > 50
    assert fleet.waited > 50 < fleet.predicted
    assert {"band-full", "expired-waiting"} <= fleet.codes.keys() & result.refused.keys()


@pytest.mark.long
@pytest.mark.slow
def test_the_same_of_many_more_services(tmp_path: Path) -> None:
    for seed in range(1000, 1150):
        result = replay([recorded(tmp_path, seed, 400)[1]])
        assert result.first_difference is None
        assert result.reproduced == result.decisions


def test_what_was_recorded_before_queues_counted_as_worked_off_is_made_again() -> None:
    """Written by the service as it was: its loads show nothing of queues, nor do its weights."""
    path = GOLDEN / "recordings" / "first-token-before-pace.rec"
    result = replay([path], {"temperature": 0.3})
    assert result.first_difference is None
    assert result.reproduced == result.decisions == 172
    items = [one.item for one in play([path])]
    decided = [one for one in items if isinstance(one, Decided)]
    assert {len(one.weights) for one in decided} == {12}
    assert all(unpacked(one.load.whole or b"").queue_updated_at is None for one in decided)
    assert any(isinstance(one, PlannedBatch) for one in items)


def test_what_was_recorded_before_sequences_counted_is_made_again() -> None:
    """Written by the service as it was: its loads count blocks of prompts and answers only."""
    path = GOLDEN / "recordings" / "first-token-before-sequences.rec"
    result = replay([path])
    assert result.first_difference is None
    assert result.reproduced == result.decisions == 171
    batches = [one.item for one in play([path]) if isinstance(one.item, PlannedBatch)]
    assert {one.sequence_blocks for one in batches} == {0}


MIXED = sorted((GOLDEN / "recordings" / "mixed").glob("*.rec"))


@pytest.mark.parametrize("path", MIXED, ids=lambda path: path.stem)
def test_recorded_mixed_traffic_is_decided_again(path: Path) -> None:
    """Recorded by an earlier version: no restructuring may change a single decision."""
    result = replay([path])
    assert result.first_difference is None
    assert result.reproduced == result.decisions > 300
    assert {one.why for one in result.missing} <= {"workers"}


def test_a_gap_of_an_early_version_is_reported_in_today_s_words() -> None:
    result = replay([GOLDEN / "recordings" / "mixed" / "core-2000.rec"])
    assert [one.why for one in result.missing] == ["workers"], "the file says seats"
    assert "(workers came or went while a batch was planned)" in as_text(result)


def test_the_recorded_mixed_traffic_has_all_kinds() -> None:
    assert len(MIXED) == 12


def test_a_batch_is_planned_again_with_the_sequences_it_counted(tmp_path: Path) -> None:
    """Were they left out, some of its requests would sit elsewhere."""
    fleet, path = recorded(tmp_path, 6)
    assert fleet.config.policy == "first-token"
    weights, elsewhere = changed_weights(fleet.config, {}), 0
    for recorded_file, batch in ((one.recorded_file, one.item) for one in play([path])):
        if not isinstance(batch, PlannedBatch) or not batch.steps:
            continue
        assert batch.sequence_blocks > 0
        ranks = ranks_in(batch.steps[0].load.whole or b"")
        stage = DecisionReplay(recorded_file.fleet(batch.scope), ranks, fleet.config)
        for counted in (batch, replace(batch, sequence_blocks=0)):
            made = stage.plan(counted, weights, lambda step: RecordedRandom(step.draws, 6))
            assert made.planned == made.recorded or counted is not batch
            elsewhere += made.planned != made.recorded
    assert elsewhere > 0


def test_queues_that_count_as_worked_off_decide_what_is_made_again(tmp_path: Path) -> None:
    """Were they left out, some of these decisions would be other ones."""
    worked = otherwise = 0
    for seed in (0, 1, 29):
        fleet, path = recorded(tmp_path, seed, block_size=64)
        if weights_in_force(fleet.config, None).pace == 1.0:
            result = replay([path], {"pace_scale": 0.0}).what_if
            assert result is not None
            otherwise += result.changed
        for _, one in single(path):
            loads = unpacked(one.load.whole or b"")
            assert loads.queue_updated_at is not None, (
                "whatever the policy was: another may be tried"
            )
            assert loads.ahead is not None
            worked += bool((loads.ahead > 0.0).any()) and one.weights[PACE] > 0.0
    assert worked > 20
    assert otherwise > 0


def test_what_is_recorded_is_what_callers_were_answered(tmp_path: Path) -> None:
    met: Counter[str] = Counter()
    for seed in range(5):
        fleet, path = recorded(tmp_path, seed)
        answers: dict[str, tuple[Any, ...]] = {}
        for there, one in single(path):
            stage = DecisionReplay(there, ranks_in(one.load.whole or b""), fleet.config)
            choice = recorded_choice(stage, one)
            met[choice.kind] += 1
            met["queued"] += one.since >= 0.0
            met["trust"] += one.trust is not None
            met["tiers"] += bool(one.found and (one.found.host or one.found.disk))
            met["draws"] += bool(one.draws)
            met["shared"] += one.shared is not None
            met["sessions"] += one.in_session
            if choice.kind == "refused":
                continue
            kind = "pair" if one.pair is not None else choice.kind
            ranks = [choice.rank, choice.prefill_rank]
            answers[str(one.selection_id)] = kind, *(rank for rank in ranks if rank is not None)
        assert answers == fleet.answers
        met["batches"] += sum(isinstance(one.item, PlannedBatch) for one in play([path]))
    wanted = {"placed", "pair", "refused", "cache_threshold", "batches", "queued", "trust", "tiers"}
    assert all(met[what] for what in wanted | {"draws", "shared", "sessions"})


def test_with_the_weights_that_were_in_force_nothing_would_have_been_otherwise(
    tmp_path: Path,
) -> None:
    policies = set()
    for seed in (0, 1, 3, 6):  # two with pairs
        fleet, path = recorded(tmp_path, seed)
        policies.add(fleet.config.policy)
        same = {
            name: getattr(fleet.config, name)
            for name in ("policy", "overlap_score_credit", "temperature")
        }
        result = replay([path], same).what_if
        assert result is not None
        assert result.agreement == 1.0
        assert result.decisions > 20
        assert result.batch_members_moved == 0
        assert result.prefill_tokens == result.prefill_tokens_recorded
        assert result.spread == result.spread_recorded
        assert 0 < result.in_session < result.decisions or fleet.core.limits.session_ttl_s == 0.0
    assert len(policies) == 2


def naive_costs(item: Decided, fleet: ScopeFleet, config: RouterConfig) -> dict[int, float]:
    """The cost of every candidate slot by contract 3.2, or first-token, one after the other."""
    weights = weights_in_force(config, None if item.asked is None else item.asked.override)
    loads = unpacked(item.load.whole or b"")
    ranks, size, isl = len(loads.prefill), fleet.block_size, item.prompt.isl_tokens
    is_open = sum(len(one.slots) for one in fleet.workers.values() if one.drain is None)
    delayed = weights.delay_weight * loads.prefilling / is_open
    evicting = weights.eviction_weight * is_open / loads.turnover if loads.turnover else 0.0
    blocks = sum(len(one) for one in item.prompt.hashes if isinstance(one, bytes)) // 8
    tiers = [dict.fromkeys(range(ranks), 0) for _ in range(4)]
    found = item.found
    tiers_found = (found.device, found.host, found.disk) if found is not None else ([], [], [])
    for tier, groups in zip(tiers, (*tiers_found, item.shared or []), strict=True):
        for count, slots in groups:
            for slot in slots_of(slots, ranks).tolist():
                tier[slot] += count
    believed = [1.0] * ranks
    if item.trust is not None:
        believed = np.frombuffer(item.trust.whole or b"").tolist()
    rows = item.rows
    assert rows is not None
    among = range(rows) if isinstance(rows, int) else slots_of(rows, ranks).tolist()
    least = min(loads.prefill[slot] for slot in among)
    costs = {}
    for slot in among:
        device, host, disk, shared = (tier[slot] for tier in tiers)
        prefill = float(loads.prefill[slot])
        held = device + weights.host_cache_hit_weight * host + weights.disk_cache_hit_weight * disk
        cached = math.floor(math.floor(held * size + 0.5) * believed[slot])
        raw, own, credit = 0.0, 0.0, weights.overlap_score_credit
        worked = 0.0
        if loads.queue_updated_at is not None and loads.ahead is not None:
            silent_s = max(0.0, item.at - float(loads.queue_updated_at[slot]))
            worked = min(silent_s * weights.pace * loads.pace, float(loads.ahead[slot]))
        if weights.track_prefill_tokens:
            raw, own = (prefill - worked + max(isl, cached)) / size, max(isl, cached) / size
            excess = (prefill - least) / size
            credit /= 1.0 + weights.overlap_score_credit_decay * excess / math.ceil(isl / size)
        lower = weights.host_cache_hit_weight * host + weights.disk_cache_hit_weight * disk
        credited = (credit * device + lower) * believed[slot]
        if weights.expects_booked:
            credited += max(0, shared - device - host - disk)
        decode = weights.decode_load_scale * (float(loads.decode[slot]) + blocks - shared)
        others = 0.0 if loads.requests is None else float(loads.requests[slot])
        slowed = weights.interference / (1.0 + loads.prefilling / is_open) * others
        evicted = evicting * float(loads.churn[slot])
        more = (delayed + evicted + slowed) * max(0.0, own - credited)
        context = weights.context_load_scale * (float(loads.context[slot]) + blocks)
        left = max(0.0, raw - credited)
        each = weights.decode_active_request_weight * others
        costs[slot] = weights.prefill_load_scale * (left + more) + decode + context + each
        if loads.slowness is not None:
            costs[slot] *= 1.0 + weights.slowness * float(loads.slowness[slot])
    return costs


@pytest.mark.parametrize(
    "changes",
    [
        {"overlap_score_credit": 0.0, "prefill_load_scale": 3.0, "temperature": 0.0},
        {"policy": "first-token", "temperature": 0.0},
        {"policy": "kv-cost", "temperature": 0.0},
    ],
)
def test_other_weights_choose_what_a_naive_reading_of_the_formula_chooses(
    again: Callable[[int], tuple[RecordedFleet, Path]], changes: dict[str, Any]
) -> None:
    """Whichever policy was in force."""
    compared = moved = 0
    policies = set()
    for seed in range(2, 10):
        fleet, path = again(seed)
        config = msgspec.structs.replace(fleet.config, **changes)
        policies.add(fleet.config.policy)
        result = replay([path], changes, examples=10_000)
        assert result.what_if is not None
        elsewhere = {one.selection_id: one for one in result.what_if.examples}
        assert len(elsewhere) == result.what_if.changed
        moved += result.what_if.changed
        for there, one in single(path):
            asked = one.asked
            plain = asked is None or (not asked.preferred_taints and asked.override is None)
            if one.slot < 0 or one.pair is not None or not plain:
                continue
            costs = naive_costs(one, there, config)
            sits = {slot: seat for seat in there.workers.values() for _, slot in seat.slots}
            changed = elsewhere.get(one.selection_id)
            worker_id = (
                sits[one.slot].spec.worker_id if changed is None else changed.replayed.worker_id
            )
            best = min(costs.values())
            cheapest = {slot for slot, cost in costs.items() if math.isclose(cost, best)}
            assert worker_id in {sits[slot].spec.worker_id for slot in cheapest}
            compared += 1
    assert compared > 100
    assert moved > 4
    assert len(policies) == 2


def prompts_of(item: Item) -> list[Prompted]:
    if isinstance(item, PlannedBatch):
        return item.prompts
    return [item.prompt] if isinstance(item, Decided) else []


def test_a_decision_that_is_another_one_is_reported_with_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recording of a service whose code has changed since, say."""
    _, path = recorded(tmp_path, 1)
    fleet = RecordedFleet(1)
    decided = [item for _, item in single(path) if item.slot >= 0 and item.rows]
    victim = next(one for one in decided if isinstance(one.rows, int) and one.rows > 1)
    items: list[Item] = [one.item for one in play([path])]
    for item in items:
        if isinstance(item, Decided) and item.selection_id == victim.selection_id:
            assert isinstance(item.rows, int)
            item.slot = (item.slot + 1) % item.rows
        for prompt in prompts_of(item):
            (whole,) = prompt.hashes
            assert isinstance(whole, bytes)
            prompt.hashes = [whole[at : at + 512] for at in range(0, len(whole), 512)]
        fleet.recorded_file.add(item)
    other = fleet.recorded_file.into(tmp_path / "other")
    result = replay([other])
    assert (result.differing, result.reproduced) == (1, result.decisions - 1)
    first = result.first_difference
    assert first is not None
    assert first.selection_id == victim.selection_id
    assert (first.recorded.outcome, first.replayed.outcome) == ("placed", "placed")
    where = first.recorded.worker_id, first.recorded.dp_rank
    assert where != (first.replayed.worker_id, first.replayed.dp_rank)
    assert main(["replay", str(other)]) == 3
    assert str(victim.selection_id) in capsys.readouterr().out


def test_weights_of_another_version_are_refused(tmp_path: Path) -> None:
    _, path = recorded(tmp_path, 1, 20)
    other = RecordedFleet(1)
    for one in play([path]):
        if isinstance(one.item, Decided):
            one.item.weights.append(0.5)
            one.item.prompt.hashes = []
        other.recorded_file.add(one.item)
    with pytest.raises(BadRecording, match="decision 1: 17 weights, where this version has 16"):
        replay([other.recorded_file.into(tmp_path / "other")])


def test_draws_beyond_those_recorded_come_from_a_seed() -> None:
    again = [RecordedRandom([0.25, 3, 0.5], 7) for _ in range(2)]
    said = [(one.random(), one.getrandbits(2), one.random(), one.random()) for one in again]
    assert said[0] == said[1]
    assert said[0][:3] == (0.25, 3, 0.5)
    assert RecordedRandom([9], 1).getrandbits(2) < 4, "none that fits"
    assert random.Random(7).random() == said[0][3]


def test_requests_of_a_recording_go_through_the_simulator(tmp_path: Path) -> None:
    _, path = recorded(tmp_path, 2)
    requests = list(requests_of(path, 4))
    decided = [one for one in play([path]) if isinstance(one.item, Decided)]
    assert len(requests) == len(decided)
    assert all(one.arrival <= other.arrival for one, other in pairwise(requests))
    assert max(one.osl for one in requests) > 1
    assert {one.session for one in requests} == {"", *"abcde"}
    with pytest.raises(ValueError, match="have 4 tokens"):
        list(requests_of(path, 16))
    settings = ["--trace", str(path), "--format", "recording", "--block-size", "4"]
    assert main(["run", "--policy", "first-token", *settings, "--workers", "2", "--quiet"]) == 0


def test_replay_reports_to_people_and_programs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, path = recorded(tmp_path, 5)
    out = tmp_path / "report.json"
    asked = ["replay", str(path), "--weights", "overlap_score_credit=0", "--out", str(out)]
    assert main(asked) == 0
    shown = capsys.readouterr().out
    assert "(100.00%)" in shown
    assert "what if overlap_score_credit=0" in shown
    report = msgspec.json.decode(out.read_bytes())
    assert report["reproduced"] == report["decisions"]
    assert main([*asked, "--json", "--tenant-id", "other"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out)["decisions"] < report["decisions"]
    assert main(["replay", str(path), "--weights", "policy=first-token,delay_scale=2"]) == 0
    assert "what if policy=first-token, delay_scale=2.0, every" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("weights", "why"),
    [
        ("nothing=1", "there is no nothing"),
        ("temperature=warm", "float"),
        ("temperature=-1", "temperature must be a number at least 0"),
        ("use_kv_events=false", "use_kv_events decides nothing"),
        ("temperature", "NAME=VALUE"),
        ("policy=best", "'best'"),
    ],
)
def test_weights_that_are_none_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], weights: str, why: str
) -> None:
    _, path = recorded(tmp_path, 1, 5)
    with pytest.raises(SystemExit) as exited:
        main(["replay", str(path), "--weights", weights])
    assert exited.value.code == 2
    assert why in capsys.readouterr().err


def test_what_is_no_recording_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "garbage"
    path.write_bytes(b"{}\n" * 100)
    assert main(["replay", str(path)]) == 1
    assert "this is no recording of select-service" in capsys.readouterr().err
    for other in (1, 2, 9):
        path.write_bytes(b"select-service recording %d\nand so on" % other)
        with pytest.raises(BadRecording, match=f"format {other} of .*; this reads format 3"):
            replay([path])
