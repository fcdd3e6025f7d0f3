"""What people type: `select-service workers` and so on, of a running service."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator

import pytest

from select_service.cli import _CLIENT_COMMANDS, main
from select_service.client import Client
from select_service.client.cli import COMMANDS
from tests.e2e.test_client import spec, url
from tests.live.server import Server

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("commands")
    with Server(folder / "log") as running:
        with Client(url(running)) as client:
            client.upsert_worker(spec(1, taints=["a"]))
            client.upsert_worker(spec(2, data_parallel_size=2))
        yield running


class Terminal:
    """Where commands are typed."""

    def __init__(
        self, capture: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self._capture = capture
        self._patch = monkeypatch

    def __call__(self, *words: str, stdin: str = "") -> tuple[int, str, str]:
        """Type a command; its exit code, and what it prints."""
        self._patch.setattr("sys.stdin", io.StringIO(stdin))
        try:
            code = main(words)
        except SystemExit as end:
            code = int(end.code or 0)
        told = self._capture.readouterr()
        return code, told.out, told.err


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Terminal:
    return Terminal(capsys, monkeypatch)


def test_the_names_are_known_without_loading_anything() -> None:
    assert _CLIENT_COMMANDS == COMMANDS


def test_a_session(server: Server, ask: Terminal) -> None:
    at = ("--url", url(server))
    code, out, err = ask("workers", *at)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split()[:4] == ["WORKER", "MODEL", "TENANT", "STATE"]
    assert "incomplete" in lines[2]
    assert "kv_events endpoint is required for dp_rank 1" in lines[2]

    code, out, _ = ask("call", "reserve", '{"reservation_id": "r"}', "--tokens", "0-31,7", *at)
    booked = json.loads(out)
    assert (code, booked["worker_id"], booked["isl_tokens"]) == (0, 1, 33)

    code, out, _ = ask("loads", *at)
    assert (code, out.splitlines()[1].split()) == (
        *(0, ["default", "default", "1", "0", "1", "33", "2"]),
    )
    code, out, _ = ask("loads", "--json", *at)
    assert (code, json.loads(out)[0]["loads"][0]["active_requests"]) == (0, 1)

    code, out, _ = ask("explain", "r", *at)
    assert (code, out.splitlines()[0]) == (0, "r: placed on select_and_reserve")
    assert out.splitlines()[2].split()[:2] == ["1", "0"]
    code, out, _ = ask("explain", *at)
    assert out.splitlines()[1].split()[0] == "r"

    code, _, err = ask("call", "select", "-", *at, stdin='{"token_ids": [1], "tenant_id": "x"}')
    assert (code, json.loads(err)["code"]) == (1, "no_schedulable_worker")
    code, out, _ = ask("call", "/leases", *at)
    assert (code, json.loads(out)["total"]) == (0, 0)
    code, out, _ = ask("call", "/reservations/r", "--method", "DELETE", *at)
    assert (code, json.loads(out)) == (0, {"status": "ok"})


def test_a_worker_is_drained(server: Server, ask: Terminal) -> None:
    at = ("--url", url(server))
    code, out, _ = ask("drain", "1", "--reason", "upgrade", *at)
    told = json.loads(out)
    assert (code, told["drains"], told["reason"]) == (0, True, "upgrade")
    assert "draining" in ask("workers", *at)[1]
    assert json.loads(ask("drain", "1", "--status", *at)[1])["safe_to_terminate"]
    assert json.loads(ask("drain", "1", "--undo", *at)[1])["drains"] is False
    code, _, err = ask("drain", "9", *at)
    assert (code, json.loads(err)["code"]) == (1, "worker_not_found")


def test_nobody_there(ask: Terminal) -> None:
    code, _, err = ask("workers", "--url", "http://127.0.0.1:1")
    assert code == 2
    assert err.startswith("select-service workers: http://127.0.0.1:1: ConnectError")
    assert ask("call", "nonsense")[0] == 2
