"""Processes under test: in which environment they run."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest

from bench.compare.servers import Contender, InterpreterUnfit, RunningServer, contenders, is_ours
from bench.compare.targets import target_of
from bench.load.http import BadAnswer

# Serves nothing but /health, and says there whether it may keep bytecode.
SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if not sys.dont_write_bytecode else 500)
        self.send_header("Content-Length", "0")
        self.end_headers()

HTTPServer(("127.0.0.1", int(sys.argv[-1])), Health).serve_forever()
"""


def test_bytecode_is_kept_as_where_a_package_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    with RunningServer(Contender("one", (sys.executable, "-c", SERVER))) as server:
        assert server.started_in_s > 0.0


def test_a_port_that_another_process_took_is_no_failure(tmp_path: Path) -> None:
    """Between our look at what is free and the server's start anybody may take it."""
    once = f"""
import pathlib
seen = pathlib.Path({str(tmp_path / "seen")!r})
if not seen.exists():
    seen.touch()
    raise SystemExit("cannot listen: Address already in use")
"""
    with RunningServer(Contender("one", (sys.executable, "-c", once + SERVER))) as server:
        assert server.started_in_s > 0.0
    for text, error in (("Address already in use", "5 free ports"), ("no such flag", "no such")):
        command = sys.executable, "-c", f"raise SystemExit({text!r})"
        with pytest.raises(BadAnswer, match=error), RunningServer(Contender("one", command)):
            pass


def test_ours_is_run_by_another_interpreter_with_what_is_installed_for_this_one() -> None:
    python = Path(sys.base_prefix) / "bin" / "python{}.{}".format(*sys.version_info)
    name = f"ours-pure@{python}"
    (one,) = contenders([name])
    assert (one.name, one.python) == (name, str(python))
    assert one.environment["SELECT_SERVICE_PURE"] == "1"
    with RunningServer(one) as server:
        assert server.started_in_s > 0.0
    assert is_ours(name)
    assert target_of("W2 select, 60-95% overlap, isl 2048", name) is None
    assert target_of("W2 select, 60-95% overlap, isl 2048", f"ours@{python}") == 0.5


def test_another_interpreter_is_of_this_version(tmp_path: Path) -> None:
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\necho cpython-399\n")
    other.chmod(0o700)
    installed = sysconfig.get_config_var("SOABI")
    with pytest.raises(
        InterpreterUnfit, match=f"modules of cpython-399, installed are {installed}"
    ):
        contenders([f"ours@{other}"])
    with pytest.raises(InterpreterUnfit, match="nowhere"):
        contenders([f"ours@{tmp_path}/nowhere"])
