"""The description agrees with the specification, and the service with the description."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import jsonschema  # type: ignore[import-untyped]
import pytest

from select_service.edge.http.routes import ROUTES
from select_service.types import PromptFields
from select_service.types.batches import SelectBatchRequest
from tests.coroutines import within
from tests.select_service.edge.http.openapi_made import describe
from tests.select_service.edge.serving import PROMPT, app_client, worker
from tests.wait import PATIENCE_S

DOCUMENT: dict[str, Any] = json.loads(describe())


def _conforms(value: object, schema: dict[str, Any]) -> None:
    whole = {**schema, "components": DOCUMENT["components"]}
    jsonschema.Draft202012Validator(whole).validate(value)  # the schema itself is read elsewhere


def _schema(method: str, path: str, status: int) -> dict[str, Any]:
    content = DOCUMENT["paths"][path][method]["responses"][str(status)]["content"]
    schema: dict[str, Any] = content["application/json"]["schema"]
    return schema


def _is_openapi(document: dict[str, Any]) -> None:
    from openapi_spec_validator import validate  # half a second, which the other tests need not

    validate(document)


def test_it_is_openapi() -> None:
    _is_openapi(DOCUMENT)


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
    _is_openapi(document)
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            responses = operation["responses"]
            gated = path.startswith("/select") or (method, path) == ("post", "/reservations")
            assert ("529" in responses) == gated, (method, path)
            if gated:
                assert "Retry-After" in responses["529"]["headers"]
            usual = {status for status in responses if status != "529"}
            assert usual == DOCUMENT["paths"][path][method]["responses"].keys()


def test_tokens_are_in_it_where_the_service_asks_for_them() -> None:
    """Swagger UI drew padlocks at operations that were open to everybody."""
    document = json.loads(describe(with_tokens=False))
    _is_openapi(document)
    assert document["components"].keys() == {"schemas"}, "else there is a button to authorize"
    assert "security" not in json.dumps(document)
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            guarded = DOCUMENT["paths"][path][method]
            refused = guarded["responses"].keys() - operation["responses"].keys()
            assert refused == ({"401", "403"} if "401" in guarded["responses"] else set())
            assert guarded.get("security") in ([{"token": []}], None)
            assert ("security" in guarded) == ("x-scope" in guarded)


def test_it_opens_with_what_the_service_does() -> None:
    first, second = DOCUMENT["info"]["description"].split("\n\n")[:2]
    assert first.startswith("Decides which LLM inference worker serves a request")
    for method, path in re.findall(r"`(GET|POST|DELETE) (/\S+)`", second):
        assert method.lower() in DOCUMENT["paths"][path]


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


@within(app_client)
async def test_a_service_without_tokens_serves_the_document_without(
    client: httpx.AsyncClient,
) -> None:
    assert (await client.get("/openapi.json")).content == describe(with_tokens=False)


@within(app_client)
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


OPERATIONS = [
    pytest.param(operation, id=operation["operationId"])
    for operations in DOCUMENT["paths"].values()
    for operation in operations.values()
]


@pytest.mark.parametrize("name", DOCUMENT["components"]["schemas"])
def test_every_field_is_described_and_has_an_example(name: str) -> None:
    """Units are in the texts; a number or a word says more with an example."""
    schema = DOCUMENT["components"]["schemas"][name]
    assert schema.get("description") or "properties" not in schema
    for field, property_ in schema.get("properties", {}).items():
        text = property_.get("description", "")
        assert text.endswith("."), f"{name}.{field} needs a text below it, or in COMMON_FIELDS"
        assert "e.g. `" not in text, f"{name}.{field}: its example is not read"
        assert property_.get("examples") or not _is_scalar(property_), f"{name}.{field}: e.g.?"
        for example in property_.get("examples", ()):
            _conforms(example, {key: property_[key] for key in property_ if key != "examples"})


def _is_scalar(schema: dict[str, Any]) -> bool:
    """Whether any number or text is allowed, and not only some words."""
    if "anyOf" in schema:
        return any(map(_is_scalar, schema["anyOf"]))
    kinds = {"string", "integer", "number"}
    return schema.get("type") in kinds and not {"enum", "const"} & schema.keys()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_is_described(operation: dict[str, Any]) -> None:
    """What Spectral's rules for OpenAPI ask for."""
    assert operation["description"].startswith(operation["summary"])
    (tag,) = operation["tags"]
    assert tag in {one["name"] for one in DOCUMENT["tags"] if one["description"]}
    for parameter in operation.get("parameters", ()):
        assert parameter["description"].endswith(".")
        jsonschema.validate(parameter["example"], parameter["schema"])
    body = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if body is not None:
        _conforms(body["example"], body["schema"])


def test_it_says_who_and_where() -> None:
    assert DOCUMENT["info"]["contact"]["url"]
    assert [one["url"] for one in DOCUMENT["servers"]] == ["/"]
    used = {*re.findall(r'"#/components/schemas/(\w+)"', json.dumps(DOCUMENT))}
    assert used == set(DOCUMENT["components"]["schemas"]), "none is unused"


@pytest.mark.heavy
def test_spectral_has_nothing_to_say(tmp_path: Path) -> None:
    """With its own rules; from npm, where that can be had."""
    document, rules = tmp_path / "openapi.json", tmp_path / "rules.yaml"
    document.write_bytes(describe())
    rules.write_text("extends: ['spectral:oas']\n")
    command = shutil.which("spectral")
    words = [command] if command else ["npx", "--yes", "@stoplight/spectral-cli@6"]
    if not command and shutil.which("npx") is None:
        pytest.skip("neither spectral nor npx here")
    ended = subprocess.run(
        [*words, "lint", str(document), "--ruleset", str(rules), "--fail-severity", "hint"],
        capture_output=True, text=True, check=False, timeout=PATIENCE_S,
    )  # fmt: skip
    if "lint" not in ended.stderr and "npm error" in ended.stderr:
        pytest.skip(f"spectral cannot be had: {ended.stderr[-200:]}")
    assert ended.returncode == 0, ended.stdout
