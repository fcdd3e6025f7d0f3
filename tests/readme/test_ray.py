"""The examples for Ray can be read here, and are run where Ray is (`tests/on_ray`)."""

from __future__ import annotations

import ast
from importlib.util import find_spec

import pytest

from select_service.types import WorkerSpec
from tests.readme import document


@pytest.mark.parametrize("program", [document.ray_program(), document.ray_llm_program()])
def test_it_names_what_there_is(program: str) -> None:
    tree = ast.parse(program)
    ours = [
        (node.module, name.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("select_service")
        for name in node.names
    ]
    (router,) = (
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and str(node.value).startswith("select_service.")
    )
    module, _, name = str(router).partition(":")
    for where, what in (*ours, (module, name)):
        assert what in _defined_in(str(where)), f"{where} has no {what}"
    (worker,) = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "ServeWorker"
    )
    assert {one.arg for one in worker.keywords} <= set(WorkerSpec.__struct_fields__)


def _defined_in(module: str) -> set[str]:
    """Return top-level names without importing, which would need Ray."""
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    with open(spec.origin, encoding="utf-8") as source:
        tree = ast.parse(source.read())
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    }
