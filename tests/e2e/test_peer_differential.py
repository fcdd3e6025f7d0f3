"""Random fleets and prompts: the reference and the product give the same answers.

Both listen to the same fake engines and get the same requests. The cost formula is computed here
as well, from what /potential_loads and /overlap_scores say, so a choice is checked three ways; a
tie is broken by pinning, since either choice would be right.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.comparison import mismatch
from tests.e2e.fleet import EngineModel, Fleet, Rank
from tests.e2e.stage import BLOCK_SIZE, Stage
from tests.live import peer
from tests.live.engine import FakeEngine
from tests.live.ports import free_port
from tests.live.server import Server

pytestmark = [pytest.mark.heavy, pytest.mark.e2e]

SEEDS = range(12)
ROUNDS = 30
TIE = 1e-9


@pytest.fixture
def both(tmp_path: Path) -> Iterator[list[Stage]]:
    """[the reference, the product], fresh: with two scopes a free hits any one on the reference."""
    reason = peer.why_missing()
    if reason:
        pytest.skip(reason)
    with (
        Server(tmp_path / "peer.log", command=peer.command(), args=()) as theirs,
        Server(tmp_path / "ours.log") as ours,
    ):
        yield [Stage(theirs), Stage(ours)]


class Duel:
    """Sends everything to both and compares."""

    def __init__(self, both: list[Stage], tenant: str) -> None:
        self.both = both
        self.tenant = tenant

    def same(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Ask both; the reference's answer, once the product's was found equal to it."""
        if body is not None:
            body = {**body, "tenant_id": self.tenant}
        theirs, ours = (stage.server.request(method, path, body) for stage in self.both)
        assert ours.status == theirs.status, (path, body, theirs.raw, ours.raw)
        problem = mismatch(path, theirs.json, ours.json)
        assert problem is None, (
            f"{method} {path}: {problem}\n  {body}\n  {theirs.raw!r}\n  {ours.raw!r}"
        )
        return theirs.json

    def loads(self) -> None:
        self.same("GET", f"/loads?tenant_id={self.tenant}")


def costs(duel: Duel, prompt: dict[str, Any], override: dict[str, float]) -> dict[Rank, float]:
    """The contract's formula, from observable numbers only (decay 0)."""
    credit = override.get("overlap_score_credit", 1.0)
    scale = override.get("prefill_load_scale", 1.0)
    isl = len(prompt["token_ids"])
    overlap = {
        (row["worker_id"], row["dp_rank"]): row
        for row in duel.same("POST", "/overlap_scores", prompt)["workers"]
    }
    found = {}
    for load in duel.same("POST", "/potential_loads", prompt):
        rank = load["worker_id"], load["dp_rank"]
        row = overlap[rank]
        device, host, disk = (
            row["device_blocks"],
            row["host_pinned_extension_blocks"],
            row["disk_extension_blocks"],
        )
        cached = math.floor((device + 0.75 * host + 0.25 * disk) * BLOCK_SIZE + 0.5)
        active = load["potential_prefill_tokens"] - max(0, isl - cached)
        raw = (active + max(isl, cached)) / BLOCK_SIZE
        adjusted = max(0.0, raw - (credit * device + 0.75 * host + 0.25 * disk))
        found[rank] = scale * adjusted + load["potential_decode_blocks"]
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_same_answers(seed: int, both: list[Stage]) -> None:
    dice = random.Random(seed)
    tenant = "default"
    ranks = [
        (seed * 100 + worker, rank)
        for worker in range(dice.randrange(2, 5))
        for rank in range(dice.randrange(1, 3))
    ]
    with contextlib.ExitStack() as stack:
        engines = {r: EngineModel(stack.enter_context(FakeEngine(free_port()))) for r in ranks}
        fleet = Fleet(dice, engines)
        fleet.register(both, tenant)
        duel = Duel(both, tenant)
        live: list[str] = []
        for number in range(ROUNDS):
            if number % 5 == 0:
                fleet.churn()
                for stage in both:
                    stage.wait_for_rows(tenant, fleet.expected_rows(), what=f"round {number}")
            place_one(duel, fleet, live, f"duel-{seed}-{number}")
            move_on(duel, dice, live)
            duel.loads()
        for reservation in live:
            duel.same("DELETE", f"/reservations/{reservation}")
        duel.loads()


def place_one(duel: Duel, fleet: Fleet, live: list[str], reservation: str) -> None:
    """Select (and mostly book) a random prompt; the choice must be the arg-min of the formula."""
    dice = fleet.dice
    prompt = {"token_ids": list(dice.choice(fleet.prompts)) + [7] * dice.randrange(BLOCK_SIZE)}
    if not prompt["token_ids"]:
        return
    override: dict[str, float] = {}
    if dice.random() < 0.3:
        override["overlap_score_credit"] = dice.choice([0.0, 0.5, 1.0])
        override["prefill_load_scale"] = dice.choice([0.5, 1.0, 3.0])
    price = costs(duel, prompt, override)
    best = sorted(rank for rank, cost in price.items() if cost - min(price.values()) < TIE)
    body: dict[str, Any] = {**prompt, "router_config_override": override}
    if len(best) > 1:
        body["pinned_worker"] = {"worker_id": best[0][0], "dp_rank": best[0][1]}
    for path in ["/select", "/select_and_reserve"][: 1 + (dice.random() < 0.8)]:
        booked = path == "/select_and_reserve"
        answer = duel.same(
            "POST", path, {**body, "reservation_id": reservation} if booked else body
        )
        assert (answer["worker_id"], answer["dp_rank"]) == best[0], price
        if booked:
            live.append(reservation)


def move_on(duel: Duel, dice: random.Random, live: list[str]) -> None:
    """Random lifecycle calls on what is live."""
    for _ in range(dice.randrange(3)):
        if not live:
            return
        reservation = dice.choice(live)
        path = f"/reservations/{reservation}"
        what = dice.random()
        if what < 0.4:
            duel.same("POST", f"{path}/prefill_complete")
        elif what < 0.8:
            fraction = {"decay_fraction": dice.choice([0.0, 0.25, 0.5, 1.0])}
            duel.same("POST", f"{path}/output_block", fraction if dice.random() < 0.5 else {})
        else:
            duel.same("DELETE", path)
            live.remove(reservation)
