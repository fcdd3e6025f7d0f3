"""A real process records its life over HTTP, ZMQ and between replicas; a replay decides the same.

Also when it is killed, and never with a token in it.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from select_service.core.recording.items import FRAME, OPENING, Decided, Events, ReservationStep
from select_service.simulator.recording_replay import replay
from select_service.simulator.recordings import files_of, play
from tests.e2e.stage import BLOCK_SIZE, Stage
from tests.live.engine import FakeEngine
from tests.live.ports import HOST, free_port
from tests.live.server import OURS_EXTRA, Server
from tests.wait import PATIENCE_S, block_until

pytestmark = pytest.mark.e2e

SECRET = 1_234_567_891
"""A token nobody else says."""

FEW = {"DYN_ROUTER_QUEUE_THRESHOLD": "1.0"}


def decided(path: Path) -> list[Decided]:
    return [one.item for one in play(files_of(path)) if isinstance(one.item, Decided)]


@contextmanager
def fleet(stage: Stage, tenant: str, count: int) -> Iterator[list[FakeEngine]]:
    with ExitStack() as stack:
        engines = [stack.enter_context(FakeEngine(free_port())) for _ in range(count)]
        for number, engine in enumerate(engines, 1):
            stage.register(number, tenant, {0: engine.endpoint})
        yield engines


def store(engine: FakeEngine, seq: int, tokens: list[int], salt: int) -> None:
    """Tell that the engine holds these, with their tokens, as vLLM does."""
    blocks = len(tokens) // BLOCK_SIZE
    names = [(salt << 32) + (tokens[0] << 8) + at for at in range(blocks)]
    engine.publish(
        seq, [time.time(), [["BlockStored", names, None, tokens, BLOCK_SIZE, None]], None]
    )


class Caller(threading.Thread):
    """One client with ids of its own, until it has asked so often or the service is gone."""

    def __init__(self, port: int, tenant: str, number: int, requests: int) -> None:
        super().__init__()
        self.rng = random.Random(number)
        self.port = port
        self.tenant = tenant
        self.number = number
        self.requests = requests
        self.answers: dict[str, tuple[int, int]] = {}
        self.live: list[str] = []
        self.acknowledged = 0

    def run(self) -> None:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=PATIENCE_S)
        try:
            for count in range(self.requests):
                self.step(connection, count)
        except (OSError, http.client.HTTPException):
            pass  # killed
        finally:
            connection.close()

    def ask(self, connection: http.client.HTTPConnection, method: str, path: str, body: Any) -> Any:
        connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        return answer.status, json.loads(text) if text else None

    def prompt(self) -> dict[str, Any]:
        shared = self.rng.randrange(4)
        length = self.rng.randint(1, 20) * BLOCK_SIZE
        tokens = [SECRET, *range(shared * 1000, shared * 1000 + length)]
        return {"token_ids": tokens, "tenant_id": self.tenant}

    def step(self, connection: http.client.HTTPConnection, count: int) -> None:
        rng, name = self.rng, f"c{self.number}-{count}"
        kind = rng.random()
        if kind < 0.1:
            batch = [{**self.prompt(), "reservation_id": name, "n": 5}]
            status, answer = self.ask(
                connection, "POST", "/select_batch", {"requests": batch, "reserve": True}
            )
            assert status == 200, answer
            placed = [one["selection"] for one in answer["results"] if "selection" in one]
            self.live += [one["reservation_id"] for one in placed]
        elif kind < 0.2:
            override = {"router_temperature": 0.8, "overlap_score_credit": 0.4}
            body = {**self.prompt(), "selection_id": name, "router_config_override": override}
            status, answer = self.ask(connection, "POST", "/select", body)
            assert status == 200, answer
            self.answers[name] = answer["worker_id"], answer["dp_rank"]
        elif kind < 0.7 or not self.live:
            body = {**self.prompt(), "reservation_id": name, "selection_id": name}
            status, answer = self.ask(connection, "POST", "/select_and_reserve", body)
            if status == 200:
                self.answers[name] = answer["worker_id"], answer["dp_rank"]
                self.live.append(name)
        else:
            known = self.live.pop(rng.randrange(len(self.live)))
            path = f"/reservations/{known}"
            self.ask(connection, "POST", f"{path}/prefill_complete", {})
            self.ask(connection, "POST", f"{path}/output_block", {})
            self.ask(connection, "DELETE", path, None)
        self.acknowledged += 1


def traffic(port: int, tenant: str, requests: int) -> list[Caller]:
    callers = [Caller(port, tenant, number, requests) for number in range(3)]
    for one in callers:
        one.start()
    return callers


def raw_bytes(path: Path) -> bytes:
    data = path.read_bytes()
    at, raw = len(OPENING), b""
    while at < len(data):
        size, _ = FRAME.unpack_from(data, at)
        raw += zlib.decompress(data[at + FRAME.size : at + FRAME.size + size])
        at += FRAME.size + size
    return raw


@pytest.mark.parametrize("policy", ["kv-cost", "first-token"])
def test_a_process_and_its_replica_record_what_they_decide(tmp_path: Path, policy: str) -> None:
    paths = [tmp_path / "first", tmp_path / "second"]
    sync = [free_port(), free_port()]
    servers = [
        Server(
            tmp_path / f"{path.name}.log",
            args=(
                *(*OURS_EXTRA, "--record", str(path), "--replica-sync-port", str(mine)),
                *("--replica-sync-peers", f"tcp://{HOST}:{other}", "--record-bytes-max", "65536"),
                *("--policy", policy),
            ),
            env=FEW,
        )
        for path, mine, other in zip(paths, sync, reversed(sync), strict=True)
    ]
    with servers[0] as one, servers[1] as other:
        stages = Stage(one), Stage(other)
        with fleet(stages[0], "t", 3) as engines:
            for number, engine in enumerate(engines, 1):
                stages[1].register(number, "t", {0: engine.endpoint})
                engine.wait_for_subscribers(2)
                prompts = [
                    [SECRET, *range(at, at + 16 * number * 4 - 1)] for at in (0, 1000, 2000, 3000)
                ]
                for seq, tokens in enumerate(prompts):
                    store(engine, seq, tokens, number)
                held = {(number, 0): [number * 4] * 3}  # else the traffic may be over before
                stages[0].wait_for_rows("t", [({"token_ids": prompts[-1]}, held)])
            callers = [*traffic(one.port, "t", 80), *traffic(other.port, "u", 0)]
            for caller in callers:
                caller.join()
            metrics = one.request("GET", "/metrics").raw.decode()
        assert one.stop() == other.stop() == 0
    result = replay(files_of(paths[0]))
    assert result.first_difference is None
    assert result.reproduced == result.decisions
    assert not result.missing
    assert result.batches > 0
    assert result.events["stored"] >= 12
    assert "select_service_recording_refused 0.0" in metrics
    answers = {name: where for caller in callers for name, where in caller.answers.items()}
    assert len(answers) > 100
    found = {}
    for played in play(files_of(paths[0])):
        item = played.item
        if isinstance(item, Decided) and item.selection_id in answers:
            workers = played.recorded_file.fleet(item.scope).workers.values()
            sits = {
                slot: (seat.spec.worker_id, rank) for seat in workers for rank, slot in seat.slots
            }
            found[item.selection_id] = sits[item.slot]
    assert found == answers
    second = [played.item for played in play(files_of(paths[1]))]
    assert any(isinstance(item, ReservationStep) and item.what == "learnt" for item in second)
    assert any(isinstance(item, Events) and item.events for item in second)
    raw = b"".join(map(raw_bytes, [*files_of(paths[0]), *files_of(paths[1])]))
    for form in ("<I", ">I", "<q"):
        assert struct.pack(form, SECRET) not in raw
    what_if = replay(files_of(paths[0]), {"overlap_score_credit": 0.0}).what_if
    assert what_if is not None
    assert what_if.changed > 0


def test_what_was_on_disk_when_the_process_was_killed_is_there(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    bounds = "--record", str(path), "--record-flush-s", "0.05"
    with Server(tmp_path / "log", args=(*OURS_EXTRA, *bounds)) as server:
        stage = Stage(server)
        with fleet(stage, "t", 2):
            callers = traffic(server.port, "t", 100_000)
            block_until(lambda: len(decided(path)) >= 100)
            assert server.process is not None
            os.kill(server.process.pid, signal.SIGKILL)
            for caller in callers:
                caller.join()
        server.process.wait()
    result = replay(files_of(path))
    assert result.reproduced == result.decisions >= 100
    with Server(tmp_path / "log", args=(*OURS_EXTRA, *bounds)) as server:
        assert server.stop() == 0
    assert [one.name for one in files_of(path)] == ["recording.000001", "recording"]
    assert replay(files_of(path)).decisions == result.decisions


def test_a_file_that_cannot_be_had_ends_the_start(tmp_path: Path) -> None:
    nobody = tmp_path / "data"
    nobody.write_text("important")
    server = Server(tmp_path / "log", args=(*OURS_EXTRA, "--record", str(nobody)))
    with pytest.raises(RuntimeError, match=r"(?s)ended with 1 .*is no recording"), server:
        pass
    assert nobody.read_text() == "important"
