"""The door and the fast lane of a service with tracing: they also report requests to `spans.py`.

Chosen at the start; a service without tracing uses neither.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from select_service.edge.codec.encoder import encode
from select_service.edge.codec.responses import DurableResponse, Feed, Response
from select_service.edge.http.access_log import TRACE_IDS
from select_service.edge.http.application import Application
from select_service.edge.http.fast_lane import READ_BYTES_MAX, FastLane
from select_service.edge.http.traffic import CLIENT_GONE
from select_service.edge.tracing.propagation import parent_in, read_parent
from select_service.edge.tracing.spans import HERE, log_ids
from select_service.errors import ServiceError, ShuttingDown, problem

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator, Awaitable, Iterator

    from opentelemetry.trace import SpanContext
    from starlette.types import Receive, Scope, Send

    from select_service.edge.console.console_app import ConsoleApp
    from select_service.edge.http.api import Api
    from select_service.edge.http.calls import Call, Head
    from select_service.edge.http.traffic import Traffic
    from select_service.edge.security.authority import Authority
    from select_service.edge.tracing.spans import Span, Tracing

__all__ = ["TracedApplication", "TracedLane"]

_QUIET: Final = frozenset(("/health", "/ready", "/metrics"))
"""Polled by machines: traced only with a parent."""

_FAILED: Final = 500
_REFUSED: Final = 400


class TracedApplication(Application):
    """Answers like `Application`, and traces some requests."""

    def __init__(
        self,
        api: Api,
        traffic: Traffic,
        tracing: Tracing,
        *,
        max_body_bytes: int,
        access_log: bool = False,
        authority: Authority | None = None,
        booth: ConsoleApp | None = None,
    ) -> None:
        super().__init__(
            api,
            traffic,
            max_body_bytes=max_body_bytes,
            access_log=access_log,
            authority=authority,
            booth=booth,
        )
        self.tracing = tracing
        self.parent: SpanContext | None = None
        """The parent of the request in `answer_now` or `_do`; set by their callers."""
        self.lines = b""
        """Or the header lines from which the parent is still to be read."""

    @override
    def answer_now(self, call: Call, head: Head, body: bytes) -> Response | Awaitable[Response]:
        if self.lines and self.tracing.sampler.passes_over(self.lines):
            return super().answer_now(call, head, body)
        span = self._begin(call)
        if span is None:
            return super().answer_now(call, head, body)
        with self._working_on(span):
            answer = super().answer_now(call, head, body)
        return self._follow(span, answer)

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parent = read_parent(scope["headers"]) if scope["type"] == "http" else None
        scope[_PARENT] = parent
        if parent is not None:
            scope[TRACE_IDS] = log_ids(parent.trace_id)
        await super().__call__(scope, receive, send)

    @override
    def _do(
        self, call: Call, head: Head, body: bytes, scope: Scope
    ) -> Response | Awaitable[Response]:
        self.parent = scope[_PARENT]
        try:
            span = self._begin(call)
        finally:
            self.parent = None
        if span is None:
            return super()._do(call, head, body, scope)
        scope[TRACE_IDS] = span.log_ids
        with self._working_on(span):
            answer = super()._do(call, head, body, scope)
        if scope["method"] == "HEAD" and isinstance(answer, Response):
            self._finish(span, answer)  # even a stream, which nobody will read
            return answer
        return self._follow(span, answer)

    @override
    def fault(self, error: Exception, api: Api, method: str, raw_path: bytes) -> Response:
        ids = vars(error).get(_IDS)  # set if it waited before it failed
        if ids is None:
            return super().fault(error, api, method, raw_path)
        HERE.ids = ids
        try:
            return super().fault(error, api, method, raw_path)
        finally:
            HERE.ids = None

    @contextmanager
    def _working_on(self, span: Span) -> Iterator[None]:
        """Attribute log records and steps to a span; nothing may be awaited inside."""
        recorder = self.tracing.recorder
        recorder.current, HERE.ids = span.marks, span.log_ids
        try:
            yield
        finally:
            recorder.current = HERE.ids = None

    def _begin(self, call: Call) -> Span | None:
        route = call.route
        parent = parent_in(self.lines) if self.lines else self.parent
        if parent is None and route.pattern in _QUIET:
            return None
        span = self.tracing.begin(parent)
        if span is not None:
            span.method, span.pattern, span.params = route.method, route.pattern, call.params
        return span

    def _follow(
        self, span: Span, answer: Response | Awaitable[Response]
    ) -> Response | Awaitable[Response]:
        """Finish the span once the request is answered."""
        if isinstance(answer, Response):
            if answer.stream is None or isinstance(answer, Feed):
                self._finish(span, answer)  # a feed lasts as long as its reader
            else:
                answer.stream = self._watch(span, answer.status, answer.stream)
            return answer
        if isinstance(answer, DurableResponse):
            response = answer.response
            answer.written.add_done_callback(lambda disk: self._settled(span, disk, response))
            return answer
        return self._later(span, answer)

    def _finish(self, span: Span, answer: Response) -> None:
        status = answer.status
        self.tracing.finish(span, status, answer.body if status >= _REFUSED else b"")

    def _settled(self, span: Span, disk: asyncio.Future[None], answer: Response) -> None:
        error = ShuttingDown() if disk.cancelled() else disk.exception()
        if error is None:
            self._finish(span, answer)
        else:
            self.tracing.finish(span, *_failure(error))

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
            self.tracing.finish(span, outcome)

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
            self.tracing.finish(span, status, body)
        return response


class TracedLane(FastLane):
    """Passes the parent of each request to the door."""

    door: TracedApplication  # type: ignore[mutable-override] # set once, by `fast_lane`

    _parent: SpanContext | None = None  # of the request whose body is arriving

    @override
    def _answer_whole(self, data: bytes) -> bool:
        self.door.lines = data[data.find(b"\r\n") : data.find(b"\r\n\r\n", 0, READ_BYTES_MAX)]
        try:
            return super()._answer_whole(data)
        finally:
            self.door.lines = b""

    @override
    def _plain_call(self) -> Call | None:
        self._parent = read_parent(self.headers)
        return super()._plain_call()

    @override
    def on_message_complete(self) -> None:
        self.door.parent, self._parent = self._parent, None
        try:
            super().on_message_complete()
        finally:
            self.door.parent = None


_PARENT: Final = "select_service.parent"
_IDS: Final = "select_service_trace_ids"


def _failure(error: BaseException) -> tuple[int, bytes]:
    """Return the status and body of an error's answer."""
    known = error if isinstance(error, ServiceError) else ServiceError("internal error")
    status, body = problem(known)
    return status, encode(body)
