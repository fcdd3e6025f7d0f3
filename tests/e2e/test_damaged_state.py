"""A state directory damaged while its process was down: the next one says so, and serves the rest.

The process is killed first, so that the log holds what was acknowledged. The kill alone is no
damage.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from select_service.edge.state import wal
from select_service.edge.state.rows import FILE
from select_service.edge.state.store import PAGE, WAL
from tests.harms import Harm, cut, flipped, with_one_more, without
from tests.live.server import OURS_EXTRA, Server

pytestmark = pytest.mark.e2e

FRAME = wal.FRAME.size + PAGE
NAMES = [f"r{number}" for number in range(12)]
NO_EVENTS = {"DYN_USE_KV_EVENTS": "false"}


def body_of(name: str) -> dict[str, object]:
    return {"reservation_id": name, "worker_id": 1, "token_ids": [1] * 16}


def service(directory: Path) -> Server:
    args = (*OURS_EXTRA, "--reservation-ttl-s", "0", "--state-dir", str(directory))
    return Server(directory.with_name(f"{directory.name}.log"), args=args, env=NO_EVENTS)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a killed process that had acknowledged a worker and reservations."""
    directory = tmp_path_factory.mktemp("damaged") / "killed"
    with service(directory) as server:
        spec = {"worker_id": 1, "endpoint": "http://w", "block_size": 16}
        assert server.request("POST", "/workers", spec).status == 201
        for name in NAMES:
            assert server.request("POST", "/reservations", body_of(name)).status == 201
        assert server.process is not None
        server.process.kill()
        server.process.wait()
    return directory


def last_frame(log: bytes) -> int:
    """The start of the last frame in use; the log is longer, as it has its full size at once."""
    starts = range(wal.HEADER.size, len(log) - FRAME + 1, FRAME)
    return max(at for at in starts if log[at + 8 : at + 16] == log[16:24])


def kept_by(server: Server) -> list[bool]:
    """Whether each reservation is known, in the order of their booking; they are ended."""
    statuses = [server.request("DELETE", f"/reservations/{name}").status for name in NAMES]
    assert set(statuses) <= {200, 404}
    return [status == 200 for status in statuses]


def gauge(server: Server, name: str) -> float:
    for line in server.request("GET", "/metrics").raw.decode().splitlines():
        if line.startswith(f"select_service_{name} "):
            return float(line.split()[1])
    raise AssertionError(f"{name} is not there")


def state_of(server: Server) -> dict[str, Any]:
    ready: Any = server.request("GET", "/ready").json
    state: dict[str, Any] = ready["state"]
    return state


def test_a_kill_alone_is_no_damage(killed: Path) -> None:
    directory = killed.with_name("sound")
    shutil.copytree(killed, directory)
    with service(directory) as server:
        assert gauge(server, "state_damage") == 0.0
        assert state_of(server)["damage"] == []
        assert "damage" not in server.log_path.read_text("utf-8")
        assert server.fleet_load()[0] == len(NAMES)
        assert all(kept_by(server))
    assert not list(directory.glob("*.corrupt"))


@pytest.mark.parametrize(
    ("name", "harm", "before_the_last_frame"),
    [
        ("cut-between-frames", cut, 0),
        ("cut-within-a-frame", cut, FRAME // 2),
        ("removed", without, 100),
        ("inserted", with_one_more, 100),
        ("flipped", flipped, 100),
    ],
)
def test_damage_is_said_everywhere_and_the_rest_is_served(
    killed: Path, name: str, harm: Harm, before_the_last_frame: int
) -> None:
    directory = killed.with_name(name)
    shutil.copytree(killed, directory)
    log = (directory / WAL).read_bytes()
    (directory / WAL).write_bytes(harm(log, last_frame(log) - before_the_last_frame))
    with service(directory) as server:
        state = state_of(server)
        assert state["damage"]
        assert gauge(server, "state_damage") == len(state["damage"])
        text = server.log_path.read_text("utf-8")
        assert all(one in text for one in state["damage"])
        known: Any = server.request("GET", "/workers").json
        assert [one["worker_id"] for one in known] == [1]
        carried = server.fleet_load()[0]
        assert 0 < carried < len(NAMES), "the log goes on for some frames before the damage"
        kept = kept_by(server)
        assert kept == sorted(kept, reverse=True), "those before the damage, and none after it"
        assert sum(kept) == carried
        assert server.request("POST", "/reservations", body_of("new")).status == 201
        assert server.stop() == 0
    assert (directory / f"{FILE}.corrupt").exists()
    with service(directory) as server:
        assert state_of(server)["damage"] == [], "it is reported once"
        assert server.fleet_load()[0] == 1
