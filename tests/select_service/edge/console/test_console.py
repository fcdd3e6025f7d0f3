"""The page and what it asks for: headers, ids, empty answers, hostile input, and off."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import httpx
import pytest

import select_service.edge.console
from select_service.edge.console.assets import Assets
from select_service.edge.driver.driver import Driver
from select_service.edge.http.routes import ROUTES
from select_service.types import LeaseRequest, SelectAndReserveRequest
from tests.coroutines import within
from tests.select_service.edge.serving import add_worker, app_client

BIG = 2**64 - 1
OURS_BYTES_MAX, EVERYTHING_BYTES_MAX = 160_000, 215_000  # the latter with uPlot
STATIC = "/console/static/"
STATIC_FILES = Path(select_service.edge.console.__file__).with_name("static")
VENDORED = {
    name: digest
    for digest, name in map(
        str.split, (STATIC_FILES / "uPlot.sha256").read_text("utf-8").splitlines()
    )
}
"""The SHA-256 of each file that others wrote."""


@within(app_client)
async def test_the_page_is_served_under_a_strict_policy(client: httpx.AsyncClient) -> None:
    page = await client.get("/console")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(
        part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert "unsafe" not in str(policy)
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.headers["referrer-policy"] == "no-referrer"
    named = re.findall(r'(?:src|href)="console/static/([^"]+)"', page.text)
    assert named
    for name in named:
        assert (await client.get(STATIC + name)).status_code == 200
    for path in ("/console/api/leases", STATIC + "app.js", "/console/"):
        answer = await client.get(path)
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert (await client.get("/console/")).headers["location"] == "../console"


def test_what_is_served_needs_nothing_from_elsewhere() -> None:
    assets = Assets()
    total, ours = 0, 0
    for name in assets.names:
        text = assets.get(name).body.decode()
        if name in VENDORED:
            text = text.replace("/*! https://github.com/leeoniya/uPlot (v1.6.32) */", "")
        else:
            ours += len(text)
        total += len(text)
        addresses = set(re.findall(r"https?://[^\s\"'`)]+", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}, name
        if name.endswith(".js"):
            assert not re.search(
                r"innerHTML|outerHTML|insertAdjacentHTML|\beval\(|Function\(", text
            )
            for imported in re.findall(r'from "\./([^"]+)"', text):
                assert imported in assets.names
        if name.endswith(".html"):
            assert not re.search(r"<script(?![^>]*\bsrc=)|\sstyle=|\son\w+=", text)
    assert ours < OURS_BYTES_MAX
    assert total < EVERYTHING_BYTES_MAX


def test_uplot_is_what_its_authors_published() -> None:
    """The files of npm's uplot 1.6.32, with its licence, as `uPlot.sha256` has them."""
    assert set(VENDORED) == {"uPlot.iife.min.js", "uPlot.min.css", "uPlot.LICENSE"}
    for name, digest in VENDORED.items():
        assert hashlib.sha256((STATIC_FILES / name).read_bytes()).hexdigest() == digest, name
    assert "The MIT License" in (STATIC_FILES / "uPlot.LICENSE").read_text("utf-8")


@pytest.mark.parametrize(
    "path",
    ["nope.js", "..%2fanswering.py", "%2e%2e", "__init__.py", "", "app.js%00", "..%5canswering.py"],
)
@within(app_client)
async def test_no_other_file_can_be_had(client: httpx.AsyncClient, *, path: str) -> None:
    answer = await client.get(STATIC + path)
    assert answer.status_code == 404
    assert answer.json()["code"] == "route_not_found"


@within(app_client)
async def test_ids_are_strings(client: httpx.AsyncClient, service: Driver) -> None:
    add_worker(service, BIG)
    service.open_lease(LeaseRequest(lease_id="l", owner="o", ttl_s=30.0))
    await service.select_and_reserve(
        SelectAndReserveRequest(reservation_id="a", lease_id="l", token_ids=[1] * 40)
    )
    answer = (await client.get("/console/api/reservations")).json()
    assert answer["total"] == 1
    (row,) = answer["reservations"]
    assert row["worker_id"] == str(BIG)
    assert (row["phase"], row["isl_tokens"], row["lease_id"]) == ("prefill", 40, "l")
    service.prefill_complete("a")
    (row,) = (await client.get("/console/api/reservations")).json()["reservations"]
    assert row["phase"] == "decode"
    (lease,) = (await client.get("/console/api/leases")).json()["leases"]
    assert (lease["lease_id"], lease["reservations"]) == ("l", 1)


@within(app_client)
async def test_lists_are_bounded_and_newest_first(
    client: httpx.AsyncClient, service: Driver
) -> None:
    add_worker(service)
    for number in range(300):
        await service.select_and_reserve(
            SelectAndReserveRequest(reservation_id=str(number), token_ids=[1])
        )
    answer = (await client.get("/console/api/reservations?limit=1000000")).json()
    assert answer["total"] == 300
    names = [row["reservation_id"] for row in answer["reservations"]]
    assert names == [str(number) for number in range(299, 99, -1)]
    assert len((await client.get("/console/api/reservations?limit=2")).json()["reservations"]) == 2
    assert (await client.get("/console/api/reservations?limit=x")).status_code == 400


@within(app_client)
async def test_decisions_are_narrowed(client: httpx.AsyncClient, service: Driver) -> None:
    add_worker(service, 1)
    add_worker(service, 2)
    for name, body in (("a", {"allowed_worker_ids": [1]}), ("b", {"allowed_worker_ids": [3]})):
        await client.post("/select", json={"token_ids": [1], "selection_id": name, **body})
    for query, names in (
        ("", ["b", "a"]),
        ("?outcome=refused", ["b"]),
        ("?outcome=placed&worker_id=1", ["a"]),
        ("?worker_id=2", []),
    ):
        decisions = (await client.get(f"/console/api/decisions{query}")).json()["decisions"]
        assert [one["decision_id"] for one in decisions] == names, query
    refused = await client.get("/console/api/decisions?outcome=lost")
    assert (refused.status_code, refused.json()["field"]) == (400, "outcome")


@within(app_client)
async def test_an_empty_service_says_so(client: httpx.AsyncClient) -> None:
    assert (await client.get("/console/api/leases")).json() == {"leases": [], "total": 0}
    reservations = (await client.get("/console/api/reservations")).json()
    assert reservations == {"total": 0, "reservations": []}
    assert (await client.get("/console/api/decisions")).json()["decisions"] == []
    assert (await client.get("/console/api/decisions/nobody")).status_code == 404
    assert "findings" in (await client.get("/console/api/findings")).json()


@within(app_client, no_console=True)
async def test_it_can_be_left_out(client: httpx.AsyncClient) -> None:
    for path in ("/console", STATIC + "app.js", "/console/events", "/console/api/leases"):
        answer = await client.get(path)
        assert answer.status_code == 404
        assert answer.json()["code"] == "route_not_found"
    assert (await client.get("/health")).status_code == 200


def test_it_is_no_part_of_the_api() -> None:
    assert not [route for route in ROUTES if route.pattern.startswith("/console")]


@within(app_client)
async def test_it_does_not_take_what_it_has_no_route_for(client: httpx.AsyncClient) -> None:
    assert (await client.post("/console")).status_code == 405
    assert (await client.delete("/console/events")).status_code == 405
    assert (await client.get("/console/api/prefix")).status_code == 405
