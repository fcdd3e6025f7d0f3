"""One module constructs HTTP clients: elsewhere one would take a proxy from the environment."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLACE = Path("indexer/http_client.py")
CLIENTS = {
    ("httpx", name)
    for name in ("AsyncClient", "Client", "get", "post", "put", "request", "stream", "delete")
}
CLIENTS |= {("requests", "Session"), ("requests", "request")}
CLIENTS |= {("aiohttp", "ClientSession"), ("request", "urlopen"), ("request", "build_opener")}
CLIENTS |= {("client", "HTTPConnection"), ("client", "HTTPSConnection")}
CLIENTS |= {("httpcore", name) for name in ("ConnectionPool", "AsyncConnectionPool")}


def constructions(text: str) -> Iterator[str]:
    """Calls of a client's class or function, and classes that inherit from one."""
    if not any(of in text and name in text for of, name in CLIENTS):
        return  # most files, and to parse them takes two seconds
    for node in ast.walk(ast.parse(text)):
        used = [node.func] if isinstance(node, ast.Call) else getattr(node, "bases", ())
        for one in used:
            if isinstance(one, ast.Attribute):
                of = one.value
                name = of.attr if isinstance(of, ast.Attribute) else getattr(of, "id", "")
                if (name.lstrip("_"), one.attr) in CLIENTS:
                    yield f"{name}.{one.attr}, line {one.lineno}"


def test_only_one_module_constructs_http_clients() -> None:
    found = {
        path.relative_to(ROOT): list(constructions(path.read_text()))
        for package in ("indexer", "select_service")
        for path in (ROOT / package).rglob("*.py")
    }
    assert {str(path): made for path, made in found.items() if made and path != PLACE} == {}
    assert len(found[PLACE]) == 2
