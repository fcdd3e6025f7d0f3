"""What durability costs: `python -m bench.micro.durability [--callers 8] [--state-dir DIR]`.

Whole lifecycles over HTTP against a process of its own: select and book, prefill complete, one
output block, free; every call waits for its answer, every caller for its own. Prints calls per
second and latencies without a state directory, relaxed, and strict, where an answer means that the
change is on disk. What the disk itself takes for a sync is measured beside it: without that
number the others mean nothing.
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

BLOCKS = 16
WORKERS = 8
WARM_UP = 300
SYNCS = 300
MODES = {
    "no state directory": (),
    "relaxed": ("--durability", "relaxed"),
    "strict": ("--durability", "strict"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--callers", type=int, default=8)
    parser.add_argument("--lifecycles", type=int, default=5000)
    parser.add_argument("--state-dir", type=Path, default=None, help="where; default: a temporary")
    chosen = parser.parse_args()
    os.environ["DYN_USE_KV_EVENTS"] = "false"
    with tempfile.TemporaryDirectory(dir=chosen.state_dir) as directory:
        print(f"one fdatasync of 4 KiB here: {sync_ms(Path(directory)):.2f} ms (median)")
        for name, flags in MODES.items():
            where = ("--state-dir", f"{directory}/{name}") if flags else ()
            command = (sys.executable, "-m", "select_service", "--host", "127.0.0.1")
            with RunningServer(Contender(name, (*command, *where, *flags))) as server:
                report(name, *measure(server, chosen.callers, chosen.lifecycles))


def sync_ms(directory: Path) -> float:
    """Median time of appending a page and making it durable."""
    times = []
    with (directory / "probe").open("wb", buffering=0) as file:
        for _ in range(SYNCS):
            file.write(bytes(4096))
            started = perf_counter()
            os.fdatasync(file.fileno())
            times.append(perf_counter() - started)
    return sorted(times)[len(times) // 2] * 1e3


def measure(server: RunningServer, callers: int, lifecycles: int) -> tuple[list[float], float]:
    """Return the latency of every call in seconds, and how long all took together."""
    rng = random.Random(1)
    workers = [
        {"worker_id": number, "endpoint": f"http://w{number}", "block_size": 16}
        for number in range(WORKERS)
    ]
    ask(server.address, [request_bytes("POST", "/workers", encode(one)) for one in workers])
    sent: dict[int, float] = {}
    latencies: list[float] = []

    def operation(number: int) -> Operation:
        hashes = [rng.getrandbits(63) for _ in range(BLOCKS)]
        body = {
            "reservation_id": f"lifecycle-{number:08}",
            "block_hashes": hashes,
            "sequence_hashes": hashes,
            "isl_tokens": BLOCKS * 16,
        }
        path = f"/reservations/lifecycle-{number:08}"
        steps = (
            request_bytes("POST", "/select_and_reserve", encode(body)),
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


def encode(body: object) -> bytes:
    return msgspec.json.encode(body)


def report(name: str, latencies: list[float], seconds: float) -> None:
    latencies.sort()
    p50, p99, p999 = (latencies[int(len(latencies) * part)] * 1e3 for part in (0.5, 0.99, 0.999))
    print(
        f"{name:20} {len(latencies) / seconds:8.0f} calls/s   "
        f"p50 {p50:.2f}  p99 {p99:.2f}  p99.9 {p999:.2f}  max {latencies[-1] * 1e3:.2f} ms"
    )


if __name__ == "__main__":
    main()
