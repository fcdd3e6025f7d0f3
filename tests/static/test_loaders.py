"""Nothing that is shipped turns bytes into code: no pickle, no eval, no YAML that makes objects.

By the syntax tree, so that neither comments nor names of other things count.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHIPPED = [*(ROOT / "indexer").rglob("*.py"), *(ROOT / "select_service").rglob("*.py")]

MODULES = frozenset(
    (
        *("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"),
        *("code", "codeop", "multiprocessing", "telnetlib", "ftplib", "xml", "lxml"),
    )
)
"""That turn bytes into objects of their choice, or run what they are given."""

CALLS = frozenset(("eval", "exec", "compile", "__import__", "breakpoint"))
METHODS = frozenset(
    (
        *("recv_pyobj", "send_pyobj", "unsafe_load", "full_load", "load_pickle"),
        *("os.system", "os.popen", "os.spawnl", "os.execv", "yaml.load", "yaml.load_all"),
        *("np.load", "numpy.load", "ssl._create_unverified_context"),
    )
)
LAST = CALLS | {name.rpartition(".")[2] for name in METHODS}
FLAGS = {"shell": True, "allow_pickle": True}


def offences(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [one.name for one in node.names]
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                if name.partition(".")[0] in MODULES:
                    yield f"line {node.lineno}: imports {name}"
        elif isinstance(node, ast.Call):
            yield from _in_call(node)


def _in_call(call: ast.Call) -> Iterator[str]:
    last = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if last in LAST:  # of few calls; to write down the names of all takes a second
        name = ast.unparse(call.func)
        if name in CALLS or name in METHODS or last in METHODS:
            yield f"line {call.lineno}: calls {name}"
    for word in call.keywords:
        value = getattr(word.value, "value", None)
        if word.arg in FLAGS and value is FLAGS[word.arg]:
            yield f"line {call.lineno}: {word.arg}={value}"


def test_nothing_shipped_turns_bytes_into_code() -> None:
    assert len(SHIPPED) > 100
    found = {
        str(path.relative_to(ROOT)): said
        for path in SHIPPED
        if (said := list(offences(path.read_text("utf-8"))))
    }
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    from marshal import loads",
        "import xml.etree.ElementTree as tree",
        "eval(text)",
        "exec(text, {})",
        "yaml.load(text, Loader)",
        "socket.recv_pyobj()",
        "np.load(path)",
        "numpy.frombuffer(x, allow_pickle=True)",
        "subprocess.run(words, shell=True)",
        "os.system(text)",
    ],
)
def test_what_would_be_found(source: str) -> None:
    assert len(list(offences(source))) == 1


@pytest.mark.parametrize("source", ["re.compile(text)", "# eval(text)", "yaml.safe_load(text)"])
def test_what_is_no_offence(source: str) -> None:
    assert not list(offences(source))
