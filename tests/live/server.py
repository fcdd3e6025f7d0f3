"""A selection service as a process: started, watched until it answers, stopped, its log kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from tests.live.http import Answer, exchange
from tests.live.ports import HOST, free_port
from tests.wait import PATIENCE_S, block_until

LOG_TAIL_CHARS = 3000

OURS = (sys.executable, "-m", "select_service")
OURS_EXTRA = ("--host", HOST)
PATIENT = (
    *("--replay-silence-s", "1000", "--replay-timeout-s", "10000", "--kv-poll-interval-s", "0"),
    *("--recovery-hold-s", "1000", "--recovery-silence-s", "1000", "--recovery-timeout-s", "1000"),
    *("--replica-output-interval-s", "1000", "--replica-timeout-s", "1000"),
)
"""For a service whose engines and peers are played by a test, which may get no time for seconds."""

SLOW_DISK: Final = ("--state-stall-s", "600")
"""A disk that others fill may take longer than the default lets a commit take."""


@dataclass
class Server:
    """One service process. Use as a context manager; leaving it stops the process."""

    log_path: Path
    command: Sequence[str] = OURS
    args: Sequence[str] = OURS_EXTRA
    env: Mapping[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("DYN_")}
        slow_disk = SLOW_DISK if "--state-dir" in self.args else ()
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [*self.command, "--port", str(self.port), *slow_disk, *self.args],
                env=environment | dict(self.env),
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            self._wait_until_it_answers()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _wait_until_it_answers(self) -> None:
        block_until(self._answers, lambda: f"no answer:\n{self.log_tail()}")

    def _answers(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise RuntimeError(
                f"the service ended with {self.process.returncode} before it answered:\n"
                f"{self.log_tail()}"
            )
        try:
            return self.request("GET", "/health").status == 200
        except OSError:
            return False

    def request(self, method: str, path: str, body: object = None) -> Answer:
        """One exchange with a JSON body, on a connection of its own."""
        return exchange(self.port, method, path, body)

    def fleet_load(self) -> tuple[int, int, int]:
        """(requests, prefill tokens, blocks) of the whole fleet."""
        scopes: Any = self.request("GET", "/loads").json
        rows = [row for scope in scopes for row in scope["loads"]]
        return (
            sum(row["active_requests"] for row in rows),
            sum(row["potential_prefill_tokens"] for row in rows),
            sum(row["potential_decode_blocks"] for row in rows),
        )

    def metric(self, name: str, /, **labels: str) -> float:
        """The sum of all series of this name that have these labels; 0 where there is none."""
        head = f"select_service_{name}"
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        total = 0.0
        for line in self.request("GET", "/metrics").raw.decode().splitlines():
            series, _, value = line.rpartition(" ")
            if series.partition("{")[0] == head and all(one in series for one in wanted):
                total += float(value)
        return total

    def stop(self) -> int:
        """Ask the process to end (SIGTERM) and return its exit code; kill it if it will not."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait()

    def log_tail(self) -> str:
        """The end of what the process wrote, for failure messages."""
        return self.log_path.read_text("utf-8", "replace")[-LOG_TAIL_CHARS:]
