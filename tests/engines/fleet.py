"""Engines and the service before them, for as long as some tests need them."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tests.engines.event_log import EventLog
from tests.engines.tiny_models import write_model
from tests.engines.traffic import Traffic
from tests.engines.verdicts import Verdict, judge
from tests.engines.vllm_engine import OFFSETS, EngineConfig, VllmEngine
from tests.live.ports import HOST, free_base
from tests.live.server import OURS_EXTRA, Server
from tests.wait import block_until, run


@dataclass
class Fleet:
    """Engines that are up, and one service that knows them."""

    folder: Path
    engines: Sequence[VllmEngine]
    server: Server
    log: EventLog
    scope: str = "default"

    @property
    def config(self) -> EngineConfig:
        return self.engines[0].config

    def register(self, server: Server | None = None) -> None:
        """Register all engines, and wait until the service is ready and subscribed."""
        server = server or self.server
        for engine in self.engines:
            answer = server.request("POST", "/workers", engine.worker(model_name=self.scope))
            record: Any = answer.json
            assert record["lifecycle"] == "schedulable", record
        wait_until_ready(server)

    def drive(self, what: str, requests: int, server: Server | None = None, **how: Any) -> Verdict:
        """Send conversations, and compare what was foretold with what the engines found."""
        traffic = self.traffic(requests, server, **how)
        run(traffic.run())
        return self.judge(what, traffic)

    def traffic(self, requests: int, server: Server | None = None, **how: Any) -> Traffic:
        server = server or self.server
        return Traffic(
            service=f"http://{HOST}:{server.port}",
            scope=self.scope,
            workers=[engine.worker_id for engine in self.engines],
            log=self.log,
            block_size=self.config.block_size,
            # of windows alone nothing is kept of an answer, which fills two blocks at most
            awaited_blocks=3 if self.config.model == "mistral" else 1,
            requests=requests,
            full_reports=self.config.full_reports,
            **how,
        )

    def judge(self, what: str, traffic: Traffic) -> Verdict:
        """A row of the table."""
        empty = Verdict(self.config.model, str(self.config), what)
        verdict = judge(empty, traffic.exchanges, self.config.block_size, self.log)
        notes = [f"{count} {error}" for error, count in sorted(traffic.errors.items())]
        if traffic.cancelled:
            notes.append(f"{traffic.cancelled} left on the way")
        if traffic.lags_s:
            middle, longest = median(traffic.lags_s) * 1000, max(traffic.lags_s) * 1000
            notes.append(f"applied after {middle:.0f} ms, {longest:.0f} at most")
        verdict.note = "; ".join(notes)
        return verdict

    def matched(self, prompt: Sequence[int], server: Server | None = None) -> dict[int, int]:
        """Blocks of a prompt that each worker's first rank holds, as the service has it."""
        body = {"token_ids": prompt, "model_name": self.scope}
        answer: Any = (server or self.server).request("POST", "/overlap_scores", body).json
        return {
            row["worker_id"]: row["device_blocks"]
            for row in answer["workers"]
            if not row["dp_rank"]
        }

    def kill_service(self) -> None:
        """Kill it as the end of a machine would."""
        assert self.server.process is not None
        self.server.process.send_signal(signal.SIGKILL)
        self.server.process.wait()

    def start_service(self) -> None:
        """Start it again, at its old address, and wait until it is ready."""
        self.server.__enter__()
        wait_until_ready(self.server)


def wait_until_ready(server: Server) -> None:
    said: Any = None

    def is_ready() -> bool:
        nonlocal said
        said = server.request("GET", "/ready").json
        return bool(said["ready"]) and not said.get("waiting_for")

    block_until(is_ready, lambda: f"not ready: {said}\n{server.log_tail()}")


@contextlib.contextmanager
def running_engines(folder: Path, configs: Sequence[EngineConfig]) -> Iterator[list[VllmEngine]]:
    """So many engines, worker ids from 1, all up."""
    with contextlib.ExitStack() as stack:
        engines = []
        for number, config in enumerate(configs, 1):
            engine = VllmEngine(
                worker_id=number,
                model=write_model(folder / "models", config.model),
                config=config,
                base=stack.enter_context(free_base(OFFSETS)),
                log_path=folder / f"engine-{number}.log",
            )
            stack.callback(engine.stop)
            engine.start()
            engines.append(engine)
        for engine in engines:
            engine.wait_until_up()
        yield engines


@contextlib.contextmanager
def running_fleet(folder: Path, configs: Sequence[EngineConfig], *flags: str) -> Iterator[Fleet]:
    """Engines, and a service that has them registered."""
    with (
        running_engines(folder, configs) as engines,
        EventLog(_endpoints(engines)) as log,
        Server(folder / "service.log", args=(*OURS_EXTRA, *flags)) as server,
    ):
        fleet = Fleet(folder, engines, server, log)
        fleet.register()
        yield fleet


def _endpoints(engines: Sequence[VllmEngine]) -> Mapping[tuple[int, int], str]:
    """Where each rank publishes."""
    return {
        (engine.worker_id, rank): endpoint
        for engine in engines
        for rank, endpoint in engine.events.items()
    }
