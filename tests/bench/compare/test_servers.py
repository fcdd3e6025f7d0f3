"""Processes under test: in which environment they run."""

from __future__ import annotations

import sys

import pytest

from bench.compare.servers import Contender, RunningServer

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
