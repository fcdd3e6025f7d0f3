"""The examples of README.md and its chapters do what is said, in order, against a fresh service."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from select_service.core.pricing.policy import _Class, _Profile
from tests.contract.comparison import mismatch
from tests.live.http import exchange_raw
from tests.live.ports import free_port
from tests.live.server import OURS_EXTRA, Server
from tests.readme import document


@pytest.mark.e2e
@pytest.mark.parametrize("file", document.with_exchanges(), ids=lambda one: one.stem)
def test_console_examples(file: Path, tmp_path: Path) -> None:
    examples = document.exchanges(file)
    if file not in {document.README, document.TOUR}:  # a chapter goes on where the tour ended
        examples = [*document.exchanges(document.TOUR), *examples]
        assert len(examples) > 10
    args = (*OURS_EXTRA, "--replica-sync-port", str(free_port()))  # the documents' are the defaults
    with Server(tmp_path / "service.log", args=args) as server:
        for example in examples:
            answer = exchange_raw(
                server.port, example.method, example.path, example.body, example.headers
            )
            found = {f"{name}: {value}".lower() for name, value in answer.headers.items()}
            assert {line.lower() for line in example.expected_headers} <= found, example.text
            problem = mismatch(example.path, example.expected, answer.json)
            assert problem is None, f"{example.text}\n{problem}\n{answer.raw.decode()}"


@pytest.mark.e2e
def test_the_policy_file(tmp_path: Path) -> None:
    blocks = document.blocks(document.DOCS / "admission.md")
    (text,) = (text for language, text in blocks if language == "yaml")
    for name in (*_Profile.__struct_fields__, *_Class.__struct_fields__, "models"):
        assert f"{name}:" in text, "every key is shown"
    path = tmp_path / "policy.yaml"
    path.write_text(text, "utf-8")
    env = {"DYN_ROUTER_POLICY_CONFIG": str(path), "DYN_USE_KV_EVENTS": "false"}
    with Server(tmp_path / "service.log", env=env) as server:
        worker = {"worker_id": 1, "endpoint": "http://w", "block_size": 16}
        for number, model in enumerate(("any", "tiny")):
            record = server.request(
                "POST", "/workers", worker | {"worker_id": number, "model_name": model}
            )
            assert b'"lifecycle":"schedulable"' in record.raw, record.raw


@pytest.mark.e2e
@pytest.mark.parametrize("number", range(len(document.programs())))
def test_python_examples(number: int, tmp_path: Path) -> None:
    program = document.programs()[number]
    with contextlib.ExitStack() as stack:
        port = None
        if document.PORT_IN_TEXT in program.source:
            port = stack.enter_context(Server(tmp_path / "service.log")).port
        code, output, problems = document.run_program(program.source, tmp_path, port)
    assert (output, code) == (program.expected, 0), problems
