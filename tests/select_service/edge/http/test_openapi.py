"""The description agrees with the specification, and the service with the description."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema  # type: ignore[import-untyped]
from openapi_spec_validator import validate

from select_service.edge.http.openapi import describe
from select_service.edge.http.routes import ROUTES
from select_service.types import PromptFields
from select_service.types.batches import SelectBatchRequest
from tests.coroutines import run_by
from tests.select_service.edge.serving import PROMPT, in_process, worker

DOCUMENT: dict[str, Any] = json.loads(describe())


def _conforms(value: object, schema: dict[str, Any]) -> None:
    jsonschema.validate(value, {**schema, "components": DOCUMENT["components"]})


def _schema(method: str, path: str, status: int) -> dict[str, Any]:
    content = DOCUMENT["paths"][path][method]["responses"][str(status)]["content"]
    schema: dict[str, Any] = content["application/json"]["schema"]
    return schema


def test_it_is_openapi() -> None:
    validate(DOCUMENT)


def test_it_describes_every_route() -> None:
    described = {
        (method.upper(), path)
        for path, operations in DOCUMENT["paths"].items()
        for method in operations
    }
    assert described == {(route.method, route.pattern) for route in ROUTES}
    names = [op["operationId"] for ops in DOCUMENT["paths"].values() for op in ops.values()]
    assert len(set(names)) == len(names)
    assert all(route.summary for route in ROUTES)


def test_the_status_of_refusals_for_load_is_in_it() -> None:
    document = json.loads(describe(529))
    validate(document)
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            responses = operation["responses"]
            gated = path.startswith("/select") or (method, path) == ("post", "/reservations")
            assert ("529" in responses) == gated, (method, path)
            if gated:
                assert "Retry-After" in responses["529"]["headers"]
            usual = {status for status in responses if status != "529"}
            assert usual == DOCUMENT["paths"][path][method]["responses"].keys()


def test_64_bit_ranges_are_in_it() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    assert schemas["WorkerSpec"]["properties"]["worker_id"]["maximum"] == 2**64 - 1
    hashes = schemas["SelectRequest"]["properties"]["block_hashes"]["anyOf"][0]["items"]
    assert (hashes["minimum"], hashes["maximum"]) == (-(2**63), 2**64 - 1)


def test_both_forms_are_in_it() -> None:
    for route in ROUTES:
        operation = DOCUMENT["paths"][route.pattern][route.method.lower()]
        if route.takes is not None:
            body = operation["requestBody"]["content"]
            assert list(body) == ["application/json", "application/msgpack"]
            described = body["application/msgpack"]["schema"].get("description", "")
            has_prompt = issubclass(route.takes, PromptFields | SelectBatchRequest)
            assert ("binaries" in described) == has_prompt
            assert {"description": described} | body["application/json"]["schema"] == {
                "description": described
            } | body["application/msgpack"]["schema"]
        for status, response in operation["responses"].items():
            fixed = route.pattern in {
                "/dump",
                "/openapi.json",
                "/metrics",
                "/replica_sync/snapshot",
            }
            only = fixed and status == "200"
            assert ("application/msgpack" in response["content"]) == (not only)


@run_by(in_process)
async def test_answers_are_as_described(client: httpx.AsyncClient) -> None:
    async def ask(method: str, path: str, status: int, body: object = None) -> None:
        answer = await client.request(method, path, json=body)
        assert answer.status_code == status, answer.text
        pattern = path.replace("/workers/1", "/workers/{worker_id}").replace(
            "/reservations/r", "/reservations/{reservation_id}"
        )
        _conforms(answer.json(), _schema(method.lower(), pattern, status))

    await ask("GET", "/ready", 503)
    await ask("POST", "/select", 503, PROMPT)
    await ask("POST", "/select", 422, {"isl_tokens": "x"})
    await ask("POST", "/workers", 201, worker())
    await ask("GET", "/workers", 200)
    await ask("PATCH", "/workers/1", 200, {"taints": ["a"]})
    await ask("GET", "/ready", 200)
    await ask("GET", "/workers/1/drain", 200)
    await ask("POST", "/select", 200, PROMPT)
    await ask("POST", "/select_and_reserve", 200, {**PROMPT, "reservation_id": "r"})
    await ask("POST", "/select_and_reserve", 409, {**PROMPT, "reservation_id": "r", "x": 1})
    await ask("POST", "/reservations", 201, {**PROMPT, "reservation_id": "q", "worker_id": 1})
    await ask("GET", "/loads", 200)
    await ask("POST", "/potential_loads", 200, PROMPT)
    await ask("POST", "/overlap_scores", 200, PROMPT)
    await ask("POST", "/reservations/r/output_block", 200, {})
    await ask("DELETE", "/reservations/r", 200)
    await ask("GET", "/dump", 200)
    await ask("GET", "/openapi.json", 200)
    await ask("DELETE", "/workers/1", 200)
    await ask("DELETE", "/workers/1", 404)
