"""What each compiled kernel saves: `python -m bench.micro.kernels [--kernels NAME,...]`.

A process with all kernels, and one for each kernel that has the plain form in its place; what is
built on that kernel goes with it, and the table says so. All take turns, row by row and round by
round. Printed is what an operation costs with all kernels, and what more without each of them: the
median over the rounds of the difference within a round, where nine rounds of ten agree that it is
more than one percent.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Final

import msgspec

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGES: Final = ("indexer", "select_service")
Work = Callable[[], float]
"""One round of a row; returns what an operation costs."""

_REQUESTS: Final = 200
_AGREE: Final = 0.9  # of the rounds
_LEAST: Final = 0.01  # of what the operation costs


def kernels() -> dict[str, int]:
    """Every kernel with the lines of its source."""
    sources = [one for package in PACKAGES for one in sorted((ROOT / package).rglob("_*.pyx"))]
    return {
        ".".join(one.relative_to(ROOT).with_suffix("").parts): len(one.read_bytes().splitlines())
        for one in sources
    }


# -- one process: its imports are made after the kernel was taken away


async def _requests(row: str) -> Work:
    """CPU µs of a request of `bench.micro.application`."""
    from bench.micro.http_request import rig_of

    rig = await rig_of(row)
    rig.run(_REQUESTS)

    def work() -> float:
        rig.run(_REQUESTS)
        return rig.times.pop()

    return work


def _events(row: str) -> Work:
    """CPU µs of a block, from the bytes of its message into the index or out of it."""
    from random import Random

    from bench.load.chains import chains, decodes, drops, prefills
    from bench.load.prompts import BLOCK_SIZE
    from indexer.core.registry import StreamRegistry
    from indexer.types import Scope, WorkerRank

    registry, scope, rng = StreamRegistry(), Scope("m", "t"), Random(1)
    registry.open_index(scope, BLOCK_SIZE)
    rank = WorkerRank(1, 0)
    stream = registry.open_stream(scope, rank, worker_ranks=range(1), has_replay=False)
    sequence = 0

    def apply(payloads: list[bytes]) -> float:
        nonlocal sequence
        start = time.process_time()
        for payload in payloads:
            stream.on_live([b"", sequence.to_bytes(8, "big"), payload], 0.0)
            sequence += 1
            while stream.is_busy:
                stream.resume(0.0)
        return time.process_time() - start

    def work() -> float:
        held = chains(rng, 32, 256 if row == "store 64" else 32, 1)
        coming = prefills(held) if row == "store 64" else decodes(held, 8)
        going = [payload for _, payload in drops(held)]
        blocks = sum(len(one.hashes) for one in held)
        stored, dropped = apply([payload for _, payload in coming]), apply(going)
        return (dropped if row == "remove 64" else stored) / blocks * 1e6

    return work


def _messages(row: str) -> Work:
    """CPU µs of a message of one block, out of a socket."""
    import zmq

    from bench.load.chains import chains, decodes
    from indexer.edge.receiver import Receiver

    del row
    context = zmq.Context()
    pub, sub = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    for one in (pub, sub):
        one.set_hwm(0)
    pub.bind("inproc://events")
    sub.connect("inproc://events")
    receiver = Receiver(sub, 1 << 20)
    from random import Random

    payloads = [payload for _, payload in decodes(chains(Random(1), 64, 16, 1), 1)]

    def work() -> float:
        for number, payload in enumerate(payloads):
            pub.send_multipart([b"", number.to_bytes(8, "big"), payload])
        start, left = time.process_time(), len(payloads)
        while left:
            left -= len(receiver.receive_some(64, b"replay"))
        return (time.process_time() - start) / len(payloads) * 1e6

    return work


def _simulated(row: str) -> Work:
    """CPU µs of a simulated request, engines included."""
    from select_service.simulator.core.workloads import WorkloadSettings
    from select_service.simulator.runs import run
    from select_service.simulator.settings import SimulationSettings

    del row
    chats = WorkloadSettings(kind="chat", rate=6.0, requests=_REQUESTS)
    settings = SimulationSettings(workers=4, workloads=[chats])

    def work() -> float:
        start = time.process_time()
        done = run(settings)
        return (time.process_time() - start) / done.requests * 1e6

    return work


def _allocated(make: Callable[[], object]) -> float:
    """Bytes that what is made has allocated, the kernels' own included, until it is gone again."""
    tracemalloc.start()
    kept = make()
    allocated, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del kept
    return allocated


def _index_memory(row: str) -> Work:
    """Bytes of a block, of 51,200 in chains of 512."""
    from bench.load.chains import fresh_chains
    from indexer.core.hashing import block_hashes
    from indexer.core.index import KvIndex
    from indexer.types import Tier, WorkerRank

    runs = [
        (chain.hashes, block_hashes(chain.token_ids, 16)) for chain in fresh_chains(row, 100, 512)
    ]
    rank = WorkerRank(1, 0)

    def make() -> KvIndex:
        index = KvIndex(16)
        index.attach(rank)
        for names, packed in runs:
            # objects of its own, as a decoded event has them
            index.store(
                rank, Tier.DEVICE, None, [*map(int, map(str, names))], packed[:-1] + packed[-1:]
            )
        return index

    return lambda: _allocated(make) / (100 * 512)


def _ended_memory(row: str) -> Work:
    """Bytes of the id of a reservation that has ended, of 50,000."""
    from select_service.core.expiring_map import ExpiringMap

    del row

    def make() -> ExpiringMap[str]:
        ended: ExpiringMap[str] = ExpiringMap()
        for number in range(50_000):
            ended.put(f"reservation-{number:08}", float(number))
        return ended

    return lambda: _allocated(make) / 50_000


REQUESTS: Final = ("W1@2048", "W2@2048", "W3@2048", "W4", "W4-shared", "W4-repeats", "W5@1024")
EVENTS: Final = ("store 64", "store 8x1", "remove 64")
OTHERS: Final = {
    "message": _messages,
    "simulated": _simulated,
    "index bytes": _index_memory,
    "ended bytes": _ended_memory,
}
MEMORY_ROUNDS: Final = 1
ROWS: Final = (*REQUESTS, *EVENTS, *OTHERS)


async def serve(rows: list[str]) -> None:
    """Be one of the processes: a line in is a row, a line out what an operation has cost."""
    from indexer.compiled import objections

    works: dict[str, Work] = {}
    for row in rows:
        if row in REQUESTS:
            works[row] = await _requests(row)
        else:
            works[row] = _events(row) if row in EVENTS else OTHERS[row](row)
        works[row]()
    print(msgspec.json.encode(sorted(objections())).decode(), flush=True)
    for line in sys.stdin:
        print(works[line.strip()](), flush=True)


# -- the process that asks


class Variant:
    """A process without one kernel, or with all of them."""

    def __init__(self, without: str, rows: list[str]) -> None:
        command = [sys.executable, "-m", "bench.micro.kernels", "--serve", without]
        command += ["--rows", ",".join(rows)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.costs: dict[str, list[float]] = {row: [] for row in rows}
        self.plain: list[str] = []

    def wait_ready(self) -> None:
        """Hear which kernels it goes without."""
        self.plain = msgspec.json.decode(self._answer(), type=list[str])

    def measure(self, row: str) -> None:
        """One round of a row."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{row}\n")
        self._process.stdin.flush()
        self.costs[row].append(float(self._answer()))

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a process has ended")
        return line


def cell(plain: list[float], compiled: list[float]) -> str:
    """What more an operation costs without the kernel; nothing where rounds do not agree."""
    more = [one - other for one, other in zip(plain, compiled, strict=True)]
    agreed = sum(one > _LEAST * median(compiled) for one in more) >= _AGREE * len(more)
    return f"+{median(more):.3g}" if agreed else ""


def table(variants: dict[str, Variant], rows: list[str], lines: dict[str, int]) -> str:
    """Markdown: the first line is what an operation costs, the others what more it costs."""
    head = ["without", "lines", *rows]
    compiled = variants[""]
    costs = (f"{median(compiled.costs[row]):.3g}" for row in rows)
    found = [head, ["---"] * len(head), ["(all compiled)", str(sum(lines.values())), *costs]]
    for name, variant in variants.items():
        if name:
            others = [one.rpartition(".")[2] for one in variant.plain if one != name]
            also = f" (and {', '.join(others)})" if others else ""
            cells = (cell(variant.costs[row], compiled.costs[row]) for row in rows)
            found.append([f"`{name}`{also}", str(lines[name]), *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernels", help="of these only, split at commas")
    parser.add_argument("--rows", default=",".join(ROWS), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--serve", metavar="WITHOUT", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    rows = chosen.rows.split(",")
    if chosen.serve is not None:
        if chosen.serve:
            sys.modules[chosen.serve] = None  # type: ignore[assignment] # what was not built is so
        asyncio.run(serve(rows))
        return
    lines = kernels()
    names = chosen.kernels.split(",") if chosen.kernels else list(lines)
    with ExitStack() as stack:
        variants = {name: Variant(name, rows) for name in ("", *names)}
        for variant in variants.values():
            stack.callback(variant.end)
        for variant in variants.values():
            variant.wait_ready()
        order = list(variants.values())
        for number in range(chosen.rounds):
            turn = number % len(order)
            for row in rows:
                if row.endswith("bytes") and number >= MEMORY_ROUNDS:
                    continue  # always the same
                for variant in order[turn:] + order[:turn]:
                    variant.measure(row)
    print(table(variants, rows, lines))


if __name__ == "__main__":
    main()
