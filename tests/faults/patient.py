"""A service with engines and clients, to which something is done, and what must hold then.

While it lasts: /health answers, no odd answer, memory within bounds. Afterwards, within an awaited
time: load is the sum of the reservations that clients have, and what the index says of every prompt
is what the engines hold.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.stage import BLOCK_SIZE
from tests.faults.engine import PROMPTS, Engine, Row
from tests.faults.probe import Probe
from tests.faults.table import Line
from tests.faults.traffic import Traffic
from tests.faults.vitals import forget_peak, vitals
from tests.live.http import Answer
from tests.live.replicas import Replica
from tests.live.server import OURS_EXTRA
from tests.live.window import WATCHED, View
from tests.wait import eventually

HEALTH_P99_LOADED_MS = 250.0
"""What fails: two noisy processors are shared with the clients, the engines and the fault, and the
kernel may let each of those run for some tens of milliseconds before it is our turn again."""

GROWTH_MB = 96.0
"""A fault may cost so much memory at its worst, unless its test names another bound."""

RECOVERY_S = 30.0
BRISK = (
    *("--kv-poll-interval-s", "1", "--replay-silence-s", "1", "--replay-timeout-s", "5"),
    *("--replay-backoff-s", "0.2", "--replay-backoff-max-s", "1"),
    *("--replica-heartbeat-s", "0.2", "--replica-timeout-s", "3"),
    *("--replica-output-interval-s", "0.2"),
)
"""Waits that are minutes in production; the machinery is the same."""


@dataclass
class Patient:
    """One service under observation."""

    server: Replica
    engines: Sequence[Engine] = ()
    mended: float = field(default=0.0, init=False)
    traffic: Traffic = field(init=False)
    worker_ids: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.worker_ids = [one.worker_id for one in self.engines] or [1]
        self.traffic = Traffic([self.server.port], self.worker_ids, host=self.host)

    @property
    def host(self) -> str:
        """Where it is reached."""
        return self.server.host

    @property
    def pid(self) -> int:
        """Of the service."""
        assert self.server.process is not None
        return self.server.process.pid

    def register(self, behind: Mapping[int, tuple[str, str]] | None = None) -> None:
        """Tell the service of the engines, or of what stands in front of them."""
        for engine in self.engines:
            pub, replay = (behind or {}).get(engine.worker_id, engine.endpoints)
            record = {
                "worker_id": engine.worker_id,
                "endpoint": f"http://w{engine.worker_id}",
                "block_size": BLOCK_SIZE,
                "max_num_batched_tokens": 1 << 40,
                "kv_events_endpoint": pub,
                "replay_endpoint": replay,
            }
            self.server.ask("POST", "/workers", record, ok=(200, 201))

    @contextlib.contextmanager
    def suffering(
        self,
        name: str,
        record: Any,
        *,
        growth_mb: float = GROWTH_MB,
        breaks: bool = False,
        is_down: bool = False,
        clients: int = 3,
    ) -> Iterator[Line]:
        """Clients and a probe are at work inside; what was seen is judged, and written down.

        Args:
            name: of the fault, for the table.
            record: pytest's `record_property`.
            growth_mb: how much memory the worst moment may take.
            breaks: connections may break: it is the service that dies.
            is_down: /health need not answer: the process is stopped.
            clients: how many are at work.
        """
        line = Line(name)
        before = vitals(self.pid)
        forget_peak(self.pid)
        self.traffic = Traffic([self.server.port], self.worker_ids, clients=clients, host=self.host)
        began = time.monotonic()
        with Probe(self.server.port, self.host) as probe, self.traffic:
            yield line
        line.lasted_s = time.monotonic() - began
        line.health = probe.health
        line.before, line.after = before, vitals(self.pid)
        line.statuses = self.traffic.statuses
        line.write(record)
        assert not self.traffic.odd, self.traffic.odd[:5]
        assert self.traffic.statuses[200] > 20, "clients were served meanwhile"
        if not breaks:
            assert not self.traffic.broken, "a call without an answer"
        if not is_down and not breaks:
            assert not probe.health.failed, "/health did not answer"
            assert probe.health.judged_ms < HEALTH_P99_LOADED_MS, probe.health
        if not breaks:
            growth = max(line.after.peak_mb, line.after.rss_mb) - before.rss_mb
            assert growth < growth_mb, f"{growth:.0f} MB more than before"

    # -- afterwards --------------------------------------------------------------------------------

    def recovers(self, *, deadline_s: float = RECOVERY_S) -> None:
        """All that clients know holds, and all that engines hold is known."""
        self.traffic.resolve_doubts()
        for engine in self.engines:
            engine.run(0)
        self.index_is_true(deadline_s=deadline_s)
        self.conserves()

    def index_is_true(self, *, deadline_s: float = RECOVERY_S) -> None:
        """Wait until every prompt's row of every engine is what that engine holds."""
        wanted = [engine.holds() for engine in self.engines]
        began = time.monotonic()
        eventually(self._rows, wanted, deadline_s=deadline_s)
        self.mended = time.monotonic() - began

    def _rows(self) -> list[list[Row]]:
        """By engine and prompt, as `Engine.holds`."""
        rows: list[list[Row]] = [[] for _ in self.engines]
        for prompt in PROMPTS:
            body: Any = self.server.ask("POST", "/overlap_scores", {"token_ids": prompt})
            found = {row["worker_id"]: row for row in body["workers"]}
            for engine, mine in zip(self.engines, rows, strict=True):
                row = found[engine.worker_id]
                mine.append([row["device_blocks"], row["host_pinned_blocks"], row["disk_blocks"]])
        return rows

    def conserves(self) -> None:
        """Load is the sum of what stands, and what stands is what clients have."""
        view = self.server.view()
        is_sum(view)
        standing = {one.name: one.worker_id for one in view.booked}
        assert standing == self.traffic.live
        self.traffic.free_all()
        for scope in self.server.view().loads:
            for row in scope.loads:
                left = (row.potential_prefill_tokens, row.potential_decode_blocks)
                assert (row.active_requests, *left) == (0, 0, 0), "nobody has anything any more"


def is_sum(view: View) -> None:
    """Requests, prefill tokens and no fewer blocks than outputs: rank by rank."""
    wanted: dict[tuple[int, int], list[int]] = {}
    for one in view.booked:
        row = wanted.setdefault((one.worker_id, one.dp_rank), [0, 0])
        row[0] += 1
        row[1] += 0 if one.prefill_done else one.prefill_tokens
    found = {
        (row.worker_id, row.dp_rank): [row.active_requests, row.potential_prefill_tokens]
        for scope in view.loads
        for row in scope.loads
        if row.active_requests or row.potential_prefill_tokens
    }
    assert found == wanted


def service(folder: Path, *args: str, **fields: Any) -> Replica:
    """A service that is not started yet, with a window in it and short waits."""
    fields.setdefault("command", WATCHED)
    return Replica(folder / "service.log", args=(*OURS_EXTRA, *BRISK, *args), **fields)


def refusal(answer: Answer) -> tuple[int, str]:
    """Status and code."""
    body: Any = answer.json
    return answer.status, body["code"]
