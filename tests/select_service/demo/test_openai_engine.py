"""An engine that is started by hand says what it needs."""

from __future__ import annotations

import socket
from typing import NoReturn

import pytest
import uvicorn

from select_service.client import AsyncClient, Client
from select_service.demo import openai_engine
from select_service.errors import Unauthenticated
from select_service.types import WorkerSpec


def test_without_a_service_it_says_how_to_start_one(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:  # and nobody listens on it
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(SystemExit) as ended:
            openai_engine.main(["--service", url])
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert url in said
    assert said.endswith("Start the service first (make run), or name it with --service.\n")


def test_an_engine_without_a_port_of_its_own_is_not_registered(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests would reach the engine that listens there."""
    registered: list[object] = []

    async def note(_: AsyncClient, spec: object) -> None:
        registered.append(spec)

    monkeypatch.setattr(AsyncClient, "upsert_worker", note)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with pytest.raises(SystemExit) as ended:
            openai_engine.main(["--port", port, "--service", "http://127.0.0.1:1"])
    assert (ended.value.code, registered) == (1, [])
    assert f"cannot listen on 127.0.0.1 port {port}" in capsys.readouterr().err


def test_an_engine_that_ends_leaves_the_catalog(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    async def register(_: AsyncClient, spec: WorkerSpec) -> None:
        calls.append(f"+{spec.worker_id}")

    def remove(_: Client, worker_id: int) -> None:
        calls.append(f"-{worker_id}")

    async def serve(_: uvicorn.Server, sockets: list[socket.socket]) -> None:
        assert sockets
        raise KeyboardInterrupt

    monkeypatch.setattr(AsyncClient, "upsert_worker", register)
    monkeypatch.setattr(Client, "delete_worker", remove)
    monkeypatch.setattr(uvicorn.Server, "serve", serve)
    with pytest.raises(SystemExit) as ended:
        openai_engine.main(["--port", "0", "--worker-id", "3"])
    assert (ended.value.code, calls) == (130, ["+3", "-3"])
    assert "is worker 3 of" in capsys.readouterr().err


def test_what_a_service_refuses_is_said_without_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object) -> NoReturn:
        raise Unauthenticated("missing")

    monkeypatch.setattr(AsyncClient, "upsert_worker", refuse)
    with pytest.raises(SystemExit) as ended:
        openai_engine.main(["--service", "http://127.0.0.1:1"])
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith("a token is needed: ")
    assert said.endswith("it is for services without tokens.\n")
