"""The newest Python binding of the reference and ours, called alike: the same answers and errors.

Both listen to the same fake engines. What the contract wants otherwise (`deploy/docs/contract.md`)
is in a test of its own; the texts of errors are ours.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.compare.peer import NEWEST_VERSION
from tests.e2e.fleet import EngineModel, Fleet
from tests.live import peer
from tests.live.binding import Binding
from tests.live.engine import FakeEngine
from tests.live.ports import HOST, free_port
from tests.wait import block_until

pytestmark = [pytest.mark.heavy, pytest.mark.e2e]

BLOCK_SIZE = 16
SEEDS = range(4)
STEPS = 60
WORKER = {"worker_id": 1, "endpoint": "ray://1", "block_size": BLOCK_SIZE}
PROMPT = list(range(4 * BLOCK_SIZE))
BOOKING = {"sequence_hashes": [1, 2, 3], "isl_tokens": 64, "effective_prefill_tokens": 20}


class Duel:
    """Both bindings; every call goes to both."""

    def __init__(self, theirs: Binding, ours: Binding) -> None:
        self.theirs, self.ours = theirs, ours

    def outcomes(self, method: str, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        both = [one.call(method, *args, **kwargs) for one in (self.theirs, self.ours)]
        return both[0], both[1]

    def same(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call both; what the reference says, once ours was found to say it, too."""
        theirs, ours = self.outcomes(method, *args, **kwargs)
        assert _comparable(ours) == _comparable(theirs), (method, args, kwargs, theirs, ours)
        return theirs.get("answer")

    def same_error(self, method: str, *args: Any, **kwargs: Any) -> str:
        theirs, ours = self.outcomes(method, *args, **kwargs)
        assert "error" in theirs, theirs
        for what in ("error", "kind", "status"):
            assert ours.get(what) == theirs[what], (method, args, theirs, ours)
        return str(theirs["error"])


def _comparable(outcome: Any) -> Any:
    """An outcome without the text of an error; the order of ranks is free."""
    if isinstance(outcome, dict):
        return {name: _comparable(value) for name, value in outcome.items() if name != "text"}
    if isinstance(outcome, list):
        return sorted(map(_comparable, outcome), key=str) if _are_rows(outcome) else outcome
    return outcome


def _are_rows(outcome: list[Any]) -> bool:
    return all(isinstance(one, dict) for one in outcome)


@contextlib.contextmanager
def duel_with(folder: Path, **variables: str) -> Iterator[Duel]:
    reason = peer.why_missing(NEWEST_VERSION)
    if reason:
        pytest.skip(reason)
    with (
        Binding(peer.python(NEWEST_VERSION), log=folder / "theirs", **variables) as theirs,
        Binding.ours(folder / "ours", **variables) as ours,
    ):
        yield Duel(theirs, ours)


@pytest.fixture
def duel(tmp_path: Path) -> Iterator[Duel]:
    with duel_with(tmp_path) as one:
        yield one


def worker(worker_id: int, **more: Any) -> dict[str, Any]:
    endpoints = {"0": f"tcp://{HOST}:{free_port()}"}
    return WORKER | {"worker_id": worker_id, "kv_events_endpoints": endpoints} | more


def test_the_catalog(duel: Duel) -> None:
    assert duel.same("ready")["ready"] is False
    duel.same("upsert_worker", worker(1, taints=["a"], max_num_batched_tokens=2048))
    duel.same("upsert_worker", {"worker_id": 3})
    duel.same("upsert_worker", worker(4, nonsense=1))
    duel.same("upsert_worker", worker(5, model_name="m", routing_group="g", total_kv_blocks=9))
    for wanted in ({}, {"model_name": "m"}, {"routing_group": "g"}, {"model_name": "none"}):
        duel.same("list_workers", **wanted)
    duel.same("patch_worker", 3, {"block_size": 16, "endpoint": "x"})
    assert duel.same("ready")["schedulable_workers"] == 3
    duel.same("delete_worker", 4)
    duel.same("list_workers")
    duel.same("loads")


def test_wrong_calls(duel: Duel) -> None:
    assert duel.same_error("select", {"token_ids": PROMPT}) == "SelectionServiceError"
    duel.same("upsert_worker", worker(1))
    for bad in ({"worker_id": -3}, {"endpoint": "x"}, {"worker_id": "x"}, [1], None):
        assert duel.same_error("upsert_worker", bad) == "ValueError"
    assert duel.same_error("patch_worker", 99, {}) == "SelectionServiceError"
    assert duel.same_error("delete_worker", "x") == "TypeError"
    assert duel.same_error("delete_worker", -1) == "OverflowError"
    assert duel.same_error("list_workers", tenant_id="x") == "TypeError"
    duel.same_error("delete_worker", 99)
    duel.same_error("select", {})
    duel.same_error("select", {"token_ids": [-1]})
    duel.same_error("select", {"token_ids": PROMPT, "model_name": "none"})
    duel.same_error("select", {"token_ids": PROMPT, "allowed_worker_ids": [9]})
    pinned = {"worker_id": 1, "dp_rank": 0}
    duel.same_error(
        "select", {"token_ids": PROMPT, "pinned_worker": pinned, "allowed_worker_ids": [2]}
    )
    override = {"router_temperature": -1}
    duel.same_error("select", {"token_ids": PROMPT, "router_config_override": override})
    duel.same_error("overlap_scores", {})
    for name in ("prefill_complete", "add_output_block", "free_reservation"):
        assert duel.same_error(name, "nobody") == "SelectionServiceError"
        assert duel.same_error(name, 3) == "TypeError"
    for wrong in (1.5, -0.5):
        assert duel.same_error("add_output_block", "x", decay_fraction=wrong) == "ValueError"
    booking = BOOKING | {"selection_id": "c", "worker_id": 1}
    duel.same_error("create_reservation", booking | {"worker_id": 9})
    duel.same_error("create_reservation", booking | {"dp_rank": 5})
    duel.same_error("create_reservation", booking | {"effective_prefill_tokens": 99})
    duel.same_error("create_reservation", {"selection_id": "c", "worker_id": 1})
    duel.same_error("create_reservation", {"worker_id": 1, "token_ids": PROMPT})
    duel.same_error("select_and_reserve", {"token_ids": PROMPT, "session_context": {}})


def test_pending_selections(duel: Duel) -> None:
    for number in (1, 2):
        duel.same("upsert_worker", worker(number, max_num_batched_tokens=2048))

    def select(name: str, at: int = 2, **more: Any) -> None:
        asked = {"token_ids": PROMPT, "selection_id": name, "allowed_worker_ids": [at]}
        duel.same("select", asked | more)

    duel.same_error("create_reservation", {"selection_id": "s"})
    select("s", advisory=True)
    select("s", at=1, token_ids=PROMPT[:40])  # the last one counts
    duel.same("create_reservation", {"selection_id": "s"})
    duel.same("loads")
    duel.same_error("create_reservation", {"selection_id": "s"})  # once
    select("s")
    duel.same("free_reservation", "s")
    duel.same("create_reservation", {"selection_id": "s"})
    select("other")
    duel.same_error("create_reservation", {"selection_id": "other", "model_name": "x"})
    duel.same("create_reservation", BOOKING | {"selection_id": "other", "worker_id": 1})
    duel.same("free_reservation", "other")
    duel.same_error("create_reservation", {"selection_id": "other"})  # used by the explicit form
    select("gone")
    duel.same("delete_worker", 2)
    duel.same_error("create_reservation", {"selection_id": "gone"})
    untracked = {"router_config_override": {"track_prefill_tokens": False}}
    select("light", at=1, **untracked)
    duel.same("create_reservation", {"selection_id": "light"})
    duel.same("loads")


@pytest.mark.parametrize("variables", [{}, {"DYN_ROUTER_ASSUME_KV_REUSE": "false"}], ids=str)
def test_prompts_that_share_no_blocks(tmp_path: Path, variables: dict[str, str]) -> None:
    alone = {"router_config_override": {"assume_kv_reuse": False}}
    hashes = {"block_hashes": [1, 2], "sequence_hashes": [1, 2], "isl_tokens": 32}
    with duel_with(tmp_path, **variables) as duel:
        duel.same("upsert_worker", worker(1))
        for number, more in enumerate(({}, {}, alone, alone)):
            asked = {"token_ids": PROMPT[:40], "selection_id": f"s{number}", **more}
            theirs, ours = duel.outcomes("select_and_reserve", asked)
            for one in (theirs, ours):
                assert len(one["answer"].pop("sequence_hashes")) == 2
            assert theirs == ours
            booked = {"worker_id": 1, "effective_prefill_tokens": 20}
            duel.same("create_reservation", BOOKING | booked | {"selection_id": f"c{number}"})
            booking = booked | {"selection_id": f"t{number}", "token_ids": PROMPT, **more}
            duel.same("create_reservation", booking)
            duel.same("potential_loads", {"token_ids": PROMPT, **more})
            duel.same("select", {"token_ids": PROMPT, **more})
            duel.same("select_and_reserve", {"selection_id": f"h{number}", **hashes, **more})
            duel.same("loads")


def test_shutdown(duel: Duel) -> None:
    duel.same("upsert_worker", worker(1))
    duel.same("select_and_reserve", {"token_ids": PROMPT, "selection_id": "r"})
    duel.same("shutdown")
    for method in ("select", "select_and_reserve"):
        duel.same_error(method, {"token_ids": PROMPT})
    duel.same_error("upsert_worker", worker(2))
    assert duel.same("ready")["ready"] is False
    duel.same("loads")
    duel.same("add_output_block", "r")
    duel.same("free_reservation", "r")
    duel.same("shutdown")
    duel.same("shutdown_async")


def test_without_replicas(duel: Duel) -> None:
    assert duel.same("list_replica_peers") == []
    duel.same("recover_indexer_from_peers", [f"http://{HOST}:{free_port()}"])
    for method in ("register_replica_peer", "deregister_replica_peer"):
        theirs, ours = duel.outcomes(method, f"tcp://{HOST}:1")
        assert "error" in theirs
        assert theirs["text"] in ours["text"]


@pytest.mark.parametrize("seed", SEEDS)
def test_traffic(seed: int, duel: Duel) -> None:
    """Random events, selections and lives of reservations, as Ray's router makes them."""
    dice = random.Random(seed)
    ranks = [(seed * 100 + number, 0) for number in range(1, 4)]
    with contextlib.ExitStack() as stack:
        engines = {r: EngineModel(stack.enter_context(FakeEngine(free_port()))) for r in ranks}
        fleet = Fleet(dice, engines)
        for number, _ in ranks:
            endpoints = {"0": engines[number, 0].socket.endpoint}
            duel.same("upsert_worker", worker(number, kv_events_endpoints=endpoints))
        for engine in engines.values():
            engine.socket.wait_for_subscribers(2)
        live: list[str] = []
        for step in range(STEPS):
            _step(dice, duel, fleet, live, str(step))
            duel.same("loads")


def _step(dice: random.Random, duel: Duel, fleet: Fleet, live: list[str], name: str) -> None:
    prompt = list(dice.choice(fleet.prompts)) + [7] * dice.randrange(BLOCK_SIZE)
    kind = dice.random()
    if kind < 0.3:
        engine = dice.choice(list(fleet.engines.values()))
        engine.store(tuple(prompt), dice.choice(("device", "device", "host", "disk")), 3)
        block_until(lambda: _is_settled(duel, fleet))
        return
    if kind < 0.6 or not live:
        costs = _worker_of(duel, {"token_ids": prompt})
        asked = {"token_ids": prompt, "selection_id": name, "allowed_worker_ids": [costs]}
        duel.same("select_and_reserve", asked | {"expected_output_tokens": dice.randrange(1, 99)})
        duel.same("potential_loads", {"token_ids": prompt})
        live.append(name)
        return
    booked = dice.choice(live)
    if kind < 0.75:
        duel.same("prefill_complete", booked)
    elif kind < 0.9:
        duel.same("add_output_block", booked, decay_fraction=dice.random())
    else:
        live.remove(booked)
        duel.same("free_reservation", booked)


def _worker_of(duel: Duel, request: dict[str, Any]) -> int:
    """The worker that both choose; of two that cost the same, either."""
    theirs, ours = (one["answer"]["worker_id"] for one in duel.outcomes("select", request))
    if theirs != ours:
        scores = {}
        loads = duel.same("potential_loads", request)
        overlap = duel.same("overlap_scores", request)["workers"]
        for load, row in zip(sorted(loads, key=_id), sorted(overlap, key=_id), strict=True):
            device, host, disk = (
                row[name]
                for name in (
                    "device_blocks", "host_pinned_extension_blocks", "disk_extension_blocks",
                )
            )  # fmt: skip
            isl = len(request["token_ids"])
            cached = int((device + 0.75 * host + 0.25 * disk) * BLOCK_SIZE + 0.5)
            waiting = load["potential_prefill_tokens"] - max(0, isl - cached)
            raw = (waiting + max(isl, cached)) / BLOCK_SIZE
            left = max(0.0, raw - (device + 0.75 * host + 0.25 * disk))
            scores[load["worker_id"]] = left + load["potential_decode_blocks"]
        assert scores[ours] == pytest.approx(scores[theirs])
    return int(ours)


def _id(row: dict[str, Any]) -> int:
    return int(row["worker_id"])


def _is_settled(duel: Duel, fleet: Fleet) -> bool:
    """Whether both have indexed what the engines hold."""
    for prompt in fleet.prompts:
        asked = {"token_ids": list(prompt)}
        theirs, ours = (one["answer"] for one in duel.outcomes("overlap_scores", asked))
        if theirs["workers"] != ours["workers"]:
            return False
    return True
