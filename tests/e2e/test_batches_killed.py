"""Batches that are all or none, on one of several replicas that is killed in the middle of some.

What was answered stands, on all of them; of what was not, all is there or nothing, on all of them.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from pathlib import Path

import pytest

from tests.live.batches import batch, booked
from tests.live.replicas import Replica, agree, ours
from tests.live.window import WATCHED
from tests.wait import PATIENCE_S, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]

SAMPLES = 200
"""Of a batch: it takes several turns of the loop, and is sent to replicas in several messages."""

CALLERS = 2
SEED = 7


def end(server: Replica, name: str, samples: range) -> None:
    """End samples of a batch, with one call."""
    free = [{"op": "free", "reservation_id": f"{name}.{number}"} for number in samples]
    server.ask("POST", "/reservations/batch", {"operations": free})


def die_among_batches(server: Replica, life: int, said: set[str], freed: set[str]) -> None:
    """Have clients book batches, and end every third one at its other end, until it is killed."""
    numbers, first = itertools.count(), threading.Event()

    def call() -> None:
        with contextlib.suppress(Exception):  # until it is killed
            while True:
                name = f"w{life}-{(number := next(numbers))}"
                assert server.request("POST", "/select_batch", batch(name, SAMPLES)).status == 200
                said.add(name)
                first.set()
                if number % 3 == 2:
                    said.discard(name)  # from here on some of it may be over
                    freed.add(name)
                    end(server, name, range(SAMPLES))

    callers = [threading.Thread(target=call) for _ in range(CALLERS)]
    for one in callers:
        one.start()
    assert first.wait(PATIENCE_S)
    threading.Event().wait(random.Random(SEED + life).random() * 0.2)  # in the middle of others
    assert server.process is not None
    server.process.kill()
    server.process.wait()
    for one in callers:
        one.join()


def run(tmp_path: Path, lives: int, others: int) -> None:
    state = ("--state-dir", str(tmp_path / "state"), "--reservation-ttl-s", "0")
    with contextlib.ExitStack() as stack:
        witnesses = [
            stack.enter_context(
                ours(tmp_path, f"witness-{number}", "--reservation-ttl-s", "0", command=WATCHED)
            )
            for number in range(others)
        ]
        peers = [one.replica_endpoint for one in witnesses]
        server = stack.enter_context(ours(tmp_path, "a", *state, command=WATCHED, peers=peers))
        for one in witnesses:
            one.listen_to(server.replica_endpoint)
            one.add_worker(1, 2)
        server.add_worker(1, 2)
        said, freed = set[str](), set[str]()
        for life in range(lives):
            eventually(lambda: server.metric("replica_publishers", state="synced"), float(others))
            die_among_batches(server, life, said, freed)
            server.__enter__()
            stands = booked(server)
            assert stands.keys() >= said, "what was answered stands"
            whole = {name: count for name, count in stands.items() if name not in freed}
            assert set(whole.values()) <= {SAMPLES}, "all or none"
            said.update(whole)
            for one in witnesses:  # of ends that it died before it wrote down they send it in turn
                eventually(lambda: booked(one) == booked(server), True)
            agree([server, *witnesses])
            assert booked(server).items() >= whole.items(), "what was not ended stands still"
        ends = itertools.cycle([server, *witnesses])
        for name in booked(server):  # at whichever replica: each knows all of them
            half = SAMPLES // 2
            end(next(ends), name, range(half))
            end(next(ends), name, range(half, SAMPLES))
        for one in (server, *witnesses):
            eventually(lambda: booked(one), {})
        assert set(agree([server, *witnesses]).values()) == {(0, 0, 0)}, "nothing is left"


def test_batches_of_a_killed_replica(tmp_path: Path) -> None:
    run(tmp_path, 1, 2)


@pytest.mark.long
def test_batches_of_a_replica_that_is_killed_again_and_again(tmp_path: Path) -> None:
    run(tmp_path, 12, 2)
