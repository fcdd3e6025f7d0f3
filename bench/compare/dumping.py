"""W9: GET /dump of a large index, and what it does to selections meanwhile."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import msgspec

from bench.compare.memory import store_chains
from bench.compare.paced import paced_detail
from bench.compare.run import Reading
from bench.compare.served import Phase
from bench.compare.workloads import selections
from bench.load.http import BadAnswer
from bench.load.paced import Paced, Schedule, drive_paced

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.compare.served import Usage
    from bench.compare.target import Target

__all__ = ["Dump"]

_LONGEST_S = 120
_RATE = 300.0


class _Download(msgspec.Struct):
    """What the downloading process prints."""

    seconds: float
    bytes: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Dump:
    """One client takes the whole index while another asks /select at a rate."""

    name: str
    blocks: int
    isl: int = 512
    workers: ClassVar[int] = 8
    shares_stream: ClassVar[bool] = False
    unit: ClassVar[str] = "dump"

    @property
    def rows(self) -> tuple[str, ...]:
        """How long it takes, and how long others wait."""
        return (f"{self.name}: to the last byte", f"{self.name}: p99 of /select meanwhile")

    def prepare(self, target: Target) -> None:
        """Fill the index, each block with one holder."""
        stored = store_chains(target, self.name, self.blocks)
        assert stored == self.blocks, "whole chains only"

    def phases(self, target: Target, round_number: int) -> Sequence[Phase]:
        """One phase with two readings."""
        del round_number
        operation, check = selections(target.worker_ids, self.isl, ring=256)
        host, port = target.server.address
        command = [sys.executable, "-m", "bench.load.download", host, str(port), "/dump"]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert child.stdin is not None
        assert child.stdout is not None
        if child.stdout.readline().strip() != b"ready":
            raise BadAnswer("the downloading process did not start")
        orders, report = child.stdin, child.stdout
        done, download = Paced(), _Download(0.0, 0, 0)

        def work() -> int:
            nonlocal done
            orders.write(b"go\n")
            orders.flush()
            schedule = Schedule(time.perf_counter(), _RATE, round(_RATE * _LONGEST_S))
            done = drive_paced(
                *(target.server.address, operation, check, schedule),
                enough=lambda: child.poll() is not None,
            )
            return 1

        def verify() -> None:
            nonlocal download
            with child:
                text = report.read()
            if child.returncode:
                raise BadAnswer(f"the download of /dump failed: {text!r}")
            download = msgspec.json.decode(text, type=_Download)
            if download.blocks != self.blocks:
                raise BadAnswer(f"{download.blocks} blocks in the dump of {self.blocks}")

        def read(usage: Usage) -> list[Reading]:
            detail = {**usage.detail(), **paced_detail(done), "bytes": download.bytes}
            duration, latency = self.rows
            return [
                Reading(duration, "s", download.seconds, detail),
                Reading(latency, "ms", detail["p99_ms"]),
            ]

        return [Phase(self.name, work, verify, read)]
