"""The API as clients see it: paths, methods, media types, limits, errors, answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from select_service.edge.driver.driver import Driver
from select_service.edge.http.routes import ROUTES
from select_service.settings import FieldValidation
from select_service.version import __version__
from tests.coroutines import within
from tests.select_service.edge.metrics.test_exposition import scrape, value
from tests.select_service.edge.security.credentials_made import TokenFile
from tests.select_service.edge.serving import (
    PROMPT,
    Wire,
    add_worker,
    app_client,
    listening,
    worker,
)

JSON = {"content-type": "application/json"}


def problem(answer: httpx.Response, status: int, code: str, field: str | None = None) -> None:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert body["error"]
    assert body["code"] == code
    assert body.get("field") == field


def raw(client: httpx.AsyncClient, path: str) -> httpx.URL:
    return httpx.URL("http://s").copy_with(raw_path=path.encode())


@pytest.mark.parametrize(
    "path",
    [
        *("/", "/nope", "/Health", "/health/", "//health", "/select/", "/workers/1/", "/workers//"),
        *("/reservations/", "/reservations//prefill_complete", "/reservations/a/b", "/he%61lth"),
    ],
)
@within(app_client)
async def test_paths_are_exact(client: httpx.AsyncClient, *, path: str) -> None:
    for method in ("GET", "POST", "DELETE"):
        answer = await client.request(method, raw(client, path))
        problem(answer, 404, "route_not_found")
        assert answer.json()["error"] == "route not found"


@pytest.mark.parametrize("access_log", [False, True])
@pytest.mark.parametrize("console", [False, True])
async def test_the_root_says_what_there_is(console: bool, access_log: bool) -> None:
    """The contract's 404 and its words, and where to go."""
    async with listening(no_console=not console, access_log=access_log) as (port, _, _):
        wire = await Wire.to(port)
        places = {"console": "/console", "docs": "/docs"} if console else {}
        for path in ("/", "/", "/?from=somebody"):  # the second time from memory, if there is any
            status, headers, content = await wire.exchange(
                "GET", path, None, "Accept: text/html,*/*;q=0.8"
            )
            assert (status, headers["content-type"]) == (404, "application/json")
            assert json.loads(content) == {
                "error": "route not found",
                "code": "route_not_found",
                "details": {
                    "service": "select-service",
                    "version": __version__,
                    **places,
                    "openapi": "/openapi.json",
                    "health": "/health",
                },
            }
            for place in ("/openapi.json", "/health", *places.values()):
                wire.ask("HEAD", place)
                head = await wire.reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200 ")


async def test_the_root_tells_strangers_no_version(tmp_path: Path) -> None:
    file = TokenFile(tmp_path / "tokens")
    token = file.add("reader", "read")
    async with app_client(**file.setting) as (client, _):
        for headers in ({}, {"Authorization": f"Bearer {token}"}):
            answer = await client.get("/", headers=headers)
            problem(answer, 404, "route_not_found")
            assert answer.json()["error"] == "route not found"
            assert answer.json()["details"]["service"] == "select-service"
            assert "version" not in answer.json()["details"]


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("PUT", "/workers", "GET, HEAD, POST"),
        ("GET", "/select", "POST"),
        ("POST", "/health", "GET, HEAD"),
        ("OPTIONS", "/select", "POST"),
        ("GET", "/workers/1", "DELETE, PATCH"),
        ("GET", "/reservations/%FF", "DELETE"),  # before the path is read
        ("get", "/health", "GET, HEAD"),
    ],
)
@within(app_client)
async def test_known_path_wrong_method(
    client: httpx.AsyncClient, *, method: str, path: str, allow: str
) -> None:
    request = client.build_request(method, raw(client, path))
    request.method = method
    answer = await client.send(request)
    problem(answer, 405, "method_not_allowed")
    assert answer.headers["allow"] == allow


NOT_200 = {
    "/ready": 503,
    "/replica_sync/snapshot": 409,
    "/decisions/{id}": 404,
    "/workers/{worker_id}/drain": 400,
}
"""Of an empty service without replicas; the pattern itself names nothing."""


@within(app_client)
async def test_head_works_on_get_routes(client: httpx.AsyncClient) -> None:
    for route in ROUTES:
        if route.method == "GET":
            answer = await client.head(route.pattern)
            assert answer.status_code == NOT_200.get(route.pattern, 200)
            assert answer.content == b""
    assert (await client.head("/health")).headers["content-length"] == "15"


@pytest.mark.parametrize(
    "media_type",
    [
        "application/json",
        "application/json; charset=utf-8",
        "APPLICATION/JSON",
        "application/json;charset=UTF-8",
        "application/vnd.api+json",
        "Application/Problem+JSON ; x=y",
    ],
)
@within(app_client)
async def test_media_types_accepted(client: httpx.AsyncClient, *, media_type: str) -> None:
    headers = {"content-type": media_type}
    answer = await client.post("/select", content=b"{}", headers=headers)
    problem(answer, 503, "no_schedulable_worker")


@pytest.mark.parametrize(
    "media_type",
    [
        *("", "text/plain", "application/x-www-form-urlencoded", "application/jsonx", "json"),
        *("application/+json", "text/json", "application/json-seq", "x/application/json"),
    ],
)
@within(app_client)
async def test_media_types_refused_before_the_body_is_read(
    client: httpx.AsyncClient, *, media_type: str
) -> None:
    headers = {"content-type": media_type} if media_type else {}
    for path in ("/select", "/workers", "/reservations/x/output_block"):
        answer = await client.post(path, content=b"no json" * 10**6, headers=headers)
        problem(answer, 415, "unsupported_media_type")


@within(app_client, max_body_bytes=2048)
async def test_the_body_limit_is_exact(client: httpx.AsyncClient, service: Driver) -> None:
    limit = 2048
    fits = json.dumps(PROMPT).encode().ljust(limit)
    answer = await client.post("/select", content=fits, headers=JSON)
    problem(answer, 503, "no_schedulable_worker")
    problem(await client.post("/select", content=fits + b" ", headers=JSON), 413, "body_too_large")

    async def pieces() -> Any:
        for _ in range(3):
            yield fits

    answer = await client.post("/select", content=pieces(), headers=JSON)
    problem(answer, 413, "body_too_large")


@pytest.mark.parametrize("path", ["/workers/x", "/workers/-1", "/workers/18446744073709551616"])
@pytest.mark.parametrize("method", ["PATCH", "DELETE"])
@pytest.mark.parametrize("body", [{}, {"block_size": "none"}], ids=["right", "wrong"])
@within(app_client)
async def test_path_numbers(
    client: httpx.AsyncClient, *, method: str, path: str, body: dict[str, str]
) -> None:
    problem(await client.request(method, path, json=body), 400, "invalid_path")


@within(app_client)
async def test_path_numbers_in_other_spellings(client: httpx.AsyncClient, service: Driver) -> None:
    for spelling in ("+1", "01", "%31", "+00000000000000000000000001"):
        add_worker(service)
        answer = await client.delete(raw(client, f"/workers/{spelling}"))
        assert answer.status_code == 200, spelling
        assert answer.json()["lifecycle"] == "unschedulable"
    for spelling in ("1_0", "%20" + "1", "٣", "1.0", "1" * 30):
        answer = await client.delete(f"/workers/{spelling}")
        problem(answer, 400, "invalid_path")


@within(app_client)
async def test_ids_are_percent_decoded_segments(client: httpx.AsyncClient, service: Driver) -> None:
    add_worker(service)
    booking = {"reservation_id": "a/b c", "worker_id": 1, **PROMPT}
    assert (await client.post("/reservations", json=booking)).status_code == 201
    answer = await client.post(raw(client, "/reservations/a%2Fb%20c/prefill_complete"))
    assert answer.json() == {"status": "ok"}
    assert (await client.delete(raw(client, "/reservations/a%2Fb%20c"))).status_code == 200
    for path in ("/reservations/%FF", "/reservations/%C3%28"):
        problem(await client.delete(raw(client, path)), 400, "invalid_path")
    answer = await client.delete(raw(client, "/reservations/%zz"))
    assert answer.json()["error"] == "reservation %zz not found"


@within(app_client)
async def test_queries(client: httpx.AsyncClient, service: Driver) -> None:
    add_worker(service, 1)
    add_worker(service, 2, model_name="m 1", tenant_id="")

    async def ids(query: str) -> list[int]:
        answer = await client.get(raw(client, f"/workers?{query}"))
        assert answer.status_code == 200, answer.text
        return [record["worker_id"] for record in answer.json()]

    assert await ids("") == [1, 2]
    assert await ids("model_name=m+1") == await ids("model_name=m%201") == [2]
    assert await ids("tenant_id=") == await ids("tenant_id") == [2]
    assert await ids("routing_group=default") == [1]
    assert await ids("tenant_id=default&routing_group=default&x=1&x=2&y") == [1]
    assert await ids("model_name=%ff") == []
    for path in ("/workers", "/loads"):
        answer = await client.get(f"{path}?model_name=a&model_name=b")
        problem(answer, 400, "invalid_query", "model_name")
        answer = await client.get(f"{path}?tenant_id=a&routing_group=b")
        problem(answer, 422, "invalid_field", "routing_group")


@within(app_client)
async def test_a_worker_is_drained_and_put_back(client: httpx.AsyncClient, service: Driver) -> None:
    add_worker(service)
    add_worker(service, 2)
    booking = {**PROMPT, "reservation_id": "a", "allowed_worker_ids": [1]}
    assert (await client.post("/select_and_reserve", json=booking)).status_code == 200
    idle = (await client.get("/workers/1/drain")).json()
    assert (idle["lifecycle"], idle["drains"]) == ("schedulable", False)
    answer = await client.post("/workers/1/drain")  # no body, and none is needed
    assert (answer.status_code, "reason" in answer.json()) == (200, False)
    answer = await client.post("/workers/1/drain", json={"reason": "new image"})
    assert answer.json() == {
        "worker_id": 1,
        "model_name": "default",
        "tenant_id": "default",
        "lifecycle": "draining",
        "drains": True,
        "reason": "new image",
        "reservations": 1,
        "prefill_tokens": 32,
        "decode_blocks": 2,
        "safe_to_terminate": False,
        "waiting_for": ["1 reservation"],
    }
    pinned = {**PROMPT, "pinned_worker": {"worker_id": 1, "dp_rank": 0}}
    refused = await client.post("/select", json=pinned)
    problem(refused, 503, "worker_draining")
    assert refused.json()["details"] == {"worker_ids": [1]}
    samples = await scrape(client)
    assert value(samples, "workers", lifecycle="draining") == 1
    assert value(samples, "draining_reservations") == 1
    assert value(samples, "drains_total", event="begun") == 1
    assert (await client.delete("/reservations/a")).status_code == 200
    assert (await client.get("/workers/1/drain")).json()["safe_to_terminate"] is True
    assert (await client.delete("/workers/1/drain")).json()["lifecycle"] == "schedulable"
    for method in ("GET", "POST", "DELETE"):
        problem(await client.request(method, "/workers/9/drain"), 404, "worker_not_found")
    too_long = await client.post("/workers/1/drain", json={"reason": "x" * 257})
    problem(too_long, 422, "invalid_field", "reason")


async def test_unknown_parameters_of_a_query() -> None:
    """A misspelt scope is answered with all of them: that has to be said."""
    async with app_client() as (client, _):
        answer = await client.get("/loads?model=llama&tenant_id=acme&x")
        assert answer.status_code == 200
        assert answer.headers["warning"] == '299 - "unknown parameter: model, x"'
        answer = await client.get("/decisions?limit=a&lim%22it=1")
        problem(answer, 400, "invalid_query", "limit")
        answer = await client.get("/decisions?lim%22it=1")  # a stream
        assert answer.headers["warning"] == '299 - "unknown parameter: lim\\"it"'
        answer = await client.get("/ready?verbose=true&verbos=1")  # waits for the doctor
        assert answer.headers["warning"] == '299 - "unknown parameter: verbos"'
        answer = await client.delete("/workers/9?tenant_id=acme")
        assert answer.status_code == 404
        for url in ("/loads?model_name=llama", "/loads?", "/metrics?x=1", "/console?x=1"):
            assert "warning" not in (await client.get(url)).headers, url
    async with app_client(field_validation=FieldValidation.STRICT) as (client, _):
        problem(await client.get("/loads?model=llama"), 422, "unknown_field", "model")
        assert (await client.get("/loads?model_name=llama")).status_code == 200
        assert (await client.get("/console/api/decisions?limit=5")).status_code == 200
    async with app_client(field_validation=FieldValidation.IGNORE) as (client, _):
        assert "warning" not in (await client.get("/loads?model=llama")).headers


async def test_unknown_fields() -> None:
    async with app_client() as (client, _):
        answer = await client.post("/select", json={**PROMPT, "pined_worker": 1})
        assert answer.status_code == 503  # also refusals say so
        assert answer.headers["warning"] == '299 - "unknown field: pined_worker"'
        answer = await client.post("/workers", json=worker(x=1, y=2))
        assert answer.headers["warning"] == '299 - "unknown field: x, y"'
        answer = await client.post("/select", json={**PROMPT, "a\r\nset-cookie: b": 1})
        assert answer.status_code == 200
        assert "set-cookie" not in answer.headers
        assert "warning" not in (await client.post("/select", json=PROMPT)).headers
    async with app_client(field_validation=FieldValidation.STRICT) as (client, _):
        answer = await client.post("/select", json={**PROMPT, "bogus": 1})
        problem(answer, 422, "unknown_field", "bogus")
    async with app_client(field_validation=FieldValidation.IGNORE) as (client, _):
        answer = await client.post("/workers", json=worker(bogus=1))
        assert "warning" not in answer.headers
