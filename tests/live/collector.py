"""An OTLP collector in a thread: takes spans over HTTP, or misbehaves as it is set."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (  # type: ignore[import-untyped,unused-ignore]
    ExportTraceServiceRequest,
)

from tests.live.ports import HOST
from tests.wait import PATIENCE_S


@dataclass(frozen=True)
class Told:
    """One span as it arrived."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    state: str
    kind: int
    began_ns: int
    ended_ns: int
    failed: bool
    facts: dict[str, Any]
    of: dict[str, Any]  # the resource

    def __getitem__(self, name: str) -> Any:
        return self.facts["select." + name]


@dataclass
class Collector:
    """What has arrived so far."""

    port: int = 0
    spans: list[Told] = field(default_factory=list)
    posts: int = 0
    arrived: threading.Condition = field(default_factory=threading.Condition)
    behave: Callable[[BaseHTTPRequestHandler], bool] | None = None
    """Answers in place of the collector; False: it may answer."""

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def wait_for(self, holds: Callable[[], bool]) -> None:
        with self.arrived:
            assert self.arrived.wait_for(holds, PATIENCE_S), [one.name for one in self.spans]

    def servers(self) -> list[Told]:
        return [one for one in self.spans if one.kind == 2]

    def children(self, of: Told) -> list[Told]:
        found = [one for one in self.spans if one.parent_id == of.span_id]
        return sorted(found, key=lambda one: one.began_ns)

    def take(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers["content-length"]))
        with self.arrived:
            self.posts += 1
            self.arrived.notify_all()
        if self.behave is not None and self.behave(request):
            return
        assert request.path == "/v1/traces"
        message = ExportTraceServiceRequest.FromString(body)
        with self.arrived:
            self.spans += _read(message)
            self.arrived.notify_all()
        request.send_response(200)
        request.send_header("content-type", "application/x-protobuf")
        request.send_header("content-length", "0")
        request.end_headers()


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a port of its own."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.take(self)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer((HOST, 0), Handler) as server:
        server.daemon_threads = True
        collector.port = server.server_port
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()


def _read(message: Any) -> Iterator[Told]:
    for group in message.resource_spans:
        of = _facts(group.resource.attributes)
        for scope in group.scope_spans:
            for span in scope.spans:
                yield Told(
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.trace_state,
                    span.kind,
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    span.status.code == 2,
                    _facts(span.attributes),
                    of,
                )


def _facts(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}
