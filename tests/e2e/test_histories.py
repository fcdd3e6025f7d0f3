"""Every history of calls for one reservation is one that could have happened in some order.

Threads call a real process for the same few ids at the same time. Each call begins and ends; a
model of a few lines must explain all answers of an id in an order in which no call is before one
that had ended when it began (linearizability, searched as Wing and Gong do). Ids are independent
of each other, so each is searched alone; in the end /loads is the sum of what is live.
"""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.effort import share_of
from tests.live.ports import HOST
from tests.live.server import OURS_EXTRA, Server
from tests.wait import PATIENCE_S

THREADS = 6
CALLS = 60
IDS = 5
MODELS = ("m1", "m2")
NO_EVENTS = {"DYN_USE_KV_EVENTS": "false"}

pytestmark = pytest.mark.e2e


class Call(NamedTuple):
    """What was asked of an id, when, and what came of it."""

    began: float
    ended: float
    verb: str  # booking, prefill_complete, free
    body: str  # of a booking, with its path
    status: int
    worker: int | None  # of an answer to a booking


class State(NamedTuple):
    """Of one id."""

    life: str = "never"  # or live, freed
    body: str = ""
    worker: int | None = None


def after(state: State, call: Call) -> State | None:
    """The state after a call, None if it cannot have been answered so."""
    is_live = state.life == "live"
    if call.verb == "free":
        expected = 404 if state.life == "never" else 200
        return (State("freed") if is_live else state) if call.status == expected else None
    if call.verb == "prefill_complete":
        return state if call.status == (200 if is_live else 404) else None
    if is_live and call.body != state.body:
        return state if call.status == 409 else None
    if call.status != (201 if call.body.startswith("/reservations") else 200):
        return None
    if is_live:
        return state if call.worker == state.worker else None
    return State("live", call.body, call.worker)


def explained(history: list[Call]) -> set[State]:
    """The states in which an order of all calls may have ended; none: there is no such order."""
    calls = sorted(history)
    everything = (1 << len(calls)) - 1
    ends: set[State] = set()
    seen = {(0, State())}
    open_ends = [(0, State())]
    while open_ends:
        done, state = open_ends.pop()
        if done == everything:
            ends.add(state)
            continue
        left = [number for number in range(len(calls)) if not done >> number & 1]
        first_end = min(calls[number].ended for number in left)
        for number in left:
            if calls[number].began > first_end:
                break  # one that had ended then is still left, and so for all that began later
            then = after(state, calls[number])
            place = done | 1 << number
            if then is not None and (place, then) not in seen:
                seen.add((place, then))
                open_ends.append((place, then))
    return ends


def booking(rng: random.Random, name: str) -> tuple[str, dict[str, Any]]:
    number = rng.randrange(3)
    hashes = list(range(10 * number, 10 * number + 2))
    body: dict[str, Any] = {"reservation_id": name, "model_name": rng.choice(MODELS)}
    body |= {"sequence_hashes": hashes, "isl_tokens": 32}
    if rng.random() < 0.3:
        worker = 1 + 2 * MODELS.index(body["model_name"]) + rng.randrange(2)
        return "/reservations", body | {"worker_id": worker}
    return "/select_and_reserve", body | {"block_hashes": hashes}


def client(port: int, seed: int, calls: dict[str, list[Call]], start: threading.Barrier) -> None:
    rng = random.Random(seed)
    wire = http.client.HTTPConnection(HOST, port, timeout=PATIENCE_S)
    start.wait()
    for _ in range(CALLS):
        name = f"r{rng.randrange(IDS)}"
        verb = rng.choice(("booking", "booking", "prefill_complete", "free"))
        method, path, text = "POST", f"/reservations/{name}/prefill_complete", ""
        if verb == "free":
            method, path = "DELETE", f"/reservations/{name}"
        elif verb == "booking":
            path, asked = booking(rng, name)
            text = json.dumps(asked)
        began = time.monotonic()
        wire.request(method, path, text or None, {"Content-Type": "application/json"})
        answer = wire.getresponse()
        got = json.loads(answer.read())
        call = Call(began, time.monotonic(), verb, path + text, answer.status, got.get("worker_id"))
        calls[name].append(call)
    wire.close()


def explain(log: Path, seed: int, *flags: str) -> None:
    calls: list[dict[str, list[Call]]] = [defaultdict(list) for _ in range(THREADS)]
    with Server(log, args=(*OURS_EXTRA, *flags), env=NO_EVENTS) as server:
        for worker in range(1, 5):
            record = {"worker_id": worker, "endpoint": f"http://w{worker}", "block_size": 16}
            record |= {"model_name": MODELS[(worker - 1) // 2]}
            assert server.request("POST", "/workers", record).status == 201
        start = threading.Barrier(THREADS)
        clients = [
            threading.Thread(target=client, args=(server.port, seed + n, calls[n], start))
            for n in range(THREADS)
        ]
        for one in clients:
            one.start()
        for one in clients:
            one.join()
        least = most = 0  # live in the end, as far as the histories show
        for number in range(IDS):
            history = [call for one in calls for call in one[f"r{number}"]]
            ends = explained(history)
            assert ends, (seed, number, sorted(history))
            lives = {end.life == "live" for end in ends}
            least, most = least + all(lives), most + any(lives)
        assert least <= server.fleet_load()[0] <= most
        for number in range(IDS):
            server.request("DELETE", f"/reservations/r{number}")
        assert server.fleet_load() == (0, 0, 0)


def test_the_search_finds_what_cannot_be() -> None:
    """A free that found nothing after a booking was answered, and two winners at once."""
    booked = Call(0.0, 1.0, "booking", "/select_and_reserve{}", 200, 1)
    missed = Call(2.0, 3.0, "free", "", 404, None)
    assert not explained([booked, missed])
    assert explained([booked, missed._replace(began=0.5)]), "it may have been first"
    other = booked._replace(body="/select_and_reserve{1}", began=0.5)
    assert not explained([booked, other])
    assert explained([booked, other._replace(status=409)]) == {State("live", booked.body, 1)}
    assert not explained([booked, booked._replace(worker=2)])


@pytest.mark.parametrize("kept", [False, True], ids=["in memory", "on disk"])
def test_histories_have_an_order(tmp_path: Path, kept: bool) -> None:
    explain(tmp_path / "log", 1, *(("--state-dir", str(tmp_path / "state")) if kept else ()))


@pytest.mark.heavy
@pytest.mark.timeout(1800)
def test_many_histories_have_an_order(tmp_path: Path) -> None:
    for seed in range(share_of(100)):
        explain(tmp_path / "log", 1000 * seed, "--state-dir", str(tmp_path / f"state{seed}"))
