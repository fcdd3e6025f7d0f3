"""Settings of a running process: its file read again on SIGHUP, requests that outlive it."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.live.server import OURS_EXTRA, Server
from tests.wait import block_until

pytestmark = pytest.mark.e2e


def setting(server: Server, name: str) -> dict[str, Any]:
    status: Any = server.request("GET", "/config").json
    found: dict[str, Any] = status["settings"][name]
    return found


def hang_up(server: Server) -> None:
    assert server.process is not None
    server.process.send_signal(signal.SIGHUP)


def wait_for(server: Server, name: str, value: object) -> None:
    block_until(lambda: setting(server, name)["value"] == value, server.log_tail)


def test_a_life_of_settings(tmp_path: Path) -> None:
    file, state = tmp_path / "config.yaml", tmp_path / "state"
    file.write_text("max-body-bytes: 1000\nworkers-max: 3\n")
    args = (*OURS_EXTRA, "--config", str(file), "--state-dir", str(state), "--leases-max", "9")
    with Server(tmp_path / "one.log", args=args) as server:
        assert setting(server, "max_body_bytes")["source"] == "file"
        assert setting(server, "leases_max")["source"] == "flag"
        file.write_text("max-body-bytes: 2000\nworkers-max: nonsense\n")
        hang_up(server)
        block_until(lambda: "everything stays as it is" in server.log_tail())
        assert setting(server, "max_body_bytes")["value"] == 1000
        file.write_text("max-body-bytes: 2000\nworkers-max: 3\n")
        hang_up(server)
        wait_for(server, "max_body_bytes", 2000)
        answer = server.request("POST", "/select", {"token_ids": [1], "long": "x" * 2000})
        assert answer.status == 413
        answer = server.request("PUT", "/config", {"settings": {"leases_max": 4}})
        assert answer.status == 200
    with Server(tmp_path / "two.log", args=args) as server:
        assert setting(server, "leases_max")["value"] == 4
        assert setting(server, "leases_max")["source"] == "put"
        assert setting(server, "max_body_bytes")["value"] == 2000
