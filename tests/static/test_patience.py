"""No test gives what must happen a time that a busy machine may miss: `tests/wait.py` does it all.

The suites of faults and of Ray are about how long things take, and have limits of their own;
fuzzing goes on for as long as it is told to, and a lossy link delays what it carries.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.wait import PATIENCE_S

TESTS = Path(__file__).parents[1]
APART = {"faults", "on_ray", "golden", "bench", "pictures.py", "fuzz", "lossy.py", "wait.py"}
CLOCKS = {"monotonic", "perf_counter"}
CALLS = {"wait_for": 1, "timeout": 0}
"""Functions of asyncio and marks of pytest, and which argument is the time."""


def files() -> Iterator[Path]:
    for path in sorted(TESTS.rglob("*.py")):
        if not APART & set(path.relative_to(TESTS).parts):
            yield path


def impatient(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and reason of each time that is too short, or a deadline of the test's own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            times = [word.value for word in node.keywords if word.arg == "timeout"]
            if name in CALLS:
                times += node.args[CALLS[name] :][:1]
            if name == "join" and len(node.args) == 1:
                times += node.args
            for time in times:
                if isinstance(time, ast.Constant) and _is_short(time.value):
                    yield node.lineno, f"{time.value!r} s may pass without anything"
        elif isinstance(node, ast.Compare):
            for side in ast.walk(node):
                if isinstance(side, ast.Call) and ast.unparse(side.func).split(".")[-1] in CLOCKS:
                    yield node.lineno, "a deadline of its own"


def _is_short(value: object) -> bool:
    return isinstance(value, int | float) and 0 < value < PATIENCE_S


@pytest.mark.parametrize(
    "line",
    [
        "asyncio.wait_for(run(), 20)",
        "asyncio.timeout(5.0)",
        "@pytest.mark.timeout(60)\ndef f(): ...",
        "subprocess.run(command, timeout=30)",
        "thread.join(10)",
        "while time.monotonic() < deadline: pass",
        "assert perf_counter() - began < 2",
    ],
)
def test_what_is_found(line: str) -> None:
    assert list(impatient(ast.parse(line)))


@pytest.mark.parametrize(
    "line",
    [
        "asyncio.wait_for(run(), PATIENCE_S)",
        "event.wait(0.01)",
        "'-'.join(words)",
        "began = time.monotonic()",
        "process.wait(timeout=PATIENCE_S)",
    ],
)
def test_what_is_none(line: str) -> None:
    assert not list(impatient(ast.parse(line)))


def test_nobody_is_impatient() -> None:
    words = {"timeout", "join", *CALLS, *CLOCKS}  # without any of them a file need not be parsed
    found = [
        f"{path.relative_to(TESTS.parent)}:{line}: {why}"
        for path in files()
        if any(word in (text := path.read_text("utf-8")) for word in words)
        for line, why in impatient(ast.parse(text))
    ]
    assert not found, "wait with tests/wait.py:\n" + "\n".join(found)
