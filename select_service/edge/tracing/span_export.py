"""Exports spans to a collector, through the batch processor of OpenTelemetry's SDK.

Spans are built from what a finished request leaves here: the SDK can only make them while they
last. A slow, absent or broken collector costs spans, which are counted, and never a request.
`spans.py` stands before this; the SDK is loaded when tracing is on.
"""

from __future__ import annotations

import logging
import os
import random
import threading
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import msgspec

from indexer.http_client import collector_session
from select_service.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import requests
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
    from opentelemetry.trace import SpanContext, TraceState

_log = logging.getLogger("select_service.tracing")
_exporters_log = logging.getLogger("opentelemetry")

TEXT_CHARS_MAX: Final = 256
"""Longer strings are cut: an id may be as long as a body."""

ANSWER_BYTES_MAX: Final = 4096
"""Bytes read of a collector's answer; the rest is ignored."""

_INT64_MAX: Final = (1 << 63) - 1
_FAILED: Final = 500
_SERVICE_NAME: Final = "service.name"
_PREFIX: Final = "select."


class TracingUnavailableError(Exception):
    """A prerequisite of tracing is missing."""


class FinishedRequest(NamedTuple):
    """A traced request that has been answered."""

    name: str
    trace_id: int
    span_id: int
    parent: SpanContext | None
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
    """Queues the spans of finished requests, and counts what becomes of them.

    The SDK's batch processor holds the queue and exports in a thread of its own. It does not report
    how many spans wait or are dropped; so those in the queue are counted here, and what does not
    fit is not passed on. It takes this for its exporter, to count outcomes.
    """

    def __init__(
        self, exporter: SpanExporter, *, queue_max: int, batch_max: int, interval_s: float
    ) -> None:
        """Start to export.

        Args:
            exporter: of OpenTelemetry's SDK.
            queue_max: most spans queued.
            batch_max: most spans sent at once.
            interval_s: how long spans wait to form a batch.
        """
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # only if tracing is on

        self._exporter = exporter
        self._queue_max = queue_max
        self._taken_in = 0  # spans; written by the loop only
        self._taken_out = 0  # written by the thread only: neither needs a lock
        self.dropped = 0
        self.exported = 0
        self.failed = 0
        self._is_failing = self._is_shut_down = False
        self._closing: threading.Thread | None = None
        self._build = _Builder()
        self._processor = BatchSpanProcessor(
            cast("SpanExporter", self),
            max_queue_size=queue_max,
            schedule_delay_millis=interval_s * 1e3,
            max_export_batch_size=min(batch_max, queue_max),
        )

    @property
    def queued(self) -> int:
        """Spans in the queue."""
        return self._taken_in - self._taken_out

    def put(self, finished: FinishedRequest) -> None:
        """Queue a request, or count it as dropped. Never waits."""
        count = finished.spans
        if self._closing is not None or self.queued + count > self._queue_max:
            self.dropped += count
            return
        self._taken_in += count
        for span in self._build(finished):
            self._processor.on_end(span)

    def close(self, timeout_s: float) -> None:
        """Export what is queued, within a time limit; the rest is dropped. Blocks. Idempotent."""
        if self._closing is not None:
            return
        # In a thread of its own: the SDK's time limit is not ours to set.
        self._closing = threading.Thread(target=self._processor.shutdown, daemon=True)
        self._closing.start()
        self._closing.join(timeout_s)
        if self._closing.is_alive():
            _log.warning("spans not exported in time", extra={"spans": self.queued})
            self.shutdown()
        _exporters_log.setLevel(logging.NOTSET)

    # -- as the processor's exporter ----------------------------------------------------------

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export a batch. Called by the processor's thread."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        try:
            result = self._exporter.export(spans)
        except Exception:  # noqa: BLE001 - whatever it is, the next batch may succeed
            _log.debug("export failed", exc_info=True)
            result = SpanExportResult.FAILURE
        is_done = result is SpanExportResult.SUCCESS
        if is_done:
            self.exported += len(spans)
        else:
            self.failed += len(spans)
        if is_done is self._is_failing:
            self._turn(is_failing=not is_done)
        self._taken_out += len(spans)
        return result

    def shutdown(self) -> None:
        """Shut down the exporter, which wakes it from a retry delay. Idempotent."""
        if not self._is_shut_down:
            self._is_shut_down = True
            self._exporter.shutdown()

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
        attributes: dict[str, str | int] = {
            "service.version": __version__,
            "process.pid": os.getpid(),
        }
        self._resource = resources.Resource({**attributes}).merge(resource)
        self._scope = InstrumentationScope("select_service", __version__)
        self._flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
        self._random = random.Random(random.SystemRandom().getrandbits(256)).getrandbits

    def __call__(self, done: FinishedRequest) -> Iterator[ReadableSpan]:
        trace, parent = self._trace, done.parent
        state = None if parent is None else parent.trace_state
        context = self._context(done, done.span_id, state)
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
            attributes=_attributes(facts),
            kind=trace.SpanKind.SERVER,
            status=trace.Status(trace.StatusCode.ERROR if failed else trace.StatusCode.UNSET),
            start_time=done.began_ns,
            end_time=ended,
            instrumentation_scope=self._scope,
        )
        for name, began, until in _phases(done):
            yield self._span(
                name=name,
                context=self._context(done, self._random(64) or 1, state),
                parent=context,
                resource=self._resource,
                attributes={},
                kind=trace.SpanKind.INTERNAL,
                start_time=began + at,
                end_time=until + at,
                instrumentation_scope=self._scope,
            )

    def _context(
        self, done: FinishedRequest, span_id: int, state: TraceState | None
    ) -> SpanContext:
        return self._trace.SpanContext(
            done.trace_id, span_id, is_remote=False, trace_flags=self._flags, trace_state=state
        )


def otlp_exporter(*, proxy_from_environment: bool = False) -> SpanExporter:
    """Return the exporter that the OTEL_EXPORTER_OTLP_* variables describe.

    Args:
        proxy_from_environment: reach the collector through the proxy that the environment names.

    Raises:
        TracingUnavailableError: the extra `otel` is not installed, or the variables are invalid.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
            OTLPSpanExporter,
        )

        return OTLPSpanExporter(session=_session(proxy_from_environment))
    except ImportError as error:
        needed = "'opentelemetry-sdk>=1.35' 'opentelemetry-exporter-otlp-proto-http>=1.35'"
        raise TracingUnavailableError(f"{error}: pip install {needed}") from error
    except (ValueError, OSError) as error:
        raise TracingUnavailableError(f"OTEL_EXPORTER_OTLP_*: {error}") from error


def _session(proxy_from_environment: bool) -> requests.Session:  # noqa: FBT001 - one caller
    """Return an HTTP session that bounds how much of a collector's answer it reads."""
    from requests.adapters import HTTPAdapter

    class Brief(HTTPAdapter):
        def send(  # type: ignore[override]
            self,
            request: requests.PreparedRequest,
            **options: Any,
        ) -> requests.Response:
            answer = super().send(request, **{**options, "stream": True})
            read = b""
            for piece in answer.iter_content(ANSWER_BYTES_MAX):
                read += piece
                if len(read) > ANSWER_BYTES_MAX:
                    answer.raw.close()  # the only way to stop reading
                    break
            answer._content = read  # noqa: SLF001 - as reading it does
            return answer

    names = ("HEADERS", "TRACES_HEADERS", "ENDPOINT", "TRACES_ENDPOINT")
    variables = {name: os.environ.get(f"OTEL_EXPORTER_OTLP_{name}", "") for name in names}
    has_credentials = any(
        text if name.endswith("HEADERS") else "@" in text for name, text in variables.items()
    )
    session = collector_session(
        has_credentials=has_credentials, from_environment=proxy_from_environment
    )
    for scheme in ("http://", "https://"):
        session.mount(scheme, Brief())
    return session


def _phases(done: FinishedRequest) -> Iterator[tuple[str, int, int]]:
    for (name, began), (_, until) in pairwise((*done.steps, ("", done.ended_ns))):
        if name:
            yield name, began, until


def _waited(done: FinishedRequest) -> dict[str, object]:
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
        refusal = decode(body, type=_Refusal)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    named = {
        f"{_PREFIX}refusal.{name}": getattr(refusal, name) for name in _Refusal.__struct_fields__
    }
    return {name: value for name, value in named.items() if value is not None}


class _Refusal(msgspec.Struct):
    code: str | None = None
    error: str | None = None
    gate: str | None = None
    policy: str | None = None


def brief(text: str) -> str:
    """Cut a text to `TEXT_CHARS_MAX`."""
    return text if len(text) <= TEXT_CHARS_MAX else text[:TEXT_CHARS_MAX] + "…"


def _attributes(facts: Mapping[str, object]) -> dict[str, Any]:
    return {name: _plain(value) for name, value in facts.items()}


def _plain(value: object) -> str | bool | int | float:
    """Convert a value to what OTLP can express: signed 64-bit integers, and UTF-8 text."""
    if isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return value if -_INT64_MAX <= value <= _INT64_MAX else str(value)
    return brief(str(value)).encode("utf-8", "replace").decode()
