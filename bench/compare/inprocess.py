"""W11: the service inside another program's Python process, without HTTP.

Ours is `select_service.SelectionService`, the peer's the class of the same name in `dynamo._core`,
both awaited on asyncio's loop, by one caller and by as many as W1 has connections. The cost is that
of the whole process: making the request out of lists, the call, looking at the answer.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar

import msgspec

from bench.compare.run import Reading
from bench.compare.servers import is_ours
from bench.compare.target import MODEL, NEVER_BUSY
from bench.compare.workloads import ring_of_prompts
from bench.load.events import Publishers
from bench.load.http import BadAnswer
from bench.load.prompts import BLOCK_SIZE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.compare.servers import Contender

__all__ = ["InProcess"]

_CHILD = Path(__file__).with_name("inprocess_child.py")
_UNITS = {"select": "select", "lifecycle": "cycle"}
_ROOT = Path(__file__).resolve().parents[2]


class _Measured(msgspec.Struct):
    cpu_s: float
    wall_s: float
    wrong: list[str]


@dataclass(frozen=True, slots=True)
class InProcess:
    """Selections and lifecycles by calls instead of requests."""

    name: str
    operations: int
    isl: int = 2048
    ring: int = 64
    callers: tuple[int, ...] = (1, 16)
    workers: ClassVar[int] = 16
    rounds_max: ClassVar[int | None] = None
    warms_up: ClassVar[bool] = True

    @property
    def rows(self) -> tuple[str, ...]:
        """The two operations, by how many callers."""
        return tuple(
            f"{self.name} {what}, isl {self.isl}, {callers} at a time"
            for callers in self.callers
            for what in ("select, hashes", "lifecycle")
        )

    @contextmanager
    def session(self, contender: Contender, connections: int) -> Iterator[_InProcessSession]:
        """A process with a service in it that knows its workers."""
        del connections
        side = "ours" if is_ours(contender.name) else "peer"
        environment = {**os.environ, **contender.environment}
        if side == "ours":
            path = [str(_ROOT), environment.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        with (
            Publishers(self.workers, shared=True) as publishers,
            tempfile.TemporaryFile() as log,
            subprocess.Popen(
                [contender.python, str(_CHILD), side],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            ) as child,
        ):
            try:
                session = _InProcessSession(self, child, log)
                session.say(self._setup(publishers))
                publishers.wait_subscribed()
                yield session
            finally:
                child.kill()

    def _setup(self, publishers: Publishers) -> dict[str, Any]:
        return {
            "workers": [
                {
                    "worker_id": worker_id,
                    "model_name": MODEL,
                    "endpoint": f"http://worker-{worker_id}.invalid:8000",
                    "block_size": BLOCK_SIZE,
                    "kv_events_endpoint": endpoint,
                    "max_num_batched_tokens": NEVER_BUSY,
                }
                for worker_id, endpoint in enumerate(publishers.endpoints, 1)
            ],
            "prompts": [
                {"model_name": MODEL, **one.hash_form()}
                for one in ring_of_prompts(self.isl, self.ring)
            ],
        }


@dataclass(frozen=True, slots=True)
class _InProcessSession:
    workload: InProcess
    child: subprocess.Popen[bytes]
    log: IO[bytes]

    def round(self, number: int) -> list[Reading]:
        """Selections, then lifecycles."""
        del number
        of = self.workload
        readings = []
        orders = [(callers, do) for callers in of.callers for do in _UNITS]
        for row, (callers, do) in zip(of.rows, orders, strict=True):
            order = {"do": do, "count": of.operations, "callers": callers}
            measured = msgspec.json.decode(self.say(order), type=_Measured)
            if measured.wrong:
                raise BadAnswer(f"wrong: {measured.wrong}")
            cost = measured.cpu_s / of.operations * 1e6
            detail = {"units": of.operations, "cpu_s": measured.cpu_s, "wall_s": measured.wall_s}
            readings.append(Reading(row, f"CPU µs / {_UNITS[do]}", cost, detail))
        return readings

    def say(self, order: dict[str, Any]) -> bytes:
        """Give an order, wait for its answer.

        Raises:
            BadAnswer: the process ended instead.
        """
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.child.stdin.write(msgspec.json.encode(order) + b"\n")
        self.child.stdin.flush()
        line = self.child.stdout.readline()
        if not line:
            self.log.seek(0)
            raise BadAnswer(f"the process ended: {self.log.read()[-500:].decode(errors='replace')}")
        return line
