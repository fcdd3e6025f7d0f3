"""The command, end to end: with a service of its own, and where there is none."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from select_service.demo import service_process
from select_service.demo.cli import main
from select_service.demo.client import SelectorClient
from select_service.demo.service_process import ServiceDidNotStart, ServiceProcess, free_port
from select_service.demo.view import PlainView
from select_service.edge.security.tokens import new_token
from tests.live.server import Server
from tests.wait import PATIENCE_S

if TYPE_CHECKING:
    from select_service.demo.view import Board


@pytest.mark.e2e
def test_the_demo_succeeds_against_the_service(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["demo", "--requests", "60", "--rate", "60", "--engines", "3", "--plain"])
    output = capsys.readouterr().out
    assert status == 0, output
    assert "60 of 60 finished" in output
    assert "load           back to zero" in output
    assert "verdict        ok" in output


def test_without_a_service_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert main(["demo", "--requests", "1", "--plain", "--url", url]) == 1
    shown = capsys.readouterr()
    assert shown.out == "", "no legend of a table that there is none of"
    assert "demo:" in shown.err
    assert "Is it running?" in shown.err


@pytest.mark.e2e
def test_it_shows_the_token_that_a_service_asks_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = tmp_path / "tokens"
    line = {"name": "demo", "token": new_token()[0], "scopes": ["admin"]}
    tokens.write_text(json.dumps(line) + "\n")
    tokens.chmod(0o600)
    with Server(tmp_path / "log", args=("--token-file", str(tokens))) as server:
        flags = ["demo", "--requests", "10", "--rate", "40", "--engines", "2", "--plain"]
        flags += ["--url", f"http://127.0.0.1:{server.port}"]
        assert main(flags) == 1
        assert "--token-file" in capsys.readouterr().err
        main([*flags, "--token-file", str(tokens)])
        output = capsys.readouterr()  # how well hits were foretold depends on how busy we are
        assert ("back to zero" in output.out, output.err) == (True, ""), output
    assert main([*flags, "--token-file", str(tmp_path / "nowhere")]) == 1
    assert "nowhere: No such file" in capsys.readouterr().err


@pytest.mark.parametrize("argument", ["--requests=0", "--rate=0", "--rate=inf", "--engines=x"])
def test_bad_numbers_are_usage_errors(argument: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["demo", argument])
    assert caught.value.code == 2


@pytest.mark.parametrize("url", ["http://me:secret@h", "http://h/?token=secret", "h:8092"])
def test_an_address_that_cannot_be_asked_is_a_usage_error(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["demo", "--url", url])
    assert caught.value.code == 2
    errors = capsys.readouterr().err
    assert "--url" in errors
    assert "secret" not in errors


def test_without_its_extra_it_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    assert main(["demo"]) == 1
    assert "pip install 'rich>=13.7'" in capsys.readouterr().err


@pytest.mark.e2e
def test_on_a_terminal_there_is_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    status = main(
        ["demo", "--requests", "20", "--rate", "60", "--engines", "2", "--restart-every", "0"]
    )
    output = capsys.readouterr().out
    assert status == 0, output
    assert "last decisions" in output
    assert "verdict        ok" in output


@pytest.mark.e2e
def test_ctrl_c_ends_an_endless_run_with_its_summary(capsys: pytest.CaptureFixture[str]) -> None:
    interrupted: list[bool] = []

    def interrupt(self: PlainView, board: Board) -> None:
        if board.finished >= 3 and not interrupted:
            interrupted.append(True)
            signal.raise_signal(signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlainView, "show", interrupt)
        patch.setattr(PlainView, "interval_s", 0.05)
        status = main(["demo", "--rate", "60", "--restart-every", "0", "--plain"])
    output = capsys.readouterr().out
    assert status == 0, output
    assert "restarts       0" in output


def _demo(*flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "select_service", "demo", "--plain", "--engines", "2", *flags]
    hangs_up = partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)  # also under nohup
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hangs_up,  # noqa: PLW1509 - this process has one thread
    )


def _until_busy(demo: subprocess.Popen[str]) -> None:
    assert demo.stdout is not None
    assert any(re.search(r" [1-9]\d*/\d+ done", line) for line in demo.stdout), "it has ended"


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_demo_that_is_ended_leaves_nothing_behind(number: signal.Signals, tmp_path: Path) -> None:
    """A supervisor ends it, or its terminal is closed."""
    with Server(tmp_path / "log") as server:
        with _demo("--url", f"http://127.0.0.1:{server.port}") as demo:
            _until_busy(demo)
            demo.send_signal(number)
            _, said = demo.communicate(timeout=PATIENCE_S)
        assert (demo.returncode, said) == (128 + number, "")
        assert server.request("GET", "/workers").json == []


@pytest.mark.e2e
def test_a_service_of_its_own_ends_with_a_demo_that_is_ended() -> None:
    with _demo() as demo:
        _until_busy(demo)
        (service,) = Path(f"/proc/{demo.pid}/task/{demo.pid}/children").read_text().split()
        demo.terminate()
        demo.communicate(timeout=PATIENCE_S)
    assert not Path(f"/proc/{service}").exists()


@pytest.mark.e2e
def test_a_demo_takes_out_what_a_killed_one_left_and_starts_beside_no_other(tmp_path: Path) -> None:
    with Server(tmp_path / "log") as server:
        flags = ("--url", f"http://127.0.0.1:{server.port}")
        with _demo(*flags, "--rate", "100") as killed:
            _until_busy(killed)
            with _demo(*flags) as second:
                _, said = second.communicate(timeout=PATIENCE_S)
            assert second.returncode == 1
            assert "another demo runs at this service" in said
            killed.kill()
        with _demo(*flags, "--requests", "10", "--restart-every", "0") as third:
            output, said = third.communicate(timeout=PATIENCE_S)
        assert "killed left there: 990001, 990002" in said
        assert "load           back to zero" in output, output


def test_a_service_that_cannot_start_shows_its_last_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_process, "_COMMAND", ("-c", "raise SystemExit('no luck')"))

    async def start() -> None:
        async with ServiceProcess():
            raise AssertionError

    with pytest.raises(ServiceDidNotStart, match="no luck"):
        asyncio.run(start())


@pytest.mark.e2e
def test_a_service_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def deaf(self: SelectorClient) -> bool:
        return False

    monkeypatch.setattr(SelectorClient, "healthy", deaf)
    monkeypatch.setattr(service_process, "_START_TIMEOUT_S", 0.1)

    async def start() -> None:
        async with ServiceProcess():
            raise AssertionError

    with pytest.raises(ServiceDidNotStart):
        asyncio.run(start())


def test_a_service_that_will_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not ours: a process that ignores SIGTERM and answers nothing."""
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    monkeypatch.setattr(service_process, "_START_TIMEOUT_S", 1.0)
    monkeypatch.setattr(service_process, "_STOP_TIMEOUT_S", 0.1)
    monkeypatch.setattr(service_process, "_COMMAND", ("-c", stubborn))

    async def start() -> None:
        async with ServiceProcess():
            raise AssertionError

    with pytest.raises(ServiceDidNotStart):
        asyncio.run(start())
