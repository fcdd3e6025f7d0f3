"""The tutorial with two vLLM processes; where a real engine would answer, a stub does."""

from __future__ import annotations

import json
import re
import shlex
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import pytest

from tests.live.server import Server
from tests.readme.document import DOCS, PORT_IN_TEXT, blocks, run_program

PAGE: Final = DOCS / "warm-hits.md"
TOKENS: Final = [*range(64)]


def commands(name: str) -> list[list[str]]:
    """The words behind each use of a command."""
    shells = "".join(text for language, text in blocks(PAGE) if language == "sh")
    joined = shells.replace("\\\n", " ")
    found = re.findall(rf"^(?:\w+=\w+ )?{name} ((?:[^'\n]|'[^']*')*)", joined, re.MULTILINE)
    return [shlex.split(one) for one in found]


def registrations() -> list[dict[str, Any]]:
    """The records that are sent, of the engines of vLLM."""
    return [json.loads(words[-1]) for words in commands("curl") if "-d" in words]


def after(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_the_engines_publish_where_the_workers_say() -> None:
    engines, workers = commands("vllm"), registrations()
    assert len(engines) == len(workers) == 2
    for words, worker in zip(engines, workers, strict=True):
        published = json.loads(after(words, "--kv-events-config"))
        assert worker["block_size"] == int(after(words, "--block-size"))
        assert worker["endpoint"].endswith(":" + after(words, "--port"))
        for name, field in (("endpoint", "kv_events_endpoint"), ("replay_endpoint",) * 2):
            assert published[name].split(":")[-1] == worker[field].split(":")[-1]


class _Engine(BaseHTTPRequestHandler):
    """Answers as vLLM does, as far as the program reads."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            assert asked["prompt"].endswith("?")
            answer: dict[str, Any] = {"count": len(TOKENS), "tokens": TOKENS}
        else:
            assert (self.path, asked["prompt"]) == ("/v1/completions", TOKENS)
            answer = {"usage": {"prompt_tokens_details": {"cached_tokens": 48}}}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def engine() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Engine) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.e2e
def test_the_program(engine: str, tmp_path: Path) -> None:
    (source,) = (text for language, text in blocks(PAGE) if language == "py")
    with Server(tmp_path / "log") as server:
        for worker in registrations():
            record = worker | {"endpoint": engine}
            assert b'"lifecycle":"schedulable"' in server.request("POST", "/workers", record).raw
        source = source.replace("http://localhost:8000", engine)
        code, output, problems = run_program(source, tmp_path, server.port)
        assert code == 0, problems
        line = f"{engine}: 64 tokens, predicted cached 0, really 48\n"
        assert output == line * source.count('?"')
        loads: Any = server.request("GET", "/loads").json
        assert {row["active_requests"] for row in loads[0]["loads"]} == {0}
        for words in commands("curl"):
            if "-X" in words:
                path = words[-1].removeprefix(PORT_IN_TEXT)
                server.request(after(words, "-X"), path)
        assert server.request("GET", "/workers").json == [], "the page leaves no worker behind"
