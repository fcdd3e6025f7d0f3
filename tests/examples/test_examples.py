"""Each of `examples/` is run, and is what the documents show.

`gateway` is run by `test_gateway.py`, `ray` by `tests/on_ray/test_readme.py`, `embedded` with all
programs of the documents by `tests/readme/test_examples.py`.
"""

from __future__ import annotations

import ast
import json
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
import pytest
import yaml

from select_service.edge.discovery.objects import Pod, workers_of_pod
from select_service.planner.cli import main
from tests.readme import document

EXAMPLES: Final = document.README.parent / "examples"


def test_every_example_is_named() -> None:
    folders = {path.name for path in EXAMPLES.iterdir() if path.is_dir()}
    assert folders == {"embedded", "gateway", "kubernetes", "planner", "ray"}


def program(file: Path) -> str:
    """A file's statements, without its docstring and what it says where an extra is missing."""
    body: list[ast.stmt] = []
    for one in ast.parse(file.read_text("utf-8")).body[1:]:
        if isinstance(one, ast.Try):
            body = [*body[:-1], *one.body]  # `import sys` stands before it
        else:
            body.append(one)
    return ast.unparse(ast.Module(body, []))


def test_ray_without_its_extra_says_what_to_install() -> None:
    without = "import runpy, sys; sys.modules['ray'] = None; runpy.run_path(sys.argv[1])"
    ended = subprocess.run(
        [sys.executable, "-c", without, EXAMPLES / "ray/engines.py"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("this needs Ray Serve (")
    assert ended.stderr.endswith("): pip install '.[ray]' in a checkout\n")


@pytest.mark.parametrize(
    ("file", "shown"),
    [
        ("embedded/embedded.py", document.blocks(document.DOCS / "embedding.md")[0][1]),
        ("ray/engines.py", document.ray_program()),
    ],
)
def test_what_the_documents_show_is_the_example(file: str, shown: str) -> None:
    assert program(EXAMPLES / file) == ast.unparse(ast.parse(shown))


def test_a_gateway_is_a_page_of_code() -> None:
    assert len((EXAMPLES / "gateway/gateway.py").read_text("utf-8").splitlines()) < 150


def test_planner(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["plan.py"])
    runpy.run_path(str(EXAMPLES / "planner/plan.py"))
    assert [*tmp_path.iterdir()] == [], "nothing is left behind"
    brief = capsys.readouterr().out
    folder = tmp_path / "profile"
    monkeypatch.setattr(sys, "argv", ["plan.py", str(folder)])
    runpy.run_path(str(EXAMPLES / "planner/plan.py"))
    shown = capsys.readouterr().out
    assert shown.partition("The profile is in")[0] == brief.partition("To keep")[0]
    _, _, _, *rows, _, _, _, last = shown.splitlines()
    plans = {name: list(map(int, row)) for name, row in _columns(rows)}
    assert list(plans) == ["chats", "documents", "agents"]
    (chats, documents, agents) = plans.values()
    assert documents[0] > chats[0] >= 1, "prefill engines"
    assert agents[1] > chats[1] >= 1, "decode engines"
    assert main(shlex.split(last.partition("select-planner ")[2])[:3]) == 0
    (folder / "decode_raw_data.json").write_text("mine")
    with pytest.raises(AssertionError):
        runpy.run_path(str(EXAMPLES / "planner/plan.py"))
    assert (folder / "decode_raw_data.json").read_text() == "mine"


def _columns(rows: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    for name, *_, prefill, decode, gpus, kept in map(str.split, rows):
        assert kept == "yes"
        yield name, [prefill, decode, gpus]


def test_the_selectors_find_the_engines_of_kubernetes() -> None:
    (deployment,) = yaml.safe_load_all((EXAMPLES / "kubernetes/vllm.yaml").read_text("utf-8"))
    template = deployment["spec"]["template"]
    selectors = yaml.safe_load(
        (EXAMPLES.parent / "deploy/kubernetes/shared/deployment.yaml").read_text("utf-8")
    )
    (container,) = selectors["spec"]["template"]["spec"]["containers"]
    (label,) = (
        one.removeprefix("--kubernetes-workers=")
        for one in container["args"]
        if one.startswith("--kubernetes-workers=")
    )
    assert [label] == [f"{k}={v}" for k, v in template["metadata"]["labels"].items()]

    pod = template | {"status": {"phase": "Running", "podIP": "10.0.0.1", "podIPs": []}}
    pod["metadata"] = template["metadata"] | {"name": "vllm-0", "namespace": "llm"}
    pod["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
    (found,) = workers_of_pod(msgspec.convert(pod, Pod))
    spec = found.spec
    (engine,) = template["spec"]["containers"]
    flags = dict(one.removeprefix("--").split("=", 1) for one in engine["args"] if "=" in one)
    events = json.loads(flags["kv-events-config"])
    assert spec is not None
    assert spec.model_name == flags["model"]
    assert spec.block_size == int(flags["block-size"])
    assert spec.max_num_batched_tokens == int(flags["max-num-batched-tokens"])
    assert spec.endpoint == f"http://10.0.0.1:{flags['port']}"
    assert [*spec.kv_events_endpoints.values()] == [
        events["endpoint"].replace("*", "10.0.0.1"),
    ]
    assert spec.replay_endpoint == events["replay_endpoint"].replace("*", "10.0.0.1")
