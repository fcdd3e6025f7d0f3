"""/ready?for=traffic: whether requests may come here, whoever serves them; the probes ask it."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import httpx
import pytest

from select_service.edge.driver.driver import Driver
from tests.coroutines import within
from tests.live.ports import HOST, free_port
from tests.live.server import Server
from tests.select_service.edge.security.credentials_made import TokenFile
from tests.select_service.edge.serving import PROMPT, Wire, add_worker, app_client, listening
from tests.wait import PATIENCE_S, eventually

ASKED = "/ready?for=traffic"
READY = {"ready": True, "waiting_for": []}


@within(app_client)
async def test_a_fleet_at_zero_may_be_asked(client: httpx.AsyncClient, service: Driver) -> None:
    assert (await client.get("/ready")).status_code == 503
    answer = await client.get(ASKED)
    assert (answer.status_code, answer.json()) == (200, READY)
    add_worker(service)
    assert (await client.get(ASKED)).json() == READY, "no records: it is asked every second"
    assert (await client.get("/ready")).json()["schedulable_workers"] == 1


@within(app_client)
async def test_it_waits_for_recoveries_and_for_nothing_once_it_leaves(
    client: httpx.AsyncClient, service: Driver
) -> None:
    add_worker(service)
    is_there = False
    service.readiness.wait_for("index_recovery", lambda: is_there)
    answer = await client.get(ASKED)
    assert answer.status_code == 503
    assert answer.json() == {"ready": False, "waiting_for": ["index_recovery"]}
    assert int(answer.headers["retry-after"]) >= 1
    is_there = True
    assert (await client.get(ASKED)).json() == READY
    service.announce_leaving()
    answer = await client.get(ASKED)
    assert answer.status_code == 503
    assert answer.json() == {"ready": False, "waiting_for": ["leaving"]}


@pytest.mark.parametrize("query", ["for=selection", "for=", "for=traffic&verbose=true"])
@within(app_client)
async def test_what_it_does_not_know_is_refused_by_name(
    client: httpx.AsyncClient, *, query: str
) -> None:
    refused = await client.get(f"/ready?{query}")
    assert refused.status_code == 400
    assert refused.json()["field"] == ("verbose" if "verbose" in query else "for")


async def test_it_asks_for_no_token_and_tells_those_without_little(tmp_path: Path) -> None:
    file = TokenFile(tmp_path / "tokens")
    file.add("all", "read")
    file.add("ours", "read", tenants=["ours"])
    file.add("blind", "select")
    async with listening(**file.setting) as (port, service, _):
        wire = await Wire.to(port)
        for status, is_ready in ((200, b"true"), (503, b"false")):
            for lines in ((), (file.line("blind"),), (file.line("ours"),)):
                found, _, content = await wire.exchange("GET", ASKED, None, *lines)
                assert (found, content) == (status, b'{"ready":%s}' % is_ready)
            found, _, content = await wire.exchange("GET", ASKED, None, file.line("all"))
            waiting = [] if is_ready == b"true" else ["leaving"]
            assert (found, json.loads(content)["waiting_for"]) == (status, waiting)
            service.announce_leaving()


def test_a_process_at_zero_is_led_to_until_it_leaves(tmp_path: Path) -> None:
    """On the side port as on the other; a probe sends no token."""
    tokens = TokenFile(tmp_path / "tokens")
    tokens.add("all", "read")
    side = free_port()
    args = (
        *("--host", HOST, "--leave-notice-s", "60", "--leave-grace-s", "60"),
        *("--side-port", str(side), "--side-host", HOST, "--token-file", str(tokens.path)),
    )
    with Server(tmp_path / "log", args=args) as server:
        urls = [f"http://{HOST}:{port}{ASKED}" for port in (server.port, side)]
        assert [httpx.get(url).status_code for url in urls] == [200, 200]
        assert [httpx.head(url).status_code for url in urls] == [200, 200]
        assert server.process is not None
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: [httpx.get(url).status_code for url in urls], [503, 503])
        assert httpx.get(f"http://{HOST}:{side}/health").status_code == 200
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(PATIENCE_S) == 0


def test_the_first_installation_is_led_to(tmp_path: Path) -> None:
    """The recovery peer is the Service, behind which nobody is yet; there is no engine either."""
    nobody = f"http://{HOST}:{free_port()}"
    args = ("--host", HOST, "--indexer-peers", nobody, "--replica-sync-port", str(free_port()))
    with Server(tmp_path / "log", args=args) as server:
        eventually(lambda: server.request("GET", ASKED).status, 200)
        assert server.request("GET", "/ready").json["waiting_for"] == ["schedulable_worker"]  # type: ignore[index]
        answer = server.request("POST", "/select", PROMPT)
        assert (answer.status, answer.json["code"]) == (503, "no_schedulable_worker")  # type: ignore[index]
