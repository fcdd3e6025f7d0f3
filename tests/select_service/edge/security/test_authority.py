"""Tokens in force: reloading, expiry, what is remembered of them, and where they never appear."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

from select_service.edge.driver.driver import Driver
from select_service.edge.security.authority import Authority, certificate_names
from select_service.errors import TokenFileUnusable
from tests.select_service.edge.security.credentials_made import TokenFile
from tests.select_service.edge.serving import (
    PROMPT,
    Wire,
    add_worker,
    app_client,
    listening,
)


@pytest.fixture
def file(tmp_path: Path) -> TokenFile:
    file = TokenFile(tmp_path / "tokens")
    file.add("gateway", "select", "lifecycle")
    file.add("ops", "admin")
    return file


def authority_of(service: Driver) -> Authority:
    assert service.security is not None
    assert service.security.authority is not None
    return service.security.authority


@pytest.fixture
def brief(tmp_path: Path) -> TokenFile:
    file = TokenFile(tmp_path / "tokens")
    file.add("brief", "select", expires="2030-01-01T00:00:00Z")
    return file


def wall_clock(service: Driver, left_s: float) -> tuple[Authority, list[float]]:
    """Seat a worker, and set the clock so long before the brief token ends."""
    add_worker(service)
    authority = authority_of(service)
    now = [1893456000.0 - left_s]
    authority._wall = lambda: now[0]
    authority.adopt(authority.prepare())
    return authority, now


async def selects(wire: Wire, line: str) -> int:
    return await wire.status("POST", "/select", PROMPT, line)


async def test_a_token_taken_away_is_refused_on_the_connection_it_is_used_on(
    file: TokenFile,
) -> None:
    async with listening(**file.setting) as (port, service, _):
        add_worker(service)
        wire = await Wire.to(port)
        gateway = file.line("gateway")
        assert [await selects(wire, gateway) for _ in range(3)] == [200] * 3
        file.drop("gateway")
        assert await selects(wire, gateway) == 200, "the file counts when it is read again"
        authority = authority_of(service)
        authority.adopt(authority.prepare())
        assert [await selects(wire, gateway) for _ in range(2)] == [401] * 2
        assert await selects(wire, file.line("ops")) == 200
        assert authority.reloads == {"done": 1, "refused": 0}
        assert authority.refused["unknown"] == 2


async def test_a_bad_file_changes_nothing_and_says_why(file: TokenFile) -> None:
    async with app_client(**file.setting) as (client, service):
        add_worker(service)
        authority = authority_of(service)
        file.path.write_text("nonsense " + file.tokens["ops"])
        with pytest.raises(TokenFileUnusable, match="line 1") as caught:
            authority.prepare()
        authority.reject()
        assert file.tokens["ops"] not in str(caught.value)
        answer = await client.post("/select", json=PROMPT, headers=file.header("gateway"))
        assert answer.status_code == 200
        metrics = (await client.get("/metrics", headers=file.header("ops"))).text
        assert 'select_service_auth_reloads_total{outcome="refused"} 1.0' in metrics
        file.write()
        authority.adopt(authority.prepare())
        assert authority.reloads == {"done": 1, "refused": 1}


async def test_an_expired_token_is_refused_although_it_is_remembered(brief: TokenFile) -> None:
    async with listening(**brief.setting) as (port, service, _):
        authority, now = wall_clock(service, left_s=1)
        wire = await Wire.to(port)
        assert [await selects(wire, brief.line("brief")) for _ in range(2)] == [200, 200]
        authority.tick()
        assert await selects(wire, brief.line("brief")) == 200
        now[0] += 1
        authority.tick()
        status, headers, body = await wire.exchange("POST", "/select", PROMPT, brief.line("brief"))
        assert (status, json.loads(body)["error"]) == (401, "the token has expired")
        assert headers["www-authenticate"] == 'Bearer error="invalid_token"'
        assert authority.refused["expired"] == 1


async def test_a_token_neither_ends_early_nor_lives_on_when_the_clock_is_set(
    brief: TokenFile,
) -> None:
    async with listening(**brief.setting) as (port, service, _):
        authority, now = wall_clock(service, left_s=10)
        wire = await Wire.to(port)
        for step, status in ((0, 200), (86_400, 401), (-86_400, 200), (5, 200), (10, 401)):
            now[0] += step
            authority.tick()
            answers = [await selects(wire, brief.line("brief")) for _ in range(2)]
            assert answers == [status, status], "the second time it is remembered"


async def test_the_server_lets_go_of_what_expires(brief: TokenFile) -> None:
    async with listening(**brief.setting) as (port, service, _):
        _, now = wall_clock(service, left_s=1)
        wire = await Wire.to(port)
        assert await selects(wire, brief.line("brief")) == 200
        now[0] += 2
        while await selects(wire, brief.line("brief")) == 200:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "lines",
    [
        ["authorization: Basic {token}"],
        ["authorization: {token}"],
        ["authorization: Bearer"],
        ["authorization: Bearer {token} {token}"],
        ["authorization: Bearer {token}x"],
        ["authorization: Bearer {token}", "authorization: Bearer {token}"],
        ["authorization: Bearer {token}", "authorization: Bearer nonsense"],
        ["proxy-authorization: Bearer {token}"],
        ["cookie: token={token}"],
        ["authorization: Bearer {token},"],
    ],
)
async def test_other_ways_to_show_a_token(file: TokenFile, lines: list[str]) -> None:
    async with listening(**file.setting) as (port, service, _):
        add_worker(service)
        wire = await Wire.to(port)
        for _ in range(2):
            shown = [line.format(token=file.tokens["gateway"]) for line in lines]
            assert await wire.status("POST", "/select", PROMPT, *shown) == 401


@pytest.mark.parametrize("word", ["Bearer", "bearer", "BEARER"])
async def test_the_scheme_has_no_case(file: TokenFile, word: str) -> None:
    async with app_client(**file.setting) as (client, service):
        add_worker(service)
        line = {"Authorization": f"{word} {file.tokens['gateway']}"}
        assert (await client.post("/select", json=PROMPT, headers=line)).status_code == 200


async def test_what_one_may_do_is_not_remembered_for_another(file: TokenFile) -> None:
    """The same request line and body under another token, or none, on one connection."""
    async with listening(**file.setting) as (port, service, _):
        add_worker(service)
        wire = await Wire.to(port)
        for _ in range(3):
            assert (
                await wire.status("PUT", "/admission", {"policy": "always-admit"}, file.line("ops"))
                == 200
            )
            assert (
                await wire.status(
                    "PUT", "/admission", {"policy": "always-admit"}, file.line("gateway")
                )
                == 403
            )
            assert await wire.status("PUT", "/admission", {"policy": "always-admit"}) == 401


async def test_strangers_push_nobody_out_of_memory(file: TokenFile) -> None:
    async with listening(**file.setting) as (port, service, server):
        add_worker(service)
        wire = await Wire.to(port)
        assert await selects(wire, file.line("gateway")) == 200
        lane: Any = server.config.http_protocol_class
        before = dict(lane.heads.known)
        assert len(before) == 1
        for number in range(5):
            assert await wire.status("GET", "/health", None, f"x-{number}: 1") == 200
            assert await selects(wire, f"authorization: Bearer {number:043}") == 401
        assert lane.heads.known == before


async def test_a_refusal_comes_before_the_body_is_read(file: TokenFile) -> None:
    async with listening(**file.setting) as (port, _, _):
        wire = await Wire.to(port)
        wire.say(
            b"POST /select HTTP/1.1\r\nhost: s\r\ncontent-type: application/json\r\n"
            b"expect: 100-continue\r\ncontent-length: 100\r\n\r\n"
        )
        status, headers, _ = await wire.answer()
        assert (status, headers["connection"]) == (401, "close")


async def test_tokens_are_shown_nowhere(
    file: TokenFile, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Everything that speaks, after everything that hears a token."""
    caplog.set_level(logging.DEBUG)
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logging.getLogger().addHandler(handler)
    stray = "sst_" + "z" * 43
    try:
        async with listening(**file.setting, access_log=True, log_level="debug") as (
            port,
            service,
            _,
        ):
            add_worker(service)
            wire = await Wire.to(port)
            seen = bytearray()
            for line in (file.line("ops"), f"authorization: Bearer {stray}", file.line("gateway")):
                for method, path, body in (
                    ("POST", "/select", PROMPT),
                    ("POST", "/select_and_reserve", PROMPT),
                    ("POST", "/select", {"token_ids": "nonsense"}),
                    ("GET", "/nowhere", None),
                    ("PUT", "/admission", {"policy": "none of them"}),
                    ("DELETE", "/reservations/none", None),
                    ("GET", "/metrics", None),
                    ("GET", "/openapi.json", None),
                    ("GET", "/workers", None),
                    ("GET", "/ready", None),
                    ("GET", "/loads", None),
                ):
                    status, headers, content = await wire.exchange(method, path, body, line)
                    seen += f"{status} {headers}".encode() + content
            # a crash of a handler logs all it knows
            service.core.queries.load_scopes = None  # type: ignore[assignment]
            assert await wire.status("GET", "/loads", None, file.line("ops")) == 500
            wire.ask("GET", "/dump", None, file.line("ops"), "connection: close")
            seen += await wire.rest()
            authority = authority_of(service)
            file.path.write_text(file.tokens["ops"])
            with pytest.raises(TokenFileUnusable) as caught:
                authority.prepare()
            written = [
                seen.decode(), str(caught.value), caplog.text, stream.getvalue(),
                *capsys.readouterr(), repr(authority.__dict__), repr(list(authority.book)),
                repr(service.__dict__),
            ]  # fmt: skip
            for secret in (*file.tokens.values(), stray):
                for text in written:
                    assert secret not in text
    finally:
        logging.getLogger().removeHandler(handler)


def test_names_in_a_certificate() -> None:
    shown = {
        "subject": ((("countryName", "XX"),), (("commonName", "ops"),)),
        "subjectAltName": (("DNS", "a.example"), ("URI", "spiffe://x/y"), ("IP Address", "::1")),
    }
    assert certificate_names(shown) == ("a.example", "spiffe://x/y")
    assert certificate_names({"subject": shown["subject"]}) == ("ops",)
    assert certificate_names({}) == ()
    assert certificate_names(None) == ()


async def test_refusals_look_like_all_others(file: TokenFile) -> None:
    async with app_client(**file.setting) as (client, _):
        answer = await client.post("/select", json=PROMPT)
        assert answer.json() == {
            "error": "a token is needed: Authorization: Bearer <token>",
            "code": "unauthenticated",
            "details": {"reason": "missing"},
        }
        packed = await client.post(
            "/select", json=PROMPT, headers={"accept": "application/msgpack"}
        )
        assert msgspec.msgpack.decode(packed.content) == answer.json()
        answer = await client.get("/workers", headers=file.header("gateway"))
        assert (answer.status_code, answer.json()["details"]) == (403, {"scope": "read"})
