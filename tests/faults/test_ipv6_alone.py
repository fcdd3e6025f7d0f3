"""Without IPv4, on ::1 alone: the service, its replicas, engines, the planner and the demo."""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from select_service.demo.worker import EventPublisher
from tests.faults.namespaces import alone_on_ipv6, enter, why_not
from tests.indexer.encoding import encode_batch
from tests.live.http import Answer, exchange
from tests.live.server import PATIENT
from tests.wait import PATIENCE_S, eventually

pytestmark = [pytest.mark.heavy, pytest.mark.e2e]

LOOPBACK = "::1"
PYTHON = sys.executable
PROFILE = Path(__file__).parents[1] / "golden/planner/profile_a"
WORKER = {"worker_id": 1, "endpoint": "http://[::1]:8000", "block_size": 4}


def inside(scene: Callable[[Path], None], folder: Path) -> None:
    """Play a scene in a namespace whose only address is ::1."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with alone_on_ipv6() as name:
        process = multiprocessing.get_context("spawn").Process(
            target=_play, args=(name, scene, folder)
        )
        process.start()
        process.join(3 * PATIENCE_S)
        process.kill()
        failure = folder / "failure"
        assert process.exitcode == 0, failure.read_text("utf-8") if failure.exists() else "no end"


def _play(name: str, scene: Callable[[Path], None], folder: Path) -> None:
    enter(name)
    with pytest.raises(OSError, match="assign"), socket.create_server(("127.0.0.1", 0)):
        pass
    try:
        scene(folder)
    except BaseException:
        logs = [f"{one.name}:\n{one.read_text('utf-8')[-2000:]}" for one in folder.glob("*.log")]
        (folder / "failure").write_text("\n".join([traceback.format_exc(), *logs]), "utf-8")
        raise


@contextlib.contextmanager
def running(folder: Path, name: str, port: int, *command: object) -> Iterator[None]:
    """A process that answers GET /health at a port of ::1."""
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [str(one) for one in (PYTHON, "-m", *command)], stdout=log, stderr=subprocess.STDOUT
        )
    try:
        eventually(lambda: process.poll() is None and is_healthy(port), True)
        yield
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def is_healthy(port: int) -> bool:
    try:
        return ask(port, "GET", "/health").status == 200
    except OSError:
        return False


def ask(port: int, method: str, path: str, body: object = None) -> Answer:
    return exchange(port, method, path, body, host=LOOPBACK)


def shown(port: int, line: str) -> bool:
    return line in ask(port, "GET", "/metrics").raw.decode()


def batch(number: int) -> bytes:
    """One block of its own."""
    tokens = [4 * number + one for one in range(4)]
    event = {
        "type": "BlockStored",
        "block_hashes": [number],
        "parent_block_hash": None,
        "token_ids": tokens,
        "block_size": 4,
    }
    return encode_batch([event])


def replicas_engines_and_planner(folder: Path) -> None:
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(EventPublisher("tcp://*:5557", "tcp://*:5558"))
        for name, port, own, other in (("a", 8092, 9091, 9191), ("b", 8192, 9191, 9091)):
            command: Any = (
                *("select_service", "--port", port, "--side-port", port + 1),
                *("--replica-sync-port", own, "--replica-sync-peers", f"tcp://[::1]:{other}"),
                *PATIENT,  # the engine answers replays between two slow questions
            )
            stack.enter_context(running(folder, name, port, *command))
            assert ask(port + 1, "GET", "/health").status == 200
            record = WORKER | {
                "kv_events_endpoint": "tcp://[::1]:5557",
                "replay_endpoint": "tcp://[::1]:5558",
            }
            assert ask(port, "POST", "/workers", record).status == 201
        ports = (8092, 8192)
        for port in ports:
            eventually(partial(shown, port, 'replica_peers{state="connected"} 1.0'), True)
        engine.publish(batch(1))
        engine.withhold(batch(2))  # comes by a replay alone
        for port in ports:
            eventually(partial(held, engine, port), 3)
        prompt = {"block_hashes": [1], "sequence_hashes": [1], "isl_tokens": 4}
        booked = ask(
            8092, "POST", "/select_and_reserve", prompt | {"reservation_id": "r", "lease_s": 60}
        )
        assert booked.status == 200, booked.json
        eventually(lambda: shown(8192, 'reservations{model_name="default"'), True)
        eventually(lambda: ask(8192, "DELETE", "/reservations/r").status, 200)
        planner = (
            *("select_service.planner", "run", "--connector", "virtual", "--model-name", "default"),
            *("--profile-results-dir", PROFILE, "--metrics-source", "selector"),
            *("--selector", "http://[::1]:8092", "--selector", "http://[::1]:8192"),
            *("--adjustment-interval", "2", "--load-interval", "1", "--state-dir", folder),
        )
        stack.enter_context(running(folder, "planner", 9085, *planner))
        eventually(lambda: ask(9085, "GET", "/ready").status, 200)
        doctor = subprocess.run(
            [PYTHON, "-m", "select_service", "doctor", "--url", "http://[::1]:8092", "--probe"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert "[::1]:8092: ready" in doctor.stdout, doctor.stdout + doctor.stderr


def held(engine: EventPublisher, port: int) -> int:
    """Publish and answer replays; the blocks that a service knows of."""
    engine.publish(batch(3))
    engine.serve_replay()
    dump: Any = ask(port, "GET", "/dump").json
    return sum(len(scope["events"]) for scope in dump.values())


def demonstration(folder: Path) -> None:
    ended = subprocess.run(
        [PYTHON, "-m", "select_service", "demo", "--plain", "--requests", "40", "--rate", "40"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("scene", [replicas_engines_and_planner, demonstration])
def test_nothing_needs_ipv4(scene: Callable[[Path], None], tmp_path: Path) -> None:
    inside(scene, tmp_path)
