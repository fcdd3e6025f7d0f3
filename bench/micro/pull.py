"""How long a large pull holds the loop: `python -m bench.micro.pull [--reservations 20000]`.

One process has that many reservations, another (this one) learns of it and fetches its snapshot. A
task that does nothing notes what processor time each turn of the loop takes, so that other jobs on
the machine do not count; what the garbage collector takes of it is noted beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import random
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from bench.compare.servers import Contender, RunningServer
from bench.load.http import ask, request_bytes
from select_service.edge.app import create_driver
from select_service.edge.garbage_collection import GarbageCollection
from select_service.edge.http.traffic import Traffic
from select_service.settings import Settings, read_environment
from select_service.types import WorkerSpec

if TYPE_CHECKING:
    from select_service.edge.driver.driver import Driver

WORKERS = 8
HASHES = 16
DEADLINE_S = 120.0


@dataclass
class Holds:
    """Processor time of turns of the loop, and of collections, in seconds."""

    turns: list[float] = field(default_factory=list)
    collections: dict[int, list[float]] = field(default_factory=dict)
    _began: float = 0.0

    async def watch(self) -> None:
        """Note every turn until cancelled."""
        while True:
            before = time.thread_time()
            await asyncio.sleep(0)
            self.turns.append(time.thread_time() - before)

    def collected(self, phase: str, facts: dict[str, int]) -> None:
        """Note a collection; for `gc.callbacks`."""
        if phase == "start":
            self._began = time.thread_time()
        else:
            took = time.thread_time() - self._began
            self.collections.setdefault(facts["generation"], []).append(took)

    def report(self, name: str) -> None:
        """Print it all."""
        turns = sorted(self.turns)
        long = sum(one > 0.001 for one in turns)
        print(
            f"{name}: {len(turns)} turns, p99 {turns[int(0.99 * len(turns))] * 1e3:.2f}, "
            f"longest {turns[-1] * 1e3:.1f} ms, {long} over 1 ms"
        )
        for generation, took in sorted(self.collections.items()):
            print(
                f"  collections of generation {generation}: {len(took)}, "
                f"longest {max(took) * 1e3:.1f}, together {sum(took) * 1e3:.0f} ms"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reservations", type=int, default=20_000)
    parser.add_argument("--plain", action="store_true", help="with Python's own settings")
    chosen = parser.parse_args()
    os.environ["DYN_USE_KV_EVENTS"] = "false"
    port = random.randrange(20_000, 30_000)
    command = (sys.executable, "-m", "select_service", "--host", "127.0.0.1")
    source = Contender("source", (*command, "--replica-sync-port", str(port)))
    with RunningServer(source) as server:
        ask(server.address, [request_bytes("POST", "/workers", one) for one in workers()])
        rng = random.Random(1)
        ask(server.address, [booking(number, rng) for number in range(chosen.reservations)])
        asyncio.run(pull(port, chosen.reservations, plain=chosen.plain))


async def pull(port: int, reservations: int, *, plain: bool) -> None:
    settings = Settings(router=read_environment(os.environ), replica_sync_port=port + 1)
    service = create_driver(settings)
    await service.start(0)
    garbage = GarbageCollection(Traffic(), time.monotonic)
    if not plain:
        garbage.start()
    holds = Holds()
    gc.callbacks.append(holds.collected)
    watching = asyncio.ensure_future(holds.watch())
    try:
        for one in workers():
            service.upsert_worker(msgspec.json.decode(one, type=WorkerSpec))
        service.replica_plane().register(f"tcp://127.0.0.1:{port}")
        started = time.monotonic()
        while booked(service) < reservations:
            assert time.monotonic() - started < DEADLINE_S
            await asyncio.sleep(0.05)
        print(f"{reservations} reservations pulled in {time.monotonic() - started:.1f} s")
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        gc.callbacks.remove(holds.collected)
        garbage.close()
        await service.close()
    holds.report("the loop")


def booked(service: Driver) -> int:
    return sum(row.active_requests for scope in service.core.queries.loads() for row in scope.loads)


def workers() -> list[bytes]:
    return [
        encode({"worker_id": number, "endpoint": f"http://w{number}", "block_size": 16})
        for number in range(WORKERS)
    ]


def booking(number: int, rng: random.Random) -> bytes:
    body = {
        "reservation_id": f"reservation-{number:08}",
        "worker_id": number % WORKERS,
        "sequence_hashes": [rng.getrandbits(63) for _ in range(HASHES)],
        "isl_tokens": 16 * HASHES,
    }
    return request_bytes("POST", "/reservations", encode(body))


def encode(body: object) -> bytes:
    return msgspec.json.encode(body)


if __name__ == "__main__":
    main()
