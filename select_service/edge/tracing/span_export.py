"""Exports spans to a collector: a bounded queue, and a thread that empties it.

A request leaves its facts here, which costs it a microsecond; everything else, from building
OpenTelemetry's objects to the network, happens in the thread. A slow, absent or broken collector
costs spans, which are counted, and never a request. `spans.py` stands before this, an exporter of
OpenTelemetry behind; only this file knows that SDK, and loads it when tracing is on.
"""

from __future__ import annotations

import logging
import os
import random
import re
import threading
from collections import deque
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from select_service.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import requests
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import SpanContext, TraceState

__all__ = ["Finished", "SpanExport", "TracingUnavailableError", "brief", "otlp_exporter"]

_log = logging.getLogger("select_service.tracing")
_exporters_log = logging.getLogger("opentelemetry")

TEXT_CHARS_MAX: Final = 256
"""Longer strings are cut: an id may be as long as a body."""

STATE_MEMBERS_MAX: Final = 32
"""Of a tracestate; W3C's limit."""

ANSWER_BYTES_MAX: Final = 4096
"""Bytes read of a collector's answer; the rest is ignored."""

_MEMBER: Final = re.compile(
    rb"[ \t]*([a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})"
    rb"=([ !-+\--<>-~]{0,255}[!-+\--<>-~])[ \t]*"
)
_INT64_MAX: Final = (1 << 63) - 1
_FAILED: Final = 500
_REFUSED: Final = 400
_SERVICE_NAME: Final = "service.name"
_PREFIX: Final = "select."


class TracingUnavailableError(Exception):
    """A prerequisite of tracing is missing."""


class Finished(NamedTuple):
    """A traced request that has been answered."""

    name: str
    trace_id: int
    span_id: int
    parent_id: int  # 0: no parent
    state: bytes
    began_ns: int  # since the epoch
    clock_ns: int  # the same moment by the clock of the steps
    ended_ns: int  # by the clock of the steps
    steps: Sequence[tuple[str, int]]
    status: int
    refusal: bytes  # the answer, if it is a refusal
    facts: Mapping[str, object]

    @property
    def spans(self) -> int:
        """How many spans it becomes."""
        return 1 + sum(name != "" for name, _ in self.steps)


class SpanExport:
    """Queues finished requests, and passes them to an exporter in a thread of its own."""

    def __init__(
        self, exporter: SpanExporter, *, queue_max: int, batch_max: int, interval_s: float
    ) -> None:
        """Create the queue; `start` starts the thread.

        Args:
            exporter: of OpenTelemetry's SDK.
            queue_max: most spans queued.
            batch_max: most spans sent at once.
            interval_s: how long spans wait to form a batch.
        """
        self._exporter = exporter
        self._queue_max = queue_max
        self._batch_max = min(batch_max, queue_max)
        self._interval_s = interval_s
        self._queue: deque[Finished] = deque()
        self._taken_in = 0  # spans; written by the loop only
        self._taken_out = 0  # written by the thread only: neither needs a lock
        self.dropped = 0
        self.exported = 0
        self.failed = 0
        self._wake = threading.Event()
        self._closing = False
        self._is_failing = False
        self._build = _Builder()
        self._thread = threading.Thread(target=self._run, name="span-export", daemon=True)

    @property
    def queued(self) -> int:
        """Spans in the queue."""
        return self._taken_in - self._taken_out

    def start(self) -> None:
        """Start to export. Idempotent."""
        if not self._thread.is_alive() and not self._closing:
            self._thread.start()

    def put(self, finished: Finished) -> None:
        """Queue a request, or count it as dropped. Never waits."""
        spans = finished.spans
        if self._closing or self.queued + spans > self._queue_max:
            self.dropped += spans
            return
        self._queue.append(finished)
        self._taken_in += spans
        if self.queued >= self._batch_max and not self._wake.is_set():
            self._wake.set()

    def close(self, timeout_s: float) -> None:
        """Export what is queued, within a time limit; the rest is dropped. Blocks. Idempotent."""
        self._closing = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            _log.warning("spans not exported in time", extra={"spans": self.queued})
        self._exporter.shutdown()  # wakes the thread from a retry delay
        _exporters_log.setLevel(logging.NOTSET)

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(self._interval_s)
            self._wake.clear()
            self._drain()
        self._drain()

    def _drain(self) -> None:
        while self._queue:
            batch, spans = [], 0
            while self._queue and spans < self._batch_max:
                batch.append(self._queue.popleft())
                spans += batch[-1].spans
            self._export(batch)
            self._taken_out += spans

    def _export(self, batch: Sequence[Finished]) -> None:
        built: list[ReadableSpan] = []
        try:
            for finished in batch:
                built += self._build(finished)
            is_done = self._exporter.export(built).name == "SUCCESS"
        except Exception:  # noqa: BLE001 - whatever it is, the next batch may succeed
            _log.debug("export failed", exc_info=True)
            is_done = False
        if is_done:
            self.exported += len(built)
        else:
            self.failed += max(len(built), len(batch))
        if is_done is self._is_failing:
            self._turn(is_failing=not is_done)

    def _turn(self, *, is_failing: bool) -> None:
        """Log changes between failing and working; the exporter would log each failed batch."""
        self._is_failing = is_failing
        if is_failing:
            _log.warning("spans cannot be exported")
            _exporters_log.setLevel(logging.CRITICAL + 1)
        else:
            _log.info("spans are exported again")
            _exporters_log.setLevel(logging.NOTSET)


class _Builder:
    """Builds OpenTelemetry's spans from finished requests."""

    def __init__(self) -> None:
        from opentelemetry import trace  # only if tracing is on
        from opentelemetry.sdk import resources
        from opentelemetry.sdk import trace as sdk
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._trace, self._span = trace, sdk.ReadableSpan
        resource = resources.Resource.create()
        if str(resource.attributes.get(_SERVICE_NAME, "")).startswith("unknown_service"):
            resource = resource.merge(resources.Resource({_SERVICE_NAME: "select-service"}))
        said: dict[str, str | int] = {"service.version": __version__, "process.pid": os.getpid()}
        self._resource = resources.Resource({**said}).merge(resource)
        self._scope = InstrumentationScope("select_service", __version__)
        self._flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
        self._random = random.SystemRandom().getrandbits

    def __call__(self, done: Finished) -> Iterator[ReadableSpan]:
        trace = self._trace
        state = trace.TraceState(_members(done.state))
        context = self._context(done, done.span_id, state, is_remote=False)
        parent = None
        if done.parent_id:
            parent = self._context(done, done.parent_id, state, is_remote=True)
        at = done.began_ns - done.clock_ns
        ended = done.ended_ns + at
        facts = {**done.facts, **_refusal(done.refusal), **_waited(done)}
        failed = done.status >= _FAILED
        if failed:
            facts["error.type"] = facts.get(_PREFIX + "refusal.code", str(done.status))
        yield self._span(
            name=done.name,
            context=context,
            parent=parent,
            resource=self._resource,
            attributes=_told(facts),
            kind=trace.SpanKind.SERVER,
            status=trace.Status(trace.StatusCode.ERROR if failed else trace.StatusCode.UNSET),
            start_time=done.began_ns,
            end_time=ended,
            instrumentation_scope=self._scope,
        )
        for name, began, until in _phases(done):
            yield self._span(
                name=name,
                context=self._context(done, self._random(64) or 1, state, is_remote=False),
                parent=context,
                resource=self._resource,
                attributes={},
                kind=trace.SpanKind.INTERNAL,
                start_time=began + at,
                end_time=until + at,
                instrumentation_scope=self._scope,
            )

    def _context(
        self, done: Finished, span_id: int, state: TraceState, *, is_remote: bool
    ) -> SpanContext:
        return self._trace.SpanContext(done.trace_id, span_id, is_remote, self._flags, state)


def otlp_exporter() -> SpanExporter:
    """Return the exporter that the OTEL_EXPORTER_OTLP_* variables describe.

    Raises:
        TracingUnavailableError: the extra `otel` is not installed, or the variables are invalid.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
            OTLPSpanExporter,
        )

        return OTLPSpanExporter(session=_session())
    except ImportError as error:
        needed = "'opentelemetry-sdk>=1.35' 'opentelemetry-exporter-otlp-proto-http>=1.35'"
        raise TracingUnavailableError(f"{error}: pip install {needed}") from error
    except (ValueError, OSError) as error:
        raise TracingUnavailableError(f"OTEL_EXPORTER_OTLP_*: {error}") from error


def _session() -> requests.Session:
    """Return an HTTP session that bounds how much of a collector's answer it reads."""
    import requests  # only if tracing is on
    from requests.adapters import HTTPAdapter

    class Brief(HTTPAdapter):
        def send(  # type: ignore[override]
            self,
            request: requests.PreparedRequest,
            **options: Any,
        ) -> requests.Response:
            answer = super().send(request, **{**options, "stream": True})
            said = b""
            for piece in answer.iter_content(ANSWER_BYTES_MAX):
                said += piece
                if len(said) > ANSWER_BYTES_MAX:
                    answer.raw.close()  # the only way to stop reading
                    break
            answer._content = said  # noqa: SLF001 - as reading it does
            return answer

    session = requests.Session()
    for scheme in ("http://", "https://"):
        session.mount(scheme, Brief())
    return session


def _members(state: bytes) -> list[tuple[str, str]]:
    """Return the valid members of a tracestate; none if there are too many."""
    found = [_MEMBER.fullmatch(part) for part in state.split(b",")]
    said = {one[1].decode(): one[2].decode() for one in found if one is not None}
    return list(said.items()) if len(said) <= STATE_MEMBERS_MAX else []


def _phases(done: Finished) -> Iterator[tuple[str, int, int]]:
    for (name, began), (_, until) in pairwise((*done.steps, ("", done.ended_ns))):
        if name:
            yield name, began, until


def _waited(done: Finished) -> dict[str, object]:
    waited = sum(until - began for name, began, until in _phases(done) if name == "wait")
    return {_PREFIX + "queue_wait_s": waited / 1e9} if waited else {}


def _refusal(body: bytes) -> dict[str, object]:
    """Extract the reason of a refusal from its body, in either format."""
    if not body:
        return {}
    decode: Callable[..., Any] = (
        msgspec.json.decode if body.startswith(b"{") else msgspec.msgpack.decode
    )
    try:
        said = decode(body, type=_Refusal)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    named = {f"{_PREFIX}refusal.{name}": getattr(said, name) for name in _Refusal.__struct_fields__}
    return {name: value for name, value in named.items() if value is not None}


class _Refusal(msgspec.Struct):
    code: str | None = None
    error: str | None = None
    gate: str | None = None
    policy: str | None = None


def brief(text: str) -> str:
    """Cut a text to `TEXT_CHARS_MAX`."""
    return text if len(text) <= TEXT_CHARS_MAX else text[:TEXT_CHARS_MAX] + "…"


def _told(facts: Mapping[str, object]) -> dict[str, Any]:
    return {name: _plain(value) for name, value in facts.items()}


def _plain(value: object) -> str | bool | int | float:
    """Convert a value to what OTLP can express: signed 64-bit integers, and UTF-8 text."""
    if isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return value if -_INT64_MAX <= value <= _INT64_MAX else str(value)
    return brief(str(value)).encode("utf-8", "replace").decode()
