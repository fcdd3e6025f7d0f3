"""What people type: `select-service workers` and so on, of a running service."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from indexer import block_hashes, sequence_hashes, unpack_i64
from select_service.cli import main
from select_service.client import Client, Options
from tests.e2e.test_client import spec, url
from tests.live.server import Server
from tests.wait import PATIENCE_S

pytestmark = pytest.mark.e2e

ALTERNATE_SCREEN, LEFT_SCREEN = "\x1b[?1049h", "\x1b[?1049l"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("commands")
    with Server(folder / "log") as running:
        with Client(url(running)) as client:
            client.upsert_worker(spec(1, taints=["a"]))
            client.upsert_worker(spec(2, data_parallel_size=2))
        yield running


class Terminal:
    """Where commands are typed."""

    def __init__(
        self, capture: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self._capture = capture
        self._patch = monkeypatch

    def __call__(self, *arguments: str, stdin: str = "") -> tuple[int, str, str]:
        """Type a command; its exit code, and what it prints."""
        self._patch.setattr("sys.stdin", io.StringIO(stdin))
        try:
            code = main(arguments)
        except SystemExit as end:
            code = int(end.code or 0)
        output = self._capture.readouterr()
        return code, output.out, output.err


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Terminal:
    return Terminal(capsys, monkeypatch)


def test_a_session(server: Server, ask: Terminal) -> None:
    at = ("--url", url(server))
    code, out, err = ask("workers", *at)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split()[:4] == ["WORKER", "MODEL", "TENANT", "STATE"]
    assert "incomplete" in lines[2]
    assert "kv_events endpoint is required for dp_rank 1" in lines[2]

    code, out, _ = ask("call", "reserve", "--tokens", "0-31,7", *at, '{"reservation_id": "r"}')
    booked = json.loads(out)
    assert (code, booked["worker_id"], booked["isl_tokens"]) == (0, 1, 33)
    hashes = unpack_i64(sequence_hashes(block_hashes([*range(32), 7], 16)))
    assert booked["sequence_hashes"] == hashes  # numbers, whatever they came as

    code, out, _ = ask("loads", *at)
    assert (code, out.splitlines()[1].split()) == (
        *(0, ["default", "default", "1", "0", "1", "33", "2"]),
    )
    code, out, _ = ask("loads", "--json", *at)
    assert (code, json.loads(out)[0]["loads"][0]["active_requests"]) == (0, 1)

    code, out, _ = ask("explain", "r", *at)
    head, names, row, *below = out.splitlines()
    assert code == 0
    assert head == "r: placed on select_and_reserve; worker 1 rank 0 was the only candidate"
    row_of = dict(zip(names.replace("LEFT OUT", "OUT").split(), row.split(), strict=True))
    assert float(row_of["COST"]) == pytest.approx(
        float(row_of["PREFILL"]) - float(row_of["CREDIT"]) + float(row_of["DECODE"]), abs=0.011
    )
    assert any(line.startswith("  prefill_load_scale 1.0 ") for line in below)
    code, out, _ = ask("explain", *at)
    names, row, *_ = out.splitlines()
    listed = dict(zip(names.split(), row.split(), strict=True))
    assert (code, listed["DECISION"], listed["COST"]) == (0, "r", row_of["COST"])
    assert listed["MARGIN"] == "-", "nobody else was there"
    code, out, _ = ask("explain", "--json", *at)
    assert (code, json.loads(out)[0]["decision_id"]) == (0, "r")

    code, out, err = ask("explain", "other", *at)
    said, lists = err.splitlines()
    assert (code, out) == (1, "")
    assert said == (
        "select-service explain: decision other not found: "
        "at most the last 1024 are kept (--decision-ring)"
    )
    assert lists.startswith("`select-service explain` without an id lists")
    code, _, err = ask("explain", "other", "--json", *at)
    assert (code, json.loads(err)["code"]) == (1, "decision_not_found")

    code, _, err = ask("call", "select", "-", *at, stdin='{"token_ids": [1], "tenant_id": "x"}')
    assert (code, json.loads(err)["code"]) == (1, "unknown_model")
    assert json.loads(err)["details"]["reasons"], "why, as the service says it"
    code, out, _ = ask("call", "/leases", *at)
    assert (code, json.loads(out)["total"]) == (0, 0)
    code, out, _ = ask("call", "/workers", "--model-name", "nobody's", *at)
    assert (code, json.loads(out)) == (0, [])
    assert ask("call", "select", *at, "{}", "{}")[0] == 2
    assert ask("call", "select", *at, "--nonsense")[0] == 2
    for wrong in ("a", "5-1", "1,", "1-", "-1"):
        code, _, err = ask("call", "select", f"--tokens={wrong}", *at)
        assert code == 2
        assert "--tokens" in err
    code, out, _ = ask("call", "/reservations/r", "--method", "DELETE", *at)
    assert (code, json.loads(out)) == (0, {"status": "ok"})


def test_who_has_read_enough_gets_no_error(server: Server) -> None:
    read, write = os.pipe()
    os.close(read)  # as `… | head` does
    command = [sys.executable, "-m", "select_service", "workers", "--url", url(server)]
    with os.fdopen(write, "w") as out:
        done = subprocess.run(
            command, check=False, stdout=out, stderr=subprocess.PIPE, timeout=PATIENCE_S
        )
    assert (done.returncode, done.stderr) == (2, b"")


def test_a_worker_is_drained(server: Server, ask: Terminal) -> None:
    at = ("--url", url(server))
    code, out, _ = ask("drain", "1", "--reason", "upgrade", *at)
    status = json.loads(out)
    assert (code, status["drains"], status["reason"]) == (0, True, "upgrade")
    assert "draining" in ask("workers", *at)[1]
    assert json.loads(ask("drain", "1", "--status", *at)[1])["safe_to_terminate"]
    assert json.loads(ask("drain", "1", "--undo", *at)[1])["drains"] is False
    code, _, err = ask("drain", "9", *at)
    assert (code, err) == (1, "select-service drain: worker 9 not found\n")


@contextmanager
def watched(server: Server) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """`loads --watch` in a real pseudo-terminal, and our end of it."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "select_service", "loads", "--watch", "--every-s", "0.05"]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    watching = subprocess.Popen(
        [*command, "--url", url(server)],
        stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env=environment,
        preexec_fn=with_ctrl_c,  # noqa: PLW1509 - one signal, nothing else
    )  # fmt: skip
    os.close(theirs)
    try:
        yield watching, ours
        watching.send_signal(signal.SIGINT)
        assert LEFT_SCREEN in seen(ours, lambda text: LEFT_SCREEN in text)
        assert watching.wait(PATIENCE_S) == 0
        assert watching.stderr is not None
        assert watching.stderr.read() == b""
    finally:
        watching.kill()
        watching.communicate()
        os.close(ours)


def test_loads_are_watched_in_a_terminal(server: Server) -> None:
    """The table comes, changes in place, and Ctrl-C gives the terminal back."""
    with watched(server) as (_, ours):
        shown = seen(ours, lambda text: "prefill" in text and "│ 1 " in text)
        assert ALTERNATE_SCREEN in shown
        assert "│ 48 " not in shown
        options = Options.single_attempt(PATIENCE_S)  # none that the service does not receive
        with Client(url(server), options=options) as client, client.reserve(token_ids=range(48)):
            seen(ours, lambda text: "│ 48 " in text)


def test_who_watches_sees_the_service_go(tmp_path: Path) -> None:
    with Server(tmp_path / "log") as server, watched(server) as (watching, ours):
        seen(ours, lambda text: "prefill" in text)
        server.stop()
        seen(ours, lambda text: "may be old" in text)
        assert watching.poll() is None


def with_ctrl_c() -> None:
    """Undo what a shell does to jobs in its background: they would ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def seen(terminal: int, is_there: Callable[[str], bool]) -> str:
    """Read a terminal until something is there."""
    text = ""
    while not is_there(text):
        ready, _, _ = select.select([terminal], [], [], PATIENCE_S)
        assert ready, text
        text += os.read(terminal, 65536).decode(errors="replace")
    return text


def test_watching_needs_rich(
    server: Server, ask: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rich.live", None)
    code, _, err = ask("loads", "--watch", "--url", url(server))
    assert (code, err.split(": ")[1]) == (2, "--watch needs rich")


@pytest.mark.parametrize(
    ("before", "after", "remedy"),
    [
        ("https://", "", "What listens there has no TLS: try http://"),
        ("http://", "/console", "--url is the address of the service alone"),
        ("http://nosuchhost.invalid/", "", "There is no such host"),
    ],
)
def test_an_address_that_is_almost_right(
    before: str, after: str, remedy: str, server: Server, ask: Terminal
) -> None:
    host = url(server).removeprefix("http://") if "nosuch" not in before else ""
    code, out, err = ask("workers", "--url", before + host + after)
    assert (code in {1, 2}, out) == (True, "")
    assert err.splitlines()[-1].startswith(remedy), err


def test_somebody_else_listens_there(ask: Terminal) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            with listener.accept()[0] as connection:
                connection.recv(65_536)

        with ThreadPoolExecutor(1) as pool:
            pool.submit(hang_up)
            code, _, err = ask("doctor", "--url", f"http://127.0.0.1:{listener.getsockname()[1]}")
    assert code == 2
    assert err.splitlines()[-1].startswith("What listens there is no select-service")
    assert err.count("127.0.0.1") == 1


def test_a_worker_id_is_a_number(ask: Terminal) -> None:
    code, _, err = ask("drain", "abc")
    assert (code, err.splitlines()[-1].partition("worker_id: ")[2]) == (
        2,
        "'abc' is not a whole number",
    )


def test_nobody_there(ask: Terminal) -> None:
    code, _, err = ask("workers", "--url", "http://127.0.0.1:1")
    assert code == 2
    assert err.startswith("select-service workers: http://127.0.0.1:1: ConnectError")
    assert ask("call", "nonsense")[0] == 2
