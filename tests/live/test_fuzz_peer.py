"""Long random runs of every prompt and lifecycle route against the reference, answer by answer.

`tests/e2e/test_peer_differential.py` compares what depends on KV events; here nobody sends any, and
requests take every odd form they may have. Left out is what differs on purpose (D4, D12, D14), and
ties are broken by pinning. A failure names the seed and the last steps.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import pytest

from tests.contract.comparison import mismatch
from tests.live import peer
from tests.live.server import Server
from tests.wait import block_until

pytestmark = [pytest.mark.heavy, pytest.mark.e2e]

STEPS: Final = 250
GAMES: Final = 30
BLOCK_SIZE: Final = 16
TIE: Final = 1e-9
ENV: Final = {"DYN_USE_KV_EVENTS": "false"}
STEPS_SHOWN: Final = 25

Body = dict[str, Any]
Rank = tuple[int, int]


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[Server, Server]]:
    """(the reference, the product), both fresh."""
    reason = peer.why_missing()
    if reason:
        pytest.skip(reason)
    with (
        Server(tmp_path / "peer.log", command=peer.command(), args=(), env=ENV) as theirs,
        Server(tmp_path / "ours.log", env=ENV) as ours,
    ):
        yield theirs, ours


class Duel:
    """Sends everything to both, compares, and remembers what was sent."""

    def __init__(self, servers: tuple[Server, Server], seed: int) -> None:
        self.servers = servers
        self.seed = seed
        self.sent: list[str] = []

    def ask(self, method: str, path: str, body: Body | None = None) -> tuple[int, Any]:
        """The reference's answer, once the product's was found equal to it."""
        self.sent.append(f"{method} {path} {body}")
        theirs, ours = (one.request(method, path, body) for one in self.servers)
        same_status = ours.status == theirs.status
        problem = mismatch(path, theirs.json, ours.json) if same_status else "status"
        assert problem is None, "\n".join(
            [
                f"seed {self.seed}: {problem}",
                f"theirs {theirs.status} {theirs.raw!r}",
                f"ours   {ours.status} {ours.raw!r}",
                *self.sent[-STEPS_SHOWN:],
            ]
        )
        return theirs.status, theirs.json

    def register(self, record: Body) -> None:
        """Register a worker with both; the reference says 201 first and takes it in afterwards."""
        self.ask("POST", "/workers", record)
        sign = b'"worker_id":%d,' % record["worker_id"]
        for server in self.servers:
            block_until(partial(_lists, server, sign))


class Traffic:
    """One random fleet, and random requests to it."""

    def __init__(self, duel: Duel, dice: random.Random) -> None:
        self.duel = duel
        self.dice = dice
        self.live: list[str] = []
        self.taints: dict[int, set[str]] = {}
        self.ranks: list[Rank] = []
        self._numbers = itertools.count()
        self._chains = [[dice.getrandbits(63) for _ in range(dice.randrange(9))] for _ in range(6)]
        self._tokens = [
            [dice.getrandbits(32) for _ in range(dice.randrange(1, 90))] for _ in range(5)
        ]
        for worker_id in range(dice.randrange(2, 5)):
            self._add_worker(worker_id)

    def _add_worker(self, worker_id: int) -> None:
        start, size = self.dice.choice([0, 3]), self.dice.choice([1, 2])
        self.taints[worker_id] = set(self.dice.sample("abc", self.dice.randrange(3)))
        self.ranks += [(worker_id, start + number) for number in range(size)]
        record = {
            "worker_id": worker_id,
            "endpoint": f"http://w{worker_id}",
            "block_size": BLOCK_SIZE,
            "data_parallel_start_rank": start,
            "data_parallel_size": size,
            "max_num_batched_tokens": 10**9,
            "taints": sorted(self.taints[worker_id]),
        }
        self.duel.register(record)

    def step(self) -> None:
        """Send one request of some kind, in proportions that keep the fleet half busy."""
        kinds = (self.select, self.reserve, self.go_on, self.end, self.inspect)
        (kind,) = self.dice.choices(kinds, (45, 15, 20, 10, 10))
        kind()

    # -- prompts -------------------------------------------------------------------------------

    def prompt(self) -> Body:
        """Tokens, media or hashes; sometimes not what they should be."""
        form = self.dice.random()
        if form < 0.35:
            return self._token_prompt()
        if form < 0.45:
            objects = [{"mm_hash": 7, "offsets": []}, {"mm_hash": 3, "offsets": [[0, 1]]}]
            infos = [None, {"mm_objects": objects}]
            tokens = self.dice.choice(self._tokens)
            return {"mm_routing_info": {"routing_token_ids": tokens, "block_mm_infos": infos}}
        return self._hash_prompt()

    def _token_prompt(self) -> Body:
        tokens = self.dice.choice(self._tokens)
        body: Body = {"token_ids": tokens[: self.dice.randrange(1, len(tokens) + 1)]}
        if self.dice.random() < 0.2:
            body["lora_name"] = self.dice.choice(["", "x"])
        if self.dice.random() < 0.2:
            body["is_eagle"] = self.dice.choice([True, False])
        return body

    def _hash_prompt(self) -> Body:
        chain = self.dice.choice(self._chains)
        chain = chain[: self.dice.randrange(len(chain) + 1)]
        body: Body = {
            "sequence_hashes": chain,
            "block_hashes": [self.dice.randrange(100) for _ in chain],
            "isl_tokens": self.dice.choice([1, 5, 16, 33, len(chain) * BLOCK_SIZE + 1, 1000]),
        }
        fault = self.dice.random()
        if fault < 0.03:
            body["isl_tokens"] = 0
        elif fault < 0.06:
            del body[self.dice.choice(list(body))]
        elif fault < 0.08:
            body["block_hashes"] = [*body["block_hashes"], 1]
        return body

    # -- requests ------------------------------------------------------------------------------

    def select(self) -> None:
        """Choose, or choose and book, under any mixture of wishes."""
        body = self.prompt() | self._wishes()
        if self.dice.random() < 0.2:
            worker_id, dp_rank = self.dice.choice([*self.ranks, (1234567, 0), (0, 77)])
            body["pinned_worker"] = {"worker_id": worker_id, "dp_rank": dp_rank}
        else:
            self._settle(body)
        path = "/select"
        if self.dice.random() < 0.6:
            path = "/select_and_reserve"
            body["reservation_id"] = self._new_id()
        status, answer = self.duel.ask("POST", path, body)
        if path != "/select" and status == 200:
            self.live.append(answer["reservation_id"])

    def _wishes(self) -> Body:
        dice = self.dice
        wishes: Body = {}
        override = {
            "prefill_load_scale": dice.choice([0, 0.5, 2]),
            "overlap_score_credit": dice.choice([0, 0.5, 1]),
            "overlap_score_weight": dice.choice([0, 0.3, 2]),
            "track_prefill_tokens": dice.choice([True, False]),
        }
        if dice.random() < 0.3:
            chosen = dice.sample(sorted(override), dice.randrange(1, 4))
            wishes["router_config_override"] = {name: override[name] for name in chosen}
        if dice.random() < 0.3:
            required = dice.sample("abc", dice.randrange(2))
            preferred = {taint: dice.choice([1.0, -2, 0.3, 50]) for taint in dice.sample("abc", 2)}
            wishes["routing_constraints"] = {
                "required_taints": required,
                "preferred_taints": preferred,
            }
        if dice.random() < 0.25:
            known = [*self.taints, 999_999]
            wishes["allowed_worker_ids"] = dice.sample(known, dice.randrange(3))
        if dice.random() < 0.2:
            wishes |= {"priority_jump": dice.choice([-1, 2.5]), "strict_priority": 3}
        return wishes

    def _settle(self, body: Body) -> None:
        """Pin a request that has several best ranks to one of them."""
        prices = self._prices(body)
        if prices:
            least = min(prices.values())
            best = [rank for rank, price in prices.items() if price - least < TIE]
            if len(best) > 1:
                body["pinned_worker"] = {"worker_id": best[0][0], "dp_rank": best[0][1]}

    def _prices(self, body: Body) -> dict[Rank, float]:
        """The contract's formula without overlap, from what /potential_loads says."""
        asked = {**body, "router_config_override": {"track_prefill_tokens": False}}
        status, rows = self.duel.ask("POST", "/potential_loads", asked)
        if status != 200:
            return {}
        override = body.get("router_config_override", {})
        scale = override.get("overlap_score_weight", override.get("prefill_load_scale", 1.0))
        wanted = body.get("routing_constraints", {})
        isl = _isl_tokens(body) if override.get("track_prefill_tokens", True) else None
        prices = {}
        for row in rows:
            taints = self.taints[row["worker_id"]]
            allowed = body.get("allowed_worker_ids", [row["worker_id"]])
            if row["worker_id"] not in allowed or set(wanted.get("required_taints", ())) - taints:
                continue
            prefill = 0.0 if isl is None else (row["potential_prefill_tokens"] + isl) / BLOCK_SIZE
            liked = sum(w for t, w in wanted.get("preferred_taints", {}).items() if t in taints)
            price = scale * prefill + row["potential_decode_blocks"]
            prices[row["worker_id"], row["dp_rank"]] = price * math.exp(-math.tanh(liked))
        return prices

    def reserve(self) -> None:
        """Book a rank by name; sometimes a live id again, with another body."""
        body = self.prompt()
        isl = _isl_tokens(body)
        worker_id, dp_rank = self.dice.choice(self.ranks)
        body |= {
            "reservation_id": self._new_id(),
            "worker_id": worker_id if self.dice.random() > 0.05 else 424242,
            "dp_rank": dp_rank,
            "effective_prefill_tokens": self.dice.choice([0, 1, isl, isl, isl + 1]),
        }
        if self.live and self.dice.random() < 0.1:
            body |= {"reservation_id": self.dice.choice(self.live)}
            body["expected_output_tokens"] = self.dice.getrandbits(32)
        status, _ = self.duel.ask("POST", "/reservations", body)
        if status == 201:
            self.live.append(body["reservation_id"])

    def go_on(self) -> None:
        """One step in the life of a reservation."""
        path = _path(self.dice.choice([*self.live, "nope"]))
        if self.dice.random() < 0.5:
            self.duel.ask("POST", f"{path}/prefill_complete")
            return
        fraction = self.dice.choice([0, 1, 0.5, 0.25, 0.125, None, 1.5, -0.1])
        body = {} if self.dice.random() < 0.4 else {"decay_fraction": fraction}
        self.duel.ask("POST", f"{path}/output_block", body)

    def end(self) -> None:
        """End a live reservation: what the reference says of others differs on purpose (D4)."""
        if self.live:
            name = self.live.pop(self.dice.randrange(len(self.live)))
            self.duel.ask("DELETE", _path(name))

    def inspect(self) -> None:
        """Read what is booked."""
        path = self.dice.choice(["/loads", "/potential_loads", "/overlap_scores"])
        if path == "/loads":
            self.duel.ask("GET", path)
        else:
            self.duel.ask("POST", path, self.prompt())

    def _new_id(self) -> str:
        return f"r/{next(self._numbers)} \N{LATIN SMALL LETTER E WITH ACUTE}"


def _isl_tokens(body: Body) -> int:
    if "mm_routing_info" in body:
        return len(body["mm_routing_info"]["routing_token_ids"])
    return len(body["token_ids"]) if "token_ids" in body else body.get("isl_tokens", 0)


def _path(name: str) -> str:
    return f"/reservations/{quote(name, safe='')}"


@pytest.mark.parametrize("seed", range(4))
def test_any_traffic(servers: tuple[Server, Server], seed: int) -> None:
    duel = Duel(servers, seed)
    traffic = Traffic(duel, random.Random(seed))
    for step in range(STEPS):
        traffic.step()
        if step % 10 == 0:
            duel.ask("GET", "/loads")
    while traffic.live:
        traffic.end()
    duel.ask("GET", "/loads")


@pytest.mark.parametrize("seed", range(4))
def test_few_reservations_that_share_blocks(servers: tuple[Server, Server], seed: int) -> None:
    """Short games on a worker of their own; after each move every prefix is asked about."""
    duel, dice = Duel(servers, seed), random.Random(seed)
    for game in range(GAMES):
        record = {"worker_id": game, "endpoint": "e", "block_size": BLOCK_SIZE}
        duel.register(record | {"max_num_batched_tokens": 10**9})
        names: list[str] = []
        for move in range(dice.randrange(1, 8)):
            name = dice.choice([*names, None, None])
            if name is None:
                names.append(f"{game}-{move}")
                body = {"reservation_id": names[-1], "worker_id": game, **_shared(dice)}
                duel.ask("POST", "/reservations", body | {"effective_prefill_tokens": 3})
            elif dice.random() < 0.6:
                fraction = dice.choice([None, 0.5, 0.25, 1, 0])
                duel.ask("POST", f"{_path(name)}/output_block", {"decay_fraction": fraction})
            else:
                names.remove(name)
                duel.ask("DELETE", _path(name))
            for _ in range(2):
                duel.ask("POST", "/potential_loads", _shared(dice))
        for name in names:
            duel.ask("DELETE", _path(name))
        for server in servers:  # what becomes of the record differs on purpose (D5)
            server.request("DELETE", f"/workers/{game}")
            # the reference says 200 first and lets the worker's load go afterwards
            block_until(partial(_has_no_load, server))


def _lists(server: Server, sign: bytes) -> bool:
    return sign in server.request("POST", "/potential_loads", {"token_ids": [1]}).raw


def _has_no_load(server: Server) -> bool:
    return b"worker_id" not in server.request("GET", "/loads").raw


def _shared(dice: random.Random) -> Body:
    """A path into a small binary tree of prefixes."""
    chain = [0]
    for _ in range(dice.randrange(4)):
        chain.append(chain[-1] * 2 + dice.randrange(1, 3))
    return {"sequence_hashes": chain[1:], "block_hashes": chain[1:], "isl_tokens": 5}
