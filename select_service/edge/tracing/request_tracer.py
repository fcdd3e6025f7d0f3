"""Traces requests: `http/application.py` calls it when one begins and when it is answered.

Created at the start; a service without tracing has none. `spans.py` keeps the spans.
"""

from __future__ import annotations

import logging
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TypeAlias

from opentelemetry.context import Context
from opentelemetry.propagators.textmap import Getter
from opentelemetry.trace import TraceState, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from typing_extensions import override

from select_service.edge.codec.encoder import encode
from select_service.edge.codec.responses import DurableResponse, Feed, Response
from select_service.edge.http.access_log import TRACE_IDS
from select_service.edge.http.traffic import CLIENT_GONE
from select_service.edge.tracing.spans import HERE, log_ids
from select_service.errors import ServiceError, ShuttingDown, problem

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence

    from opentelemetry.trace import SpanContext
    from starlette.types import Scope

    from select_service.edge.http.calls import Call
    from select_service.edge.tracing.spans import Span, Tracing

Origin: TypeAlias = "bytes | list[tuple[bytes, bytes]] | Scope"
"""Names the parent of a request: its header lines as sent, or parsed, or an ASGI scope that
`RequestTracer.note_parent` has seen."""

_QUIET: Final = frozenset(("/health", "/ready", "/metrics"))
"""Polled by machines: traced only with a parent."""

_FAILED: Final = 500
_REFUSED: Final = 400
_PARENT: Final = "select_service.parent"
_IDS: Final = "select_service_trace_ids"


class RequestTracer:
    """Begins and ends the span of each request that is sampled.

    Attributes:
        is_leaving: the process is about to end.
    """

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self.is_leaving = False

    def note_parent(self, scope: Scope) -> None:
        """Read the parent of an exchange, which is logged even if there will be no span."""
        scope[_PARENT] = parent = read_parent(scope["headers"])
        if parent is not None:
            scope[TRACE_IDS] = log_ids(parent.trace_id)

    def begin(self, call: Call, origin: Origin) -> Span | None:
        """Begin the span of a request, if it is sampled; nothing may be awaited before `end`.

        Log records and steps are attributed to it until then.
        """
        parent: SpanContext | None
        if isinstance(origin, bytes):
            if self._tracing.sampler.passes_over(origin):
                return None
            parent = parent_in(origin)
        else:
            parent = read_parent(origin) if isinstance(origin, list) else origin[_PARENT]
        route = call.route
        if parent is None and route.pattern in _QUIET:
            return None
        span = self._tracing.begin(parent)
        if span is None:
            return None
        span.method, span.pattern, span.params = route.method, route.pattern, call.params
        if not isinstance(origin, bytes | list):
            origin[TRACE_IDS] = span.log_ids
        self._tracing.recorder.current, HERE.ids = span.marks, span.log_ids
        return span

    def end(
        self, span: Span, answer: Response | Awaitable[Response], origin: Origin
    ) -> Response | Awaitable[Response]:
        """Return the answer of a request, and finish its span once that is given."""
        self._tracing.recorder.current = HERE.ids = None
        if isinstance(answer, Response):
            is_head = not isinstance(origin, bytes | list) and origin["method"] == "HEAD"
            if answer.stream is None or isinstance(answer, Feed) or is_head:
                self._finish(span, answer)  # a feed lasts as long as its reader, HEAD reads none
            else:
                answer.stream = self._watch(span, answer.status, answer.stream)
            return answer
        if isinstance(answer, DurableResponse):
            response = answer.response
            answer.written.add_done_callback(lambda disk: self._settled(span, disk, response))
            return answer
        return self._later(span, answer)

    @contextmanager
    def logging(self, error: Exception) -> Iterator[None]:
        """Attribute log records to the request that waited before it failed with this error."""
        before = HERE.ids
        HERE.ids = vars(error).get(_IDS, before)
        try:
            yield
        finally:
            HERE.ids = before

    def _finish(self, span: Span, answer: Response) -> None:
        status = answer.status
        self._tracing.finish(span, status, answer.body if status >= _REFUSED else b"")

    def _settled(self, span: Span, disk: asyncio.Future[None], answer: Response) -> None:
        error = ShuttingDown() if disk.cancelled() else disk.exception()
        if error is None:
            self._finish(span, answer)
        else:
            self._tracing.finish(span, *_failure(error))

    async def _watch(
        self, span: Span, status: int, stream: AsyncIterator[bytes]
    ) -> AsyncIterator[bytes]:
        outcome = CLIENT_GONE
        try:
            async for piece in stream:
                yield piece
            outcome = status
        except Exception:
            outcome = _FAILED
            raise
        finally:
            self._tracing.finish(span, outcome)

    async def _later(self, span: Span, answer: Awaitable[Response]) -> Response:
        status, body = CLIENT_GONE, b""
        try:
            response = await answer
            status = response.status
            body = response.body if status >= _REFUSED else b""
        except Exception as error:
            status, body = _failure(error)
            vars(error)[_IDS] = span.log_ids
            raise
        finally:
            if status == CLIENT_GONE and self.is_leaving:
                status, body = _failure(ShuttingDown())
            self._tracing.finish(span, status, body)
        return response


def _failure(error: BaseException) -> tuple[int, bytes]:
    """Return the status and body of an error's answer."""
    known = error if isinstance(error, ServiceError) else ServiceError("internal error")
    status, body = problem(known)
    return status, encode(body)


# Reads the parent of a request from its headers, with OpenTelemetry's W3C propagator. An invalid
# header begins a new trace, as the recommendation requires. Loaded only if tracing is on.

STATE_BYTES_MAX: Final = 512
"""Of tracestate: what everybody must pass on at least; a longer one is omitted."""

_SAID: Final = re.compile(
    rb"\r\n(traceparent|tracestate):[ \t]*+([\t -~]*+)(?=\r\n|\Z)", re.IGNORECASE
)
"""Never backtracks (`*+`): a line of blanks would hold the loop for most of a second."""
_NOTHING: Final = Context()

logging.getLogger("opentelemetry.trace").setLevel(logging.ERROR)
"""The propagator warns of what is invalid: clients would write our log."""


class _Headers(Getter["Sequence[tuple[bytes, bytes]]"]):
    """The headers of a request, names in lower case, as the propagator reads them."""

    @override
    def get(self, carrier: Sequence[tuple[bytes, bytes]], key: str) -> list[str] | None:
        name = key.encode()
        values = [value.decode("latin-1") for header, value in carrier if header == name]
        if key != "tracestate":
            return values if len(values) == 1 else None  # duplicates are invalid
        text = ",".join(values)
        if len(text) > STATE_BYTES_MAX:
            return None
        members = (member.strip(" \t").partition("=") for member in text.split(","))
        valid = TraceState([(member, value) for member, _, value in members])  # leaves out others
        return [valid.to_header()]

    @override
    def keys(self, carrier: Sequence[tuple[bytes, bytes]]) -> list[str]:
        return [name.decode("latin-1") for name, _ in carrier]


_HEADERS: Final = _Headers()
_extract: Final = TraceContextTextMapPropagator().extract


def read_parent(headers: Sequence[tuple[bytes, bytes]]) -> SpanContext | None:
    """Return the parent of a request; None: it has none.

    Args:
        headers: names in lower case.
    """
    parent = get_current_span(_extract(headers, _NOTHING, _HEADERS)).get_span_context()
    return parent if parent.is_valid else None


def parent_in(lines: bytes) -> SpanContext | None:
    """Return the parent of a request, from the lines of its head as sent."""
    found = _SAID.findall(lines)
    return read_parent([(name.lower(), value) for name, value in found]) if found else None
