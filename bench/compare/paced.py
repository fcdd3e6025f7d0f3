"""A few hundred requests a second instead of saturation, alone (W1) and beside KV events (W7).

A fleet's selector is mostly idle: it pays for being woken up once per request, and for whatever it
does without requests. The client is the open-loop one; how late it was itself is in the file.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, ClassVar

from bench.compare.lifecycles import unshared_lifecycles
from bench.compare.run import Reading
from bench.compare.served import Phase
from bench.compare.workloads import selections
from bench.load.chains import Chain, chains, decodes, drops
from bench.load.paced import Paced, Schedule, Stream, drive_paced, percentile
from bench.load.prompts import Prompt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.compare.served import Usage
    from bench.compare.target import Target

__all__ = ["Mixed", "PacedSelect", "paced_detail"]

_START_DELAY_S = 0.02  # from taking the schedule's start to its first operation


def paced_detail(done: Paced) -> dict[str, float]:
    """What an open-loop run says about itself: percentiles of its first step, and lateness."""
    first = done.answered_s[0]
    return {
        "operations": done.operations,
        "p50_ms": percentile(first, 0.50) * 1e3,
        "p99_ms": percentile(first, 0.99) * 1e3,
        "max_ms": max(first) * 1e3,
        "client_realtime": done.realtime,
        "client_late_p99_ms": percentile(done.late_s, 0.99) * 1e3,
    }


@dataclass(frozen=True, slots=True)
class PacedSelect:
    """W1 at a rate: POST /select of prompts that no worker holds."""

    name: str
    isl: int
    seconds: float
    rate: float = 300.0
    ring: int = 256
    workers: ClassVar[int] = 16
    shares_stream: ClassVar[bool] = True
    unit: ClassVar[str] = "select"

    @property
    def rows(self) -> tuple[str, ...]:
        """One, of the same name."""
        return (self.name,)

    def prepare(self, target: Target) -> None:
        """Nothing beyond the workers."""

    def phases(self, target: Target, round_number: int) -> Sequence[Phase]:
        """One phase: CPU of all its time, by the requests of that time."""
        del round_number
        operation, check = selections(target.worker_ids, self.isl, self.ring)
        done = Paced()

        def work() -> int:
            nonlocal done
            count = round(self.rate * self.seconds)
            schedule = Schedule(time.perf_counter() + _START_DELAY_S, self.rate, count)
            done = drive_paced(target.server.address, operation, check, schedule)
            return done.operations

        def read(usage: Usage) -> list[Reading]:
            cost = usage.cpu_s / usage.units * 1e6
            detail = {**usage.detail(), **paced_detail(done)}
            return [Reading(self.name, f"CPU µs / {self.unit}", cost, detail)]

        return [Phase(self.name, work, read=read)]


@dataclass(frozen=True, slots=True)
class Mixed:
    """W7: lifecycles at a rate while the workers' streams report new blocks at another.

    Sequences grow by a block in turn, as in decoding; each of the workers has its own stream. When
    the time is over every stream must be indexed to its end, which the cost includes; then all
    blocks are removed, outside the clock.
    """

    name: str
    seconds: float
    isl: int = 2048
    rate: float = 300.0
    blocks_rate: float = 50_000.0
    events_per_batch: int = 8
    sequences: int = 256
    ring: int = 64
    workers: ClassVar[int] = 8
    shares_stream: ClassVar[bool] = False
    unit: ClassVar[str] = "cycle"

    @property
    def rows(self) -> tuple[str, ...]:
        """Latency and CPU."""
        return (f"{self.name}: p99 of select_and_reserve", f"{self.name}: CPU")

    @property
    def blocks(self) -> int:
        """That arrive in a round: whole steps of all sequences."""
        return round(self.blocks_rate * self.seconds / self.sequences) * self.sequences

    def prepare(self, target: Target) -> None:
        """Nothing beyond the workers."""

    def phases(self, target: Target, round_number: int) -> Sequence[Phase]:
        """One phase with two readings."""
        held, batches, lasts = _streams(self, round_number)
        operation, check = unshared_lifecycles(target.worker_ids, self.isl, self.ring)
        done, stream, lag_s = Paced(), Stream(Schedule(0.0, 1.0, 0), lambda _: None), 0.0

        def send(number: int) -> None:
            worker_id, payload = batches[number]
            target.publishers.publish(worker_id - 1, payload)

        def work() -> int:
            nonlocal done, stream, lag_s
            start = time.perf_counter() + _START_DELAY_S
            rate = len(batches) / self.seconds
            stream = Stream(Schedule(start, rate, len(batches)), send)
            schedule = Schedule(start, self.rate, round(self.rate * self.seconds))
            first = target.operations_done
            done = drive_paced(
                target.server.address, operation, check, schedule, first=first, meanwhile=stream
            )
            target.operations_done += done.operations
            since = time.perf_counter()
            for prompt, chain in lasts:
                target.wait_indexed(prompt, chain.worker_id, len(chain.hashes))
            lag_s = time.perf_counter() - since
            return done.operations

        def verify() -> None:
            for worker_id, payload in drops(held):
                target.publishers.publish(worker_id - 1, payload)
            for prompt, chain in lasts:
                target.wait_indexed(prompt, chain.worker_id, 0)

        def read(usage: Usage) -> list[Reading]:
            detail = {
                **usage.detail(),
                **paced_detail(done),
                "blocks": self.blocks,
                "events_late_max_ms": stream.late_s * 1e3,
                "indexed_after_ms": lag_s * 1e3,
            }
            latency, cpu = self.rows
            return [
                Reading(latency, "ms", detail["p99_ms"], detail),
                Reading(cpu, "CPU ms / s", usage.cpu_s / self.seconds * 1e3),
            ]

        return [Phase(self.name, work, verify, read)]


@functools.lru_cache(maxsize=1)
def _streams(
    of: Mixed, round_number: int
) -> tuple[list[Chain], list[tuple[int, bytes]], list[tuple[Prompt, Chain]]]:
    """Chains, the batches by which they come, and the last chain of each worker as a prompt."""
    rng = Random(f"{of.name} {round_number}")
    held = chains(rng, of.sequences, of.blocks // of.sequences, of.workers)
    batches = list(decodes(held, of.events_per_batch))
    lasts = [(Prompt.of(one.token_ids), one) for one in held[-of.workers :]]
    return held, batches, lasts
