"""An engine that is started by hand says what it needs."""

from __future__ import annotations

import socket
from typing import NoReturn

import pytest

from select_service.client import AsyncClient
from select_service.demo import openai_engine
from select_service.errors import Unauthenticated


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
