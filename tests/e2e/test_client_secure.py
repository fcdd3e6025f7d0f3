"""The client behind TLS, tokens and client certificates: what it may, and may not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from select_service.client import AsyncClient, Client, Options, ServiceError, Unreachable
from select_service.client import cli as commands
from select_service.errors import MissingScope, Unauthenticated
from tests.select_service.edge.security.credentials_made import Authority, TokenFile
from tests.select_service.edge.serving import add_worker, on_a_port

pytestmark = pytest.mark.e2e


def test_a_file_that_cannot_be_used_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ca, missing = Authority(tmp_path), str(tmp_path / "missing.pem")
    url = "https://localhost:9"
    with pytest.raises(ValueError, match=f"cannot use {missing}: No such file"):
        AsyncClient(url, ca=missing)
    with pytest.raises(ValueError, match=f"cannot use {ca.cert}, {missing}, k: No such file"):
        Client(url, ca=str(ca.cert), cert=(missing, "k"))
    Path(missing).write_text("no certificate")
    assert commands.main(["workers", "--url", url, "--ca", missing]) == 2
    assert missing in capsys.readouterr().err


def test_tokens_and_certificates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ca, tokens = Authority(tmp_path), TokenFile(tmp_path / "tokens")
    cert, key = ca.issue("server")
    mine = ca.issue("gateway")
    tokens.add("all", "catalog", "select", "lifecycle", "read")
    tokens.add("gateway", "select", "lifecycle")
    (tmp_path / "mine").write_text(tokens.tokens["all"] + "\n")

    async def use(port: int, service: Any, _: object) -> None:
        add_worker(service)
        url = f"https://localhost:{port}"
        known: dict[str, Any] = {"ca": str(ca.cert), "cert": tuple(map(str, mine))}
        async with AsyncClient(url, token=tokens.tokens["gateway"], **known) as client:
            async with client.reserve(token_ids=list(range(32))) as r:
                r.output_tokens(16)
                await client.flush()
                assert service.loads()[0].loads[0].active_requests == 1
            with pytest.raises(MissingScope) as refused:
                await client.workers()
            assert refused.value.details == {"scope": "read"}
            assert (await client.ready()).ready
        shown = iter(["nobody-knows-this-one-at-all", tokens.tokens["all"], tokens.tokens["all"]])
        fresh = Options(degraded=False)
        async with AsyncClient(url, token=lambda: next(shown), options=fresh, **known) as client:
            with pytest.raises(Unauthenticated) as stranger:
                await client.workers()
            assert stranger.value.details == {"reason": "unknown"}
            assert len(await client.workers()) == 1
        for half in ({"cert": known["cert"]}, {"ca": known["ca"]}):
            quick = Options(degraded=False, rounds_max=1, attempts_max=1)
            async with AsyncClient(url, options=quick, **half) as client:
                with pytest.raises((Unreachable, ServiceError)):
                    await client.workers()
        flags = ("--url", url, "--ca", known["ca"], "--cert", str(mine[0]), "--key", str(mine[1]))
        command = ["workers", *flags, "--token-file", str(tmp_path / "mine")]
        assert await asyncio.to_thread(commands.main, command) == 0
        assert "schedulable" in capsys.readouterr().out
        assert await asyncio.to_thread(commands.main, ["workers", *flags]) == 1
        assert "--token-file FILE" in capsys.readouterr().err

    on_a_port(
        use,
        tls_cert=str(cert),
        tls_key=str(key),
        tls_client_ca=str(ca.cert),
        token_file=str(tokens.path),
    )
