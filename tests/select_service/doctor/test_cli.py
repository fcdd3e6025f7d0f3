"""`select-service doctor` against a real port and a Unix socket: text, JSON, exit codes."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from select_service import cli
from select_service.doctor.query import Answer
from select_service.doctor.report import format_report
from select_service.edge.driver.driver import Driver
from select_service.types import WorkerSpec
from select_service.types.doctor import Finding, Subject
from tests.coroutines import within
from tests.live.ports import HOST, free_port
from tests.live.tcp_server import tcp_server
from tests.select_service.edge.security.credentials_made import TokenFile
from tests.select_service.edge.serving import add_worker, listening

Capture = pytest.CaptureFixture[str]


async def run(*arguments: str) -> int:
    return await asyncio.to_thread(cli.main, ["doctor", *arguments])


def later(service: Driver, seconds: float) -> None:
    """Let a finding be as old as that."""
    doctor = service.doctor()
    clock = doctor._clock
    doctor._clock = lambda: clock() + seconds


def url(port: int) -> tuple[str, str]:
    return "--url", f"http://{HOST}:{port}"


@within(listening)
async def test_a_healthy_service(port: int, service: Driver, *, capsys: Capture) -> None:
    add_worker(service)
    assert await run(*url(port)) == 0
    output = capsys.readouterr().out
    assert "ready; 1 of 1 workers schedulable\nNo " in output
    assert ("No problems found." in output) is ("Seen just now" not in output)
    assert await run(*url(port), "--json") == 0
    output = json.loads(capsys.readouterr().out)
    assert isinstance(output.pop("suspected"), list)  # nobody publishes events here
    assert output == {
        "ready": True,
        "waiting_for": [],
        "findings": [],
        "findings_left_out": 0,
    }


@within(listening)
async def test_what_may_pass_is_distinguished(
    port: int, service: Driver, *, capsys: Capture
) -> None:
    add_worker(service)
    service.upsert_worker(WorkerSpec(worker_id=7, endpoint="http://w7"))
    assert await run(*url(port)) == 0
    found, _, suspected = capsys.readouterr().out.partition("Seen just now, and a problem if it")
    assert found.endswith("\nNo lasting problem found yet.\n\n")
    assert "No problems found" not in found
    assert "worker-incomplete  worker 7" in suspected
    assert re.search(r"a problem if it\s+lasts\s+10\s+s\s+longer", suspected)


@within(listening)
async def test_findings_for_people(port: int, service: Driver, *, capsys: Capture) -> None:
    add_worker(service)
    service.upsert_worker(WorkerSpec(worker_id=(1 << 64) - 1, endpoint="http://w2"))
    await service.doctor().examine()
    later(service, 20.0)
    assert await run(*url(port)) == 1
    output = capsys.readouterr().out
    assert "ERROR   worker-incomplete  worker 18446744073709551615, model default" in output
    assert "  what    block_size must be greater than 0" in output
    assert "(for 20 s)" in output
    assert "  why     The worker's record lacks something" in output
    assert "  remedy  Register it again" in output
    assert max(map(len, output.splitlines())) <= 100


@within(listening)
async def test_findings_for_programs(port: int, service: Driver, *, capsys: Capture) -> None:
    await service.doctor().examine()
    later(service, 70.0)
    assert await run(*url(port), "--json") == 1
    report = json.loads(capsys.readouterr().out)
    (finding,) = report["findings"]
    assert finding.pop("since_s") >= 70
    assert finding == {
        "code": "no-workers",
        "severity": "warning",
        "subject": {},
        "what": "no schedulable worker",
        "why": finding["why"],
        "remedy": finding["remedy"],
    }
    assert report["ready"] is False
    assert report["waiting_for"] == ["schedulable_worker"]


async def test_over_a_unix_socket(capsys: Capture, tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    async with listening(uds=path) as (_, service, _):
        add_worker(service)
        assert await run("--uds", path) == 0
        assert capsys.readouterr().out.startswith(path)


async def test_a_service_that_asks_for_a_token(capsys: Capture, tmp_path: Path) -> None:
    file = TokenFile(tmp_path / "tokens")
    (tmp_path / "reader").write_text(file.add("reader", "read") + "\n")
    (tmp_path / "gateway").write_text(file.add("gateway", "select"))
    (tmp_path / "strange").write_bytes(b"\xff")
    (tmp_path / "long").write_text("two\nlines")
    async with listening(**file.setting) as (port, service, _):
        add_worker(service)
        assert await run(*url(port), "--token-file", str(tmp_path / "reader")) == 0
        assert "schedulable\nNo " in capsys.readouterr().out
        for name in ("gateway", "strange", "long", "none"):
            assert await run(*url(port), "--token-file", str(tmp_path / name)) == 2
            assert "token" in capsys.readouterr().err or name != "gateway"
        assert await run(*url(port)) == 2
        assert "--token-file" in capsys.readouterr().err


@within(listening)
async def test_ports_seen_from_here(port: int, service: Driver, *, capsys: Capture) -> None:
    nowhere = free_port()
    add_worker(
        service,
        endpoint=f"http://{HOST}:{port}",
        kv_events_endpoint=f"tcp://{HOST}:{nowhere}",
    )
    # open, and silent: libzmq takes an answer of HTTP for messages of its first protocol
    with socket.create_server((HOST, 0)) as silent:
        events = f"tcp://{HOST}:{silent.getsockname()[1]}"
        add_worker(service, 2, endpoint="ray://opaque", kv_events_endpoint=events)
        unused = f"tcp://{HOST}:{free_port()}"
        add_worker(service, 3, endpoint="ray://3", kv_events="none", kv_events_endpoint=unused)
        assert await run(*url(port), "--probe", "--json") == 1
        (finding,) = json.loads(capsys.readouterr().out)["findings"]
        assert finding["code"] == "unreachable-from-here"
        assert finding["subject"]["worker_id"] == 1
        assert str(nowhere) in finding["what"]
        with socket.create_server((HOST, nowhere)):  # the port is open
            assert await run(*url(port), "--probe", "--json") == 0
        assert json.loads(capsys.readouterr().out)["findings"] == []


@within(listening)
async def test_a_worker_may_say_that_it_has_no_http_endpoint(
    port: int, service: Driver, *, capsys: Capture
) -> None:
    """Every engine of the demo was a finding, and the doctor ended with 1 beside it."""
    add_worker(service, endpoint="http://engine-1.invalid:8000", kv_events="none")
    assert await run(*url(port), "--probe") == 0
    assert "No problems found." in capsys.readouterr().out


def test_an_address_of_no_kind_is_named_once(capsys: Capture) -> None:
    assert cli.main(["doctor", "--url", "localhost:1"]) == 2
    why = "neither http://, https:// nor unix:/path (is http://localhost:1 meant?)"
    assert capsys.readouterr().err == f"localhost:1: {why}\n"


def test_nobody_there(capsys: Capture, tmp_path: Path) -> None:
    for arguments in (
        url(free_port()),
        ("--uds", str(tmp_path / "none")),
        ("--url", "ftp://x"),
        ("--url", "http://[:1"),
    ):
        assert cli.main(["doctor", *arguments]) == 2
        assert capsys.readouterr().err


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ncontent-length: 49\r\n\r\n"
        b'{"ready":true,"schedulable_workers":0,"workers":[]}'[:-2]
        + b"  ",
        b"HTTP/1.1 200 OK\r\ncontent-length: 51\r\n\r\n"
        b'{"ready":true,"schedulable_workers":0,"workers":[]}',
        b"\x00\x01",
        b'HTTP/1.1 200 OK\r\ncontent-length: 29\r\n\r\n{"findings":[{"code":"\xff"}]}',
    ],
    ids=["status", "shape", "json", "no-findings", "no-http", "no-text"],
)
def test_somebody_else_there(answer: bytes, capsys: Capture) -> None:
    async def scenario() -> None:
        async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)

        async with tcp_server(reply) as port:
            assert await run(*url(port)) == 2

    asyncio.run(scenario())
    assert capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["--timeout-s=0", "--timeout-s=x", "--nonsense"])
def test_wrong_usage(wrong: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["doctor", wrong])


def test_names_that_a_terminal_would_obey() -> None:
    """Who may register a worker may not write to the terminals of those who ask about it."""
    subject = Subject(worker_id=1, model_name="m\x1b]0;owned\x07", endpoint="tcp://\u202eh:1")
    finding = Finding("c", "error", subject, "\x1b[2JNo problems found.", "why", "remedy", 0.0)
    text = format_report("s", Answer(ready=True, schedulable_workers=1, workers=[]), [finding], 80)
    assert text.replace("\n", "").isprintable()
    assert "m\\x1b]0;owned" in text


def test_findings_of_one_kind_are_reported_together() -> None:
    """Of a thousand engines that are down cause and remedy are read once."""
    answer = Answer(ready=True, schedulable_workers=1, workers=[])
    found = [
        Finding("down", "error", Subject(worker_id=n), f"no {n}", "why", "remedy", 70.0)
        for n in range(200)
    ]
    other = Finding("odd", "warning", Subject(worker_id=7), "what", "why", "remedy", 0.0)
    text = format_report("s", answer, [*found[:100], other, *found[100:]], 80)
    assert text.count("remedy  remedy") == 2
    assert "ERROR   down  200 findings\n  what    worker 0: no 0 (for 1 min)\n" in text
    assert "          worker 199: no 199 (for 1 min)\n  why     why\n" in text
    assert "WARNING odd  worker 7\n  what    what\n" in text


def test_tls_files_that_are_none(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "ca").write_text("nothing")
    for flags in (("--ca", str(tmp_path / "ca")), ("--cert", str(tmp_path / "none"))):
        assert cli.main(["doctor", "--url", "https://localhost:1", *flags]) == 2
        assert flags[1] in capsys.readouterr().err


def test_who_has_waited_long_enough(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def ask(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("select_service.doctor.cli.ask", ask)
    assert cli.main(["doctor"]) == 2
    assert capsys.readouterr().err == ""


def test_what_was_left_out_is_said() -> None:
    text = format_report(
        "s", Answer(ready=True, schedulable_workers=1, workers=[], findings_left_out=7), [], 80
    )
    assert "and 7 more" in text
