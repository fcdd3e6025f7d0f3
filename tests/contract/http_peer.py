"""The strange `--indexer-peers` of a transcript: an HTTP server with one answer to everything."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.live.ports import HOST


@contextlib.contextmanager
def http_peer(says: Mapping[str, Any]) -> Iterator[None]:
    """Answer as `says` says: `listen`, and `json`, or `status` and `text`."""
    text = json.dumps(says["json"]) if "json" in says else says["text"]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = text.encode()
            self.send_response(says.get("status", 200))
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer((HOST, says["listen"]), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
