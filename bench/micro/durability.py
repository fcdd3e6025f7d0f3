"""What durability costs: `python -m bench.micro.durability [--callers 1,8,32] [--state-dir DIR]`.

Whole lifecycles over HTTP against a process of its own: select and book, prefill complete, one
output block, free; every call waits for its answer, every caller for its own. Prints calls per
second and latencies without a state directory, relaxed, and strict, where an answer means that the
change is on disk; and strict with the lifecycle calls of many reservations in one request. What
the disk itself takes for a sync is measured beside it: without that number the others mean nothing.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import msgspec

from bench.compare.servers import Contender, RunningServer
from bench.load.http import Answer, BadAnswer, Operation, ask, drive, request_bytes

BATCH = 16  # reservations a caller of POST /reservations/batch has
BLOCKS = 16
WORKERS = 8
WARM_UP = 300
PAGES = 8192
SYNCS = 300
MODES = {
    "no state directory": (),
    "relaxed": ("--durability", "relaxed"),
    "strict": ("--durability", "strict"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--callers", default="1,8,32", help="at a time; several: one after another")
    parser.add_argument(
        "--lifecycles", type=int, default=5000, help="at most, and by the caller 500"
    )
    parser.add_argument("--state-dir", type=Path, default=None, help="where; default: a temporary")
    chosen = parser.parse_args()
    os.environ["DYN_USE_KV_EVENTS"] = "false"
    with tempfile.TemporaryDirectory(dir=chosen.state_dir) as directory:
        grown, reserved = (sync_ms(Path(directory), grows=grows) for grows in (True, False))
        print(f"one fdatasync of 8 KiB here: {grown:.2f} ms when the file grows, {reserved:.2f} ms")
        print("when it has its size already, as the log of the state has (medians)")
        for callers in map(int, chosen.callers.split(",")):
            for name, flags in MODES.items():
                where = f"{directory}/{name}-{callers}"
                command = (sys.executable, "-m", "select_service", "--host", "127.0.0.1")
                kept = ("--state-dir", where, *flags) if flags else ()
                lifecycles = min(chosen.lifecycles, 500 * callers)
                with RunningServer(Contender(name, (*command, *kept))) as server:
                    register(server)
                    report(f"{callers:3} callers, {name}", *measure(server, callers, lifecycles))
                    if name == "strict":
                        found = measure_batches(server, callers, max(20, lifecycles // BATCH))
                        report(f"{callers:3} callers, strict, in batches", *found, BATCH)


def sync_ms(directory: Path, *, grows: bool) -> float:
    """Median time of making two pages durable that were written behind or over what was there."""
    times = []
    path = directory / "probe"
    with path.open("wb", buffering=0) as file:
        if not grows:
            file.write(bytes(PAGES * SYNCS))
            os.fsync(file.fileno())
            file.seek(0)
        for _ in range(SYNCS):
            file.write(os.urandom(PAGES))
            started = perf_counter()
            os.fdatasync(file.fileno())
            times.append(perf_counter() - started)
    path.unlink()
    return sorted(times)[len(times) // 2] * 1e3


def register(server: RunningServer) -> None:
    workers = [
        {"worker_id": number, "endpoint": f"http://w{number}", "block_size": 16}
        for number in range(WORKERS)
    ]
    ask(server.address, [request_bytes("POST", "/workers", encode(one)) for one in workers])


def measure(server: RunningServer, callers: int, lifecycles: int) -> tuple[list[float], float]:
    """Return the latency of every call in seconds, and how long all took together."""
    rng = random.Random(1)
    sent: dict[int, float] = {}
    latencies: list[float] = []

    def operation(number: int) -> Operation:
        path = f"/reservations/lifecycle-{number:08}"
        steps = (
            booking(f"lifecycle-{number:08}", rng),
            request_bytes("POST", f"{path}/prefill_complete"),
            request_bytes("POST", f"{path}/output_block", b"{}"),
            request_bytes("DELETE", path),
        )
        sent[number] = perf_counter()
        return steps

    def check(answer: Answer) -> None:
        if answer.status != 200:
            raise BadAnswer(f"{answer.status} {answer.body!r:.300}")
        now = perf_counter()
        latencies.append(now - sent[answer.operation])
        sent[answer.operation] = now

    drive(server.address, operation, check, operations=range(WARM_UP), connections=callers)
    latencies.clear()
    started = perf_counter()
    numbers = range(WARM_UP, WARM_UP + lifecycles)
    drive(server.address, operation, check, operations=numbers, connections=callers)
    return latencies, perf_counter() - started


def measure_batches(server: RunningServer, callers: int, rounds: int) -> tuple[list[float], float]:
    """Likewise for requests of BATCH lifecycle calls each; the bookings before are not counted."""
    rng = random.Random(2)
    names = [[f"batched-{number}-{of}" for of in range(BATCH)] for number in range(rounds)]
    bookings = [booking(name, rng) for group in names for name in group]
    ask(server.address, bookings)
    sent: dict[int, float] = {}
    latencies: list[float] = []

    def operation(number: int) -> Operation:
        sent[number] = perf_counter()
        return tuple(
            request_bytes(
                *("POST", "/reservations/batch"),
                encode(
                    {"operations": [{"op": op, "reservation_id": one} for one in names[number]]}
                ),
            )
            for op in ("prefill_complete", "output_block", "output_block", "free")
        )

    def check(answer: Answer) -> None:
        if answer.status != 200 or b'"error"' in answer.body:
            raise BadAnswer(f"{answer.status} {answer.body!r:.300}")
        now = perf_counter()
        latencies.append(now - sent[answer.operation])
        sent[answer.operation] = now

    started = perf_counter()
    drive(server.address, operation, check, operations=range(rounds), connections=callers)
    return latencies, perf_counter() - started


def booking(name: str, rng: random.Random) -> bytes:
    hashes = [rng.getrandbits(63) for _ in range(BLOCKS)]
    body = {
        "reservation_id": name,
        "block_hashes": hashes,
        "sequence_hashes": hashes,
        "isl_tokens": BLOCKS * 16,
    }
    return request_bytes("POST", "/select_and_reserve", encode(body))


def encode(body: object) -> bytes:
    return msgspec.json.encode(body)


def report(name: str, latencies: list[float], seconds: float, each: int = 1) -> None:
    latencies.sort()
    p50, p99, p999 = (latencies[int(len(latencies) * part)] * 1e3 for part in (0.5, 0.99, 0.999))
    print(
        f"{name:32} {each * len(latencies) / seconds:8.0f} calls/s   "
        f"p50 {p50:.2f}  p99 {p99:.2f}  p99.9 {p999:.2f}  max {latencies[-1] * 1e3:.2f} ms",
        flush=True,
    )


if __name__ == "__main__":
    main()
