"""The longest turn of the loop for every route and job: `python -m bench.micro.turns`.

A whole service in this process, with workers, ranks, bookings and an index of many blocks; a client
in a thread of its own asks every route in turn. Each callback that the loop runs is timed, by
processor time of the loop's thread: what other processes take of the machine is no hold of ours.
Garbage is not collected meanwhile (`bench.micro.pull` measures that). Of each route the callback
that lasted longest is shown, the median of some rounds and the longest, and its name.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import http.client
import logging
import os
import random
import socket
import statistics
import tempfile
import time
from asyncio import events
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import orjson

from bench.micro.holds import stored
from select_service.edge.app import create_application, create_driver
from select_service.edge.http.listening_sockets import ListeningSockets
from select_service.edge.http.routes import ROUTES
from select_service.edge.server import Server
from select_service.settings import Settings, read_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from select_service.edge.driver.driver import Driver

HOST: Final = "127.0.0.1"
DARK: Final = "tcp://127.0.0.1:9"  # no engine publishes there: events are given to the streams here
BLOCK_SIZE: Final = 16
CHAIN: Final = 64  # blocks of one store event
WIDE: Final = 4  # every so manieth worker has two ranks
BLOCKS_BOOKED: Final = 16
NEW: Final = 1 << 20  # ids of workers and reservations that come during a measurement
ROUNDS: Final = 5
QUIET_S: Final = 4.0
"""Without requests: housekeeping, the doctor and the console's history have some turns in it."""


class Turns:
    """Seconds of processor time of every callback since it was asked last, with their names."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, object]] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Time what the loop of this thread runs; its `Handle` is Python's own, so not uvloop's."""
        run, clock, seen = events.Handle._run, time.thread_time, self._seen  # noqa: SLF001

        def timed(handle: events.Handle) -> None:
            before = clock()
            run(handle)
            seen.append((clock() - before, handle._callback))  # type: ignore[attr-defined] # noqa: SLF001

        events.Handle._run = timed  # type: ignore[assignment, method-assign] # noqa: SLF001
        try:
            yield
        finally:
            events.Handle._run = run  # type: ignore[method-assign] # noqa: SLF001

    def longest(self) -> tuple[float, str]:
        """Return the longest callback since the last call, and whose it was."""
        seen, self._seen[:] = [*self._seen], []
        seconds, callback = max(seen, key=lambda one: one[0], default=(0.0, None))
        return seconds, name_of(callback)


def name_of(callback: object) -> str:
    """Say whose a callback is: of a task the coroutine, else the function."""
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        return str(getattr(owner.get_coro(), "__qualname__", owner.get_name()))
    return str(getattr(callback, "__qualname__", callback))


class Client:
    """Asks over one connection, in a thread that is not the loop's."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._line = http.client.HTTPConnection(HOST, port, timeout=60.0)

    def ask(self, method: str, path: str, body: object = None) -> bytes:
        """Ask, and read the whole answer, which must be none of a fault of ours."""
        headers = {"content-type": "application/json"}
        text = None if body is None else orjson.dumps(body)
        self._line.request(method, path, text, headers)
        answer = self._line.getresponse()
        read = answer.read()
        assert answer.status < 500 or answer.status == 503, (method, path, answer.status, read)
        return read

    def listen(self, path: str, seconds: float) -> None:
        """Read a stream without an end for so long."""
        with socket.create_connection((HOST, self._port)) as line:
            line.sendall(f"GET {path} HTTP/1.1\r\nhost: bench\r\n\r\n".encode())
            until = time.monotonic() + seconds
            line.settimeout(0.2)
            while time.monotonic() < until:
                try:
                    line.recv(1 << 18)
                except TimeoutError:
                    continue


def model(number: int, models: int) -> dict[str, str]:
    """Return what says the model of a worker: they are dealt round, one of them is the default."""
    return {"model_name": f"model-{number % models}"} if number % models else {}


def worker(number: int, models: int) -> dict[str, Any]:
    """Return the record of a worker."""
    ranks = 1 if number % WIDE else 2
    return model(number, models) | {
        "worker_id": number,
        "endpoint": f"http://10.0.{number >> 8 & 255}.{number & 255}:8000",
        "block_size": BLOCK_SIZE,
        "kv_events_endpoints": {str(rank): DARK for rank in range(ranks)},
        "data_parallel_size": ranks,
        "max_num_batched_tokens": 1 << 20,  # none waits
        "total_kv_blocks": 100_000,
    }


def booking(number: int, workers: int, models: int) -> dict[str, Any]:
    """Return a reservation of hashes that it shares with none."""
    first, worker_id = number * BLOCKS_BOOKED, 1 + number % workers
    return model(worker_id, models) | {
        "reservation_id": f"r{number}",
        "worker_id": worker_id,
        "sequence_hashes": list(range(first, first + BLOCKS_BOOKED)),
        "isl_tokens": BLOCK_SIZE * BLOCKS_BOOKED,
    }


def fill_index(service: Driver, blocks: int) -> None:
    """Give blocks to the streams in turn, one of them a quarter of all."""
    rng, streams = random.Random(1), service.core.registry.streams()
    numbers: dict[int, int] = {}
    for at in range(blocks // CHAIN):
        stream = streams[0] if at % 4 == 0 else streams[at % len(streams)]
        number = numbers[id(stream)] = numbers.get(id(stream), -1) + 1
        stream.on_live([b"", number.to_bytes(8, "big"), stored(rng, CHAIN, "plain")], 1.0)
        while stream.is_busy:
            stream.resume(1.0)


class Probe:
    """Asks for everything there is, and prints what held the loop."""

    def __init__(self, client: Client, turns: Turns, chosen: argparse.Namespace) -> None:
        self._client, self._turns, self._only = client, turns, chosen.only
        self._workers, self._models = chosen.workers, chosen.models

    def measure(self, name: str, act: Callable[[int], object], rounds: int = ROUNDS) -> None:
        """Do something so many times, and print the longest callbacks meanwhile."""
        if self._only not in name:
            return
        longest = []
        self._turns.longest()
        for number in range(rounds):
            act(number)
            time.sleep(0.05)  # what goes on after the answer is of it, too
            longest.append(self._turns.longest())
        longest.sort()
        median = statistics.median(seconds for seconds, _ in longest)
        seconds, whose = longest[-1]
        print(f"{name:52} {median * 1e3:8.2f} {seconds * 1e3:8.2f}  {whose}", flush=True)

    def ask(self, method: str, path: str, body: object = None) -> None:
        """Measure one request."""
        self.measure(f"{method} {path}", lambda _: self._client.ask(method, path, body))

    def _worker(self, number: int) -> dict[str, Any]:
        return worker(number, self._models)

    def _booking(self, number: int) -> dict[str, Any]:
        return booking(number, self._workers, self._models)

    def register(self) -> None:
        """Register all workers; only the last are looked at."""
        for number in range(1, self._workers + 1):
            if number == max(1, self._workers - 63):
                self._turns.longest()
            self._client.ask("POST", "/workers", self._worker(number))
        self._print("POST the last 64 workers")

    def book(self, reservations: int) -> None:
        """Book so many reservations, round the workers."""
        for number in range(reservations):
            self._client.ask("POST", "/reservations", self._booking(number))

    def discovery(self, file: Path) -> None:
        """Have the file of workers touched, then half of them gone."""
        for name, count in (("nothing new", self._workers), ("half gone", self._workers // 2)):
            self._turns.longest()
            write_workers(file, count, self._models)
            time.sleep(QUIET_S)
            self._print(f"discovery, {name}")

    def _print(self, name: str) -> None:
        seconds, whose = self._turns.longest()
        print(f"{name:52} {'':8} {seconds * 1e3:8.2f}  {whose}", flush=True)

    def everything(self) -> None:
        """Measure every route of the table, the console, and what goes on by itself."""
        self.measure("nothing", lambda _: time.sleep(QUIET_S), 2)
        gets = {one.pattern for one in ROUTES if one.method == "GET" and "{" not in one.pattern}
        for path in sorted(gets):
            self.ask("GET", path)
        self.ask("GET", "/ready?verbose=true")
        self.ask("GET", "/decisions?limit=1000")
        self.ask("GET", "/decisions?limit=200&candidates=true")
        self.ask("GET", "/scale_down_candidates?count=16")
        for path in ("decisions", "leases", "reservations", "findings", "shadow"):
            self.ask("GET", f"/console/api/{path}")
        self.measure("GET /console/events", lambda _: self._client.listen("/console/events", 5), 2)
        self._prompts()
        self._lifecycle()
        self._catalog()

    def _prompts(self) -> None:
        prompt = {"token_ids": list(range(512))}
        for path in ("/select", "/potential_loads", "/overlap_scores"):
            self.ask("POST", path, prompt)
        self.ask("POST", "/console/api/prefix", {"prompt": prompt})
        pinned = {"routing_constraints": {"preferred_taints": {"a": 1.0}}}
        self.measure("POST /select with taints", self._posting("/select", prompt | pinned))
        explained = prompt | {"explain": True}
        self.measure("POST /select explained", self._posting("/select", explained))
        some = {"allowed_worker_ids": list(range(1, self._workers, 2))}
        self.measure("POST /select of some", self._posting("/select", prompt | some))
        batch = {"requests": [prompt] * 64}
        self.measure("POST /select_batch of 64", self._posting("/select_batch", batch))
        self.measure("POST /select_pair", self._posting("/select_pair", prompt))

    def _posting(self, path: str, body: object) -> Callable[[int], bytes]:
        return lambda _: self._client.ask("POST", path, body)

    def _lifecycle(self) -> None:
        ask = self._client.ask

        def booked(number: int) -> None:
            name = f"{os.getpid()}-{number}"
            body = {"reservation_id": name, "token_ids": list(range(512))}
            ask("POST", "/select_and_reserve", body)
            ask("POST", f"/reservations/{name}/prefill_complete")
            ask("POST", f"/reservations/{name}/output_block", {"decay_fraction": 1.0})
            ask("DELETE", f"/reservations/{name}")

        self.measure("a lifecycle", booked)

        def leased(number: int) -> None:
            name = f"{os.getpid()}-{number}"
            ask("POST", "/leases", {"lease_id": name, "ttl_s": 30})
            for at in range(500):
                body = self._booking(NEW + number * 1000 + at)
                ask("POST", "/reservations", body | {"lease_id": name})
            self._turns.longest()
            ask("POST", f"/leases/{name}/renew")
            ask("DELETE", f"/leases/{name}")
            time.sleep(1.0)

        self.measure("the end of a lease of 500", leased, 2)
        name = iter(range(NEW))

        def many(_: int) -> None:
            items = [{"op": "free", "reservation_id": f"r{next(name)}"} for _ in range(500)]
            ask("POST", "/reservations/batch", {"items": items})

        self.measure("POST /reservations/batch of 500", many, 2)

    def _catalog(self) -> None:
        ask, last = self._client.ask, self._workers
        body = {"active_decode_blocks": 5}
        self.measure(
            f"POST /workers/{last}/metrics", self._posting(f"/workers/{last}/metrics", body)
        )
        self.ask("GET", f"/workers/{last}/drain")
        self.measure("POST drain", lambda at: ask("POST", f"/workers/{last - at}/drain"))
        self.measure("DELETE drain", lambda at: ask("DELETE", f"/workers/{last - at}/drain"))
        patch = {"max_num_batched_tokens": 1 << 21}
        self.measure("PATCH a worker", lambda at: ask("PATCH", f"/workers/{last - at}", patch))
        self.measure(
            "POST a worker again", lambda at: ask("POST", "/workers", self._worker(last - at))
        )
        self.measure(
            "POST a new worker", lambda at: ask("POST", "/workers", self._worker(NEW + at))
        )
        self.measure("DELETE a new worker", lambda at: ask("DELETE", f"/workers/{NEW + at}"))
        self.measure("DELETE a worker with load", lambda at: ask("DELETE", f"/workers/{last - at}"))
        self.measure("DELETE a worker of many blocks", lambda _: ask("DELETE", "/workers/1"), 1)
        self.measure("what that leaves", lambda _: time.sleep(QUIET_S), 1)


async def run(chosen: argparse.Namespace, directory: Path) -> None:
    """Serve, and have the client ask."""
    file = directory / "workers.json"
    more: dict[str, Any] = {}
    if chosen.state:
        more["state_dir"] = str(directory / "state")
    if chosen.replica_sync_port:
        more["replica_sync_port"] = chosen.replica_sync_port
    if chosen.file:
        more["workers_file"] = str(file)
        write_workers(file, chosen.workers, chosen.models)
    logging.disable()
    settings = Settings(router=read_environment(os.environ), host=HOST, port=0, **more)
    turns, service = Turns(), create_driver(settings)
    with turns.watched():
        await service.start(0)
        with ListeningSockets.bound((HOST, 0), None, 0o600) as entrances:
            server = Server(settings, *create_application(service, settings), entrances)
            serving = asyncio.ensure_future(server.serve(sockets=entrances.sockets))
            await asyncio.sleep(QUIET_S)  # what is loaded late is loaded
            print(f"{'longest turn, ms':52} {'median':>8} {'longest':>8}")
            probe = Probe(Client(entrances.port), turns, chosen)
            await populate(probe, service, chosen)
            gc.collect()
            gc.freeze()
            gc.disable()
            await asyncio.to_thread(probe.everything)
            if chosen.file:
                await asyncio.to_thread(probe.discovery, file)
            server.should_exit = True
            await serving
        await service.close()


async def populate(probe: Probe, service: Driver, chosen: argparse.Namespace) -> None:
    """Have workers come by HTTP, unless they came from a file, then blocks and reservations."""
    if not chosen.file:
        await asyncio.to_thread(probe.register)
    assert len(service.core.catalog) == chosen.workers
    fill_index(service, chosen.blocks)
    await asyncio.to_thread(probe.book, chosen.reservations)


def write_workers(path: Path, workers: int, models: int) -> None:
    """Write a file as `--workers-file` takes it."""
    path.write_bytes(orjson.dumps([worker(number, models) for number in range(1, workers + 1)]))


def main() -> None:
    """Print all of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=1024)
    parser.add_argument("--models", type=int, default=1, help="scopes they are dealt over")
    parser.add_argument("--reservations", type=int, default=10_000)
    parser.add_argument("--blocks", type=int, default=200_000)
    parser.add_argument("--state", action="store_true", help="with --state-dir")
    parser.add_argument("--replica-sync-port", type=int, default=0)
    parser.add_argument("--file", action="store_true", help="workers come from a file")
    parser.add_argument("--only", default="", help="part of the name of what is measured")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(run(chosen, Path(directory)))


if __name__ == "__main__":
    main()
