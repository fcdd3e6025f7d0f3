"""What it costs to record a service (`--record`): `python -m bench.micro.recording`.

Prints µs of CPU of one request's whole life (select_and_reserve, prefill_complete, output_block,
free) in the core, not recorded and recorded, interleaved: of the loop's thread, and of the writer's
beside it; bytes on disk per life; how late a loop that does one life a millisecond is at worst; and
how fast `select-sim replay` is.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles

from indexer.core.hashing import pack_u64
from indexer.core.registry import StreamRegistry
from select_service.core.instrumentation.instrumented import CoreObservers
from select_service.core.instrumentation.recorder import Recorder
from select_service.core.service import SelectionCore
from select_service.edge.state.recording_file import SWITCH_S, Recording, RecordSettings
from select_service.simulator.recording_replay import replay
from select_service.simulator.recordings import files_of
from select_service.types import RouterConfig, SelectAndReserveRequest, WorkerSpec

ROUNDS = 1000
REPEATS = 15
BLOCKS = 32
PACED = 3000
_random = random.Random(1)


class Bench:
    """A service, recorded or not."""

    def __init__(self, workers: int, path: Path | None) -> None:
        self.recording: Recording | None = None
        config, rng, decision_recorder = RouterConfig(use_kv_events=False), random.Random(1), None
        if path is not None:
            bounds = RecordSettings(path=path, queue_bytes_max=1 << 30, bytes_max=1 << 30)
            self.recording = Recording(bounds, config)
            self.recording.open()
            rng, decision_recorder = self.recording.random(1), Recorder(self.recording)
        self.core = SelectionCore(
            StreamRegistry(), config, rng, watch=CoreObservers(decision_recorder=decision_recorder)
        )
        self.count = 0
        self.now = 1.0  # a millisecond later with each request: what fades is noted again
        for number in range(workers):
            spec = WorkerSpec(worker_id=number, endpoint="http://w", block_size=16)
            self.core.workers.upsert_worker(spec, 0.0)
        for _ in range(4 * workers):
            self.book()

    def start(self) -> None:
        """Begin to write."""
        if self.recording is not None:
            self.recording.start(time.monotonic)

    def book(self) -> str:
        """Book a prompt nobody has sent before."""
        self.count += 1
        name = f"r{self.count}"
        hashes = pack_u64([_random.getrandbits(63) for _ in range(BLOCKS)])
        request = SelectAndReserveRequest(
            reservation_id=name,
            block_hashes=hashes,
            sequence_hashes=hashes,
            isl_tokens=16 * BLOCKS,
        )
        self.now += 0.001
        self.core.selection.select_and_reserve(request, self.now)
        return name

    def life(self) -> None:
        """Let one request live."""
        name = self.book()
        self.core.reservations.prefill_complete(name, self.now)
        self.core.reservations.output_block(name, None, self.now)
        self.core.reservations.free(name, self.now)

    def lives(self) -> tuple[float, float]:
        """CPU seconds of this thread, and of the whole process until all is written."""
        process, thread = time.process_time(), time.thread_time()
        for _ in range(ROUNDS):
            self.life()
        here = time.thread_time() - thread
        while self.recording is not None and self.recording.queue_bytes:
            time.sleep(0.001)
        return here, time.process_time() - process

    async def lateness(self) -> list[float]:
        """How late each of many steps is that are due a millisecond apart."""
        loop, late = asyncio.get_running_loop(), []
        due = loop.time()
        for _ in range(PACED):
            due += 0.001
            await asyncio.sleep(max(0.0, due - loop.time()))
            late.append(loop.time() - due)
            self.life()
        return late


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", default="8,64,512")
    args = parser.parse_args()
    for workers in map(int, args.workers.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            tell(workers, Path(folder) / "recording")


def tell(workers: int, path: Path) -> None:
    """Measure a fleet of so many workers."""
    sys.setswitchinterval(SWITCH_S)
    plain, recorded = Bench(workers, None), Bench(workers, path)
    recorded.start()
    gc.disable()
    spent = [(plain.lives(), recorded.lives()) for _ in range(REPEATS)]
    per = 1e6 / ROUNDS
    bare = median(one[0][0] for one in spent) * per
    loop = median(one[1][0] for one in spent) * per
    whole = median(one[1][1] for one in spent) * per
    late = [asyncio.run(one.lateness()) for one in (plain, recorded)]
    assert recorded.recording is not None
    asyncio.run(recorded.recording.close())
    notes, size = recorded.recording.notes, recorded.recording.bytes_written
    began = time.process_time()
    told = replay(files_of(path))
    seconds = time.process_time() - began
    assert told.reproduced == told.decisions, told.first_difference
    cuts = [quantiles(one, n=1000) for one in late]
    print(
        f"{workers} workers: a life {bare:.1f} us, recorded {loop:.1f} (+{loop - bare:.1f}) and "
        f"{whole - loop:.1f} in the writer; {size / recorded.count:.0f} bytes; late p50 "
        f"{cuts[0][499] * 1e3:.2f} -> {cuts[1][499] * 1e3:.2f} ms, p99 {cuts[0][989] * 1e3:.2f} -> "
        f"{cuts[1][989] * 1e3:.2f}; replay {told.decisions / seconds:.0f}/s; {notes}"
    )


if __name__ == "__main__":
    main()
