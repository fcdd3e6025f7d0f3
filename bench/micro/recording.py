"""What records of decisions cost over HTTP: `python -m bench.micro.recording`.

Prints CPU µs of the server per `POST /select`, and per lifecycle (select_and_reserve,
prefill_complete, DELETE), prompts as hashes. One process serves two services on two ports, one that
keeps no records and one that does and whose ring is full, and they take turns, a short round each:
of two processes of the same build one may be faster by what is to be measured here.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import subprocess
import sys
import time
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec

from bench.load.http import Answer, BadAnswer, ask, drive, request_bytes
from select_service.edge.app import create_door, create_driver, loop_factory
from select_service.edge.http.listening_sockets import ListeningSockets
from select_service.edge.server import Server
from select_service.settings.environment import RouterSettings
from select_service.settings.settings import Settings
from select_service.types import RouterConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

PROMPTS = 256
REQUESTS = 400
BLOCK = 16
HOST = "127.0.0.1"
_random = random.Random(1)


async def serve(records: int) -> None:
    """Be both services; tell the ports on standard output."""
    router = RouterSettings(RouterConfig(use_kv_events=False), None, ())
    with contextlib.ExitStack() as doors:
        tasks = []
        for kept in (0, records):
            chosen = Settings(host=HOST, port=0, decision_ring=kept, router=router)
            driver = create_driver(chosen)
            await driver.start()
            entrances = doors.enter_context(ListeningSockets.bound((HOST, 0), None, 0))
            server = Server(chosen, *create_door(driver, chosen), entrances)
            tasks.append(asyncio.ensure_future(server.serve(sockets=entrances.sockets)))
            while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
                await asyncio.sleep(0.01)
            print(entrances.port, flush=True)
        await asyncio.gather(*tasks)


class Twins:
    """The process of both services."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self.addresses = [(HOST, int(process.stdout.readline())) for _ in range(2)]
        self._clock = (~process.pid << 3) | 2  # its CPU clock

    def spent_us(self, which: int, calls: list[tuple[bytes, ...]], count: int, lines: int) -> float:
        """Carry out `count` operations with one of them; return what each cost."""
        before = time.clock_gettime(self._clock)
        drive(
            self.addresses[which],
            lambda number: calls[number % len(calls)],
            _check,
            operations=range(count),
            connections=lines,
        )
        return (time.clock_gettime(self._clock) - before) / count * 1e6


@contextlib.contextmanager
def running(workers: int, records: int) -> Iterator[Twins]:
    """Start both, and register the workers."""
    command = [sys.executable, "-m", "bench.micro.recording", "--serve", str(records)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        twins = Twins(process)
        for address in twins.addresses:
            ask(address, [_call("POST", "/workers", _worker(one)) for one in range(workers)])
        yield twins
    finally:
        process.kill()
        process.wait()


def _check(answer: Answer) -> None:
    if answer.status >= 300:
        raise BadAnswer(f"{answer.status} {answer.body[:300]!r}")


def _worker(number: int) -> dict[str, Any]:
    return {"worker_id": number, "endpoint": f"http://w{number}", "block_size": BLOCK}


def _call(method: str, path: str, body: object = None) -> bytes:
    return request_bytes(method, path, None if body is None else msgspec.json.encode(body))


def _prompt(isl: int) -> dict[str, Any]:
    hashes = [_random.getrandbits(64) for _ in range(isl // BLOCK)]
    return {"block_hashes": hashes, "sequence_hashes": hashes, "isl_tokens": isl}


def selections(isl: int) -> list[tuple[bytes, ...]]:
    """Each of them a prompt that nobody holds."""
    return [(_call("POST", "/select", _prompt(isl)),) for _ in range(PROMPTS)]


def lifecycles(isl: int) -> list[tuple[bytes, ...]]:
    """A booking each, its first token and its end."""
    names = [f"booking-{number}" for number in range(PROMPTS)]
    return [
        (
            _call("POST", "/select_and_reserve", {"reservation_id": name, **_prompt(isl)}),
            _call("POST", f"/reservations/{name}/prefill_complete"),
            _call("DELETE", f"/reservations/{name}"),
        )
        for name in names
    ]


KINDS = {"select": selections, "lifecycle": lifecycles}


def measure(twins: Twins, calls: list[tuple[bytes, ...]], asked: argparse.Namespace) -> str:
    """Return what one costs without records, with them, and what they cost."""
    spent: tuple[list[float], list[float]] = [], []
    for which in (0, 1):
        twins.spent_us(which, calls, asked.records + REQUESTS, asked.connections)
    for number in range(asked.rounds):
        for which in (0, 1) if number % 2 else (1, 0):
            spent[which].append(twins.spent_us(which, calls, REQUESTS, asked.connections))
    off, on = map(median, spent)
    more = sorted(b - a for a, b in zip(*spent, strict=True))
    best = sum(sorted(spent[1])[:10]) / sum(sorted(spent[0])[:10])
    return f"{off:8.2f} {on:8.2f} {median(more):+7.2f} {median(more) / off:+7.1%} {best - 1:+7.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, action="append")
    parser.add_argument("--isl", type=int, action="append")
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--records", type=int, default=1024)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--only", choices=list(KINDS))
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve is not None:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(serve(asked.serve))
        return
    print("µs of CPU without, with, difference (median, share; share of the ten best rounds)")
    for workers in asked.workers or [16, 256]:
        with running(workers, asked.records) as twins:
            for isl in asked.isl or [512, 2048, 8192]:
                for name in KINDS if asked.only is None else [asked.only]:
                    line = measure(twins, KINDS[name](isl), asked)
                    print(f"{name:10} {workers:4} workers, isl {isl:5} {line}", flush=True)


if __name__ == "__main__":
    main()
