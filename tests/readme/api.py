"""deploy/reference/api.md: the API reference, out of what GET /openapi.json answers.

`python -m tests.readme.api` (or `make readme`) writes it; `test_api.py` fails when it differs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from select_service.edge.http.routes import ROUTES
from tests.readme.document import DOCS, REFERENCE, anchor
from tests.select_service.edge.http.openapi_made import describe

if TYPE_CHECKING:
    from select_service.edge.http.api import Handler
    from select_service.edge.routing import Route

COMMAND = "make readme"
FILE, GLANCE = REFERENCE / "api.md", DOCS / "routes.md"
OTHERS = "| others | what for |\n"
HEAD = """# API reference

Every route and every type, generated from `GET /openapi.json` by `make readme`.
[Routes at a glance](../docs/routes.md) says what they are for. A type followed by `?` may be
`null`, which in a request is the same as leaving the field out. `u32` and `u64` are unsigned; a
hash is any signed or unsigned 64-bit number. Bodies and answers may be MessagePack instead of JSON.
"""
_CONTRACT = re.compile(r" \(contract [^)]*\)")
_REF = re.compile(r".*/")
_INTEGERS = {
    (0, (1 << 64) - 1): "u64",
    (0, (1 << 32) - 1): "u32",
    (-(1 << 63), (1 << 64) - 1): "hash",
    (None, None): "integer",
}


def written() -> str:
    """The whole file."""
    described: Any = msgspec.json.decode(describe())
    schemas: dict[str, Any] = described["components"]["schemas"]
    lines = [HEAD, "## Routes", "", "| route | what for | token's scope |", "|---|---|---|"]
    operations = list(_operations(described["paths"]))
    for name, one in operations:
        summary = one["summary"].rstrip(".")
        lines.append(f"| [`{name}`](#{anchor(name)}) | {_cell(summary)} | {_scope(one)} |")
    lines += ["", "### Statuses", "", "| status | meaning |", "|---|---|"]
    lines += _statuses(one for _, one in operations)
    lines += ["", "Errors are a [Problem](#problem), each with [its code](errors.md).", ""]
    for name, one in operations:
        lines += _operation(name, one)
    lines += ["## Types", ""]
    for name in sorted(schemas):
        lines += _schema(name, schemas[name])
    return "\n".join(lines).rstrip() + "\n"


def _operations(paths: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in paths.items():
        for method, one in methods.items():
            yield f"{method.upper()} {path}", one


def _scope(one: dict[str, Any]) -> str:
    return f"`{one['x-scope']}`" if "x-scope" in one else ""


def _statuses(operations: Iterable[dict[str, Any]]) -> Iterator[str]:
    texts: dict[str, dict[str, None]] = {}
    for one in operations:
        for status, answer in one["responses"].items():
            if not status.startswith("2"):
                texts.setdefault(status, {})[answer["description"].rstrip(".")] = None
    for status in sorted(texts):
        yield f"| {status} | {_cell('; '.join(texts[status]))} |"


def _operation(name: str, one: dict[str, Any]) -> Iterator[str]:
    yield from (f"### `{name}`", "", one["description"], "")
    for parameter in one.get("parameters", ()):
        where = "path" if parameter["in"] == "path" else "query"
        text = f"{parameter['description'].rstrip('.')}, e.g. {_code(parameter['example'])}"
        yield f"* {where} `{parameter['name']}`: {_type(parameter['schema'])}. {text}"
    if "requestBody" in one:
        optional = "" if one["requestBody"].get("required") else " (may be empty)"
        example = _code(one["requestBody"]["content"]["application/json"]["example"])
        yield f"* body: {_content(one['requestBody'])}{optional}, e.g. {example}"
    refusals = []
    for status, answer in one["responses"].items():
        if status.startswith("2") or "Problem" not in _content(answer):
            yield f"* {status}: {_content(answer)}"
        else:
            refusals.append(status)
    yield from (f"* refusals: {', '.join(refusals)}", "")


def _content(of: dict[str, Any]) -> str:
    content = of.get("content", {})
    for kind, one in content.items():
        if kind == "application/json":
            return _type(one.get("schema", {}))
    return ", ".join(f"`{kind}`" for kind in content) or "nothing"


def _schema(name: str, schema: dict[str, Any]) -> Iterator[str]:
    yield from (f"### {name}", "")
    if "description" in schema:
        yield from (_CONTRACT.sub("", " ".join(schema["description"].split())), "")
    if "properties" not in schema:
        yield from (_type(schema), "")
        return
    required = set(schema.get("required", ()))
    yield from ("| field | type | unless given | meaning |", "|---|---|---|---|")
    for field, one in schema["properties"].items():
        default = "always" if field in required else _default(one)
        text = one["description"].rstrip(".")
        text += "".join(f", e.g. {_code(example)}" for example in one.get("examples", ()))
        yield f"| `{field}` | {_cell(_type(one))} | {default} | {_cell(text)} |"
    yield ""


def _code(value: object) -> str:
    return f"`{msgspec.json.encode(value).decode()}`"


def _default(one: dict[str, Any]) -> str:
    return "" if one.get("default") is None else _code(one["default"])


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = _REF.sub("", schema["$ref"])
        return f"[{name}](#{anchor(name)})"
    for key in ("anyOf", "oneOf"):
        if key in schema:
            kinds = [one for one in schema[key] if one != {"type": "null"}]
            text = " or ".join(dict.fromkeys(map(_type, kinds)))
            return text + "?" * (len(kinds) < len(schema[key]))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return ", ".join(f"`{msgspec.json.encode(one).decode()}`" for one in values)
    return _plain(schema)


def _plain(schema: dict[str, Any]) -> str:
    kind = schema.get("type", "anything")
    if "prefixItems" in schema:
        return "[" + ", ".join(map(_type, schema["prefixItems"])) + "]"
    if kind == "array":
        inner = _type(schema.get("items", {}))
        return f"list of {inner[:-1]} or `null`" if inner.endswith("?") else f"list of {inner}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_type(schema['additionalProperties'])} by key"
    if kind == "integer":
        bounds = schema.get("minimum"), schema.get("maximum")
        return _INTEGERS.get(bounds, f"integer{_range(*bounds)}")
    if kind == "number":
        return f"number{_range(schema.get('minimum'), schema.get('maximum'))}"
    return str(kind)


def _range(least: object, most: object) -> str:
    if least is None and most is None:
        return ""
    if most is None:
        return f" from {least}"
    return f" up to {most}" if least is None else f" {least} to {most}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def unnamed(page: str) -> list[Route[Handler]]:
    """The routes that no line of routes.md names."""
    lines = page.splitlines()

    def is_named(route: Route[Handler]) -> bool:
        parts = [one for one in (route.method, *route.pattern.split("/")) if "{" not in one]
        return any(all(word in line for word in parts) for line in lines)

    return [route for route in ROUTES if not is_named(route)]


def at_a_glance(page: str) -> str:
    """routes.md with a row for each route that it does not name, to be written better by hand."""
    rows = [f"| `{one.method} {one.pattern}` | {one.summary} |\n" for one in unnamed(page)]
    if not rows:
        return page
    tables, notes = page.split("\n* ", 1)
    head = "" if OTHERS in tables else f"\n{OTHERS}|---|---|\n"
    return f"{tables}{head}{''.join(rows)}\n* {notes}"


if __name__ == "__main__":
    FILE.write_text(written(), "utf-8")
    GLANCE.write_text(at_a_glance(GLANCE.read_text("utf-8")), "utf-8")
