"""ASGI in front of the API: runs one exchange, and watches for clients that disconnect.

It handles what is independent of the route: disconnections, refusals, crashes and their counters.
`negotiation.py` interprets heads, `asgi_receive.py` reads bodies and sends answers.
`connection.py` stands before it and asks `answer_now` for what needs no exchange; `api.py` and the
handlers are behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
from collections.abc import AsyncGenerator
from time import perf_counter
from typing import TYPE_CHECKING, Final, cast

from indexer.errors import IndexerError
from select_service.edge.codec.responses import DurableResponse, Feed, Response
from select_service.edge.http.access_log import log_access, short
from select_service.edge.http.api import Api, Handler, Request, when_durable
from select_service.edge.http.asgi_receive import (
    ClientGoneError,
    Sending,
    has_no_body,
    read_body,
    refuse_encoding,
    until_gone,
)
from select_service.edge.http.calls import Call, Head, OpenLines, plain_lines
from select_service.edge.http.negotiation import Negotiation
from select_service.edge.http.routes import ROUTES
from select_service.edge.http.traffic import CLIENT_GONE, RouteTraffic, Traffic
from select_service.edge.routing import Route, Router
from select_service.errors import (
    MethodNotAllowed,
    MissingScope,
    RouteNotFound,
    ServiceError,
    ShuttingDown,
    Unauthenticated,
)
from select_service.version import __version__

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from starlette.types import Receive, Scope, Send

    from select_service.edge.config_reload import ConfigReload
    from select_service.edge.console.console_app import ConsoleApp
    from select_service.edge.http.openapi_document import OpenApiDocument
    from select_service.edge.security.authority import Authority
    from select_service.edge.tracing.request_tracer import Origin, RequestTracer
    from select_service.settings import Settings

_log = logging.getLogger("select_service.http")

HANDED_OVER: Final = "select_service.answer"
"""Scope key of a response from `Application.answer_now` that its caller cannot write itself."""

UNTIL_SENT: Final = "select_service.until_sent"
"""Scope key of what watches over a written answer until the kernel has all of it."""

_BAD_REQUEST: Final = 400
_MISSED: Final = frozenset(("GET", "POST", "PUT", "PATCH", "DELETE"))
"""Methods whose answers have a body."""


class Application:
    """The ASGI application that serves every request of the API."""

    def __init__(
        self,
        api: Api,
        traffic: Traffic,
        *,
        max_body_bytes: int,
        access_log: bool = False,
        authority: Authority | None = None,
        console: ConsoleApp | None = None,
        tracer: RequestTracer | None = None,
    ) -> None:
        """Set up the routes.

        Args:
            api: answers.
            traffic: counts.
            max_body_bytes: longer bodies are refused.
            access_log: whether every request is logged.
            authority: checks tokens; None: all may do everything.
            console: of the console, if there is one.
            tracer: is given every request; None: nothing is traced.
        """
        self._console = console
        self._tracer = tracer
        negotiation = Negotiation(api, authority)
        self.head_of, self._head_in = negotiation.head_of, negotiation.head_in
        """Interpret header lines, for connections and for ASGI."""
        self.authority = authority
        routes = ROUTES if console is None else (*ROUTES, *console.routes)
        self._traffic = traffic
        self._stats = {id(route): _stats_of(traffic, route) for route in routes}
        self.max_body_bytes = max_body_bytes
        self._access_log = access_log
        self.set_routes(routes, not_found_details=_not_found_details(console, authority))
        self._leaving = asyncio.Event()
        self._sending = Sending(traffic, self._leaving)
        self.reloading: ConfigReload
        self.document: OpenApiDocument
        """Both set by the creator."""

    def narrowed(self, paths: Sequence[str], missing: str) -> Application:
        """Return one with only some of the routes; counts, tokens and shutdown are shared.

        Args:
            paths: of its routes, which take no bodies.
            missing: the error message for any other path.
        """
        routes = [route for route in ROUTES if route.pattern in paths]
        narrow = copy.copy(self)
        narrow.set_routes(routes, missing)
        return narrow

    def set_routes(
        self,
        routes: Sequence[Route[Handler]],
        missing: str = "route not found",
        not_found_details: dict[str, object] | None = None,
    ) -> None:
        """Serve exactly these routes; others get the error `missing`, and `/` the details."""
        self._not_found_details = not_found_details
        self._router: Router[Handler] = Router(routes, missing)
        self._nowhere = _nowhere(self._router)
        self._stats[id(self._nowhere)] = self._traffic.unmatched
        seen = () if self._access_log else routes  # requests to be logged go through `__call__`
        self._plain_lines, self._open_lines = plain_lines(seen), OpenLines(seen)
        self.call_in_line: Callable[[bytes], Call | None] = self._plain_lines.get
        """The call of a request line without parameters, if nothing about it is unusual."""
        self.call_with_id = self._open_lines.find
        """The call of a request line with an id in it; faster than `call_for`."""

    def follow(self, settings: Settings) -> None:
        """Apply a changed limit on body length."""
        self.max_body_bytes = settings.max_body_bytes

    def enter(self, loop: asyncio.AbstractEventLoop) -> None:
        """Note that the process has begun to serve."""
        if self._console is not None:
            self._console.start(loop)

    def leave(self) -> None:
        """Dismiss waiting requests and cut streams: the process is about to end."""
        self._leaving.set()
        if self._tracer is not None:
            self._tracer.is_leaving = True
        if self._console is not None:
            self._console.close()

    @property
    def is_leaving(self) -> bool:
        """Whether the process is about to end."""
        return self._leaving.is_set()

    # -- immediate answers ---------------------------------------------------------------------

    def call_for(self, method: bytes, url: bytes, head: Head, length: int) -> Call | None:
        """Return the call of a plain request; None if only `__call__` can handle it.

        Args:
            method: as on the request line.
            url: as on the request line.
            head: its interpreted header lines.
            length: announced length of its body in bytes, 0 if none.
        """
        path, _, query = url.partition(b"?")
        if self._access_log or b"#" in url:
            return None
        asked = method.decode("ascii")
        found = self._router.find(asked, path)
        if found is None:
            if asked not in _MISSED or length or not url.startswith(b"/"):
                return None
            return Call(self._nowhere, (asked, path.decode("latin-1")), b"", path)
        call = Call(*found, query, path)
        return call if self.suits(call.route, head, length) else None

    def suits(self, route: Route[Handler], head: Head, length: int) -> bool:
        """Return whether a request with this head may be handled at once.

        Noted in the head where it holds for bodies of any length, so that it is asked once.
        """
        if length > self.max_body_bytes:
            return False
        if head.grant is not None and not head.grant.allows(route):
            return False
        if head.is_readable or route.takes is None or route.body_lenient:
            head.suited.add(id(route))
            return True
        return route.body_optional and not head.has_type and not length

    def answer_now(
        self,
        call: Call,
        head: Head,
        body: bytes,
        origin: Origin,
        *,
        is_exchange: bool = False,
    ) -> Response | Awaitable[Response]:
        """Answer a whole request. Never raises.

        With durable state, its changes are on disk before its answer is given. The answer is
        counted unless it has to wait or is a stream: pass such an answer on to `__call__`, under
        `HANDED_OVER`.

        Args:
            call: the request.
            head: its interpreted header lines.
            body: all of it.
            origin: its header lines, as sent or parsed, or its ASGI scope; for tracing.
            is_exchange: `__call__` counts it.
        """
        started = perf_counter()
        route, api, tracer = call.route, head.api, self._tracer
        span = None if tracer is None else tracer.begin(call, origin)
        answer: Response | Awaitable[Response]
        try:
            warning = api.judge_query(route, call.query) if call.query else None
            request = Request(call.params, call.query, b"" if route.takes is None else body)
            keeper = api.service.keeper
            if keeper is None or not route.changes:
                answer = route.handler(api, request)
            else:
                keeper.check_writable()
                answer = when_durable(route.handler(api, request), keeper)
            if warning is not None:
                answer = _warned(answer, warning)
        except Exception as error:  # noqa: BLE001 - one bad request must not end the process
            answer = self.fault(error, api, route.method, call.path)
        if span is not None and tracer is not None:
            answer = tracer.end(span, answer, origin)
        if not is_exchange and type(answer) is Response and answer.stream is None:
            self._stats[id(route)].observe(answer.status, perf_counter() - started)
        return answer

    def answer_settled(
        self, call: Call, head: Head, answer: DurableResponse, since: float
    ) -> Response:
        """Return and count an answer whose wait for the disk is over. Never raises.

        Args:
            call: as passed to `answer_now`.
            head: likewise.
            answer: what `answer_now` returned.
            since: when it did, by `time.perf_counter`.
        """
        error = answer.written.exception()
        response = answer.response
        if isinstance(error, Exception):
            response = self.fault(error, head.api, call.route.method, call.path)
        self._stats[id(call.route)].observe(response.status, perf_counter() - since)
        return response

    def count_gone(self, call: Call) -> None:
        """Count a client that disconnected before its body was complete."""
        self._stats[id(call.route)].observe(CLIENT_GONE, 0.0)

    # -- through ASGI --------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            raise RuntimeError(f"no {scope['type']} here")
        started = perf_counter()
        if self._tracer is not None:
            self._tracer.note_parent(scope)
        self._traffic.in_flight += 1
        stats, status, ended = self._traffic.unmatched, CLIENT_GONE, None
        head = self._head_in(scope)
        response: Response | None = None
        try:
            method, raw_path = scope["method"], scope.get("raw_path") or scope["path"].encode()
            try:
                route, params = self._router.match(method, raw_path)
                stats = self._stats[id(route)]
                response = await self._handle(
                    Call(route, params, scope["query_string"], raw_path), head, scope, receive
                )
            except ClientGoneError:
                return
            except Exception as error:  # noqa: BLE001 - one bad request must not end the process
                response = self.fault(error, head.api, method, raw_path)
            status = response.status
            if self._leaving.is_set() or _body_is_unwelcome(scope, status):
                response.headers += ((b"connection", b"close"),)
            if isinstance(response, Feed):
                ended = perf_counter()  # its duration is up to the client and not our latency
                self._traffic.in_flight -= 1
            if not await self._respond(response, scope, receive, send):
                status = CLIENT_GONE
        finally:
            self._traffic.in_flight -= ended is None
            seconds = (ended or perf_counter()) - started
            stats.observe(status, seconds)
            if self._access_log:
                log_access(scope, status, seconds, response)

    async def _respond(
        self, response: Response, scope: Scope, receive: Receive, send: Send
    ) -> bool:
        """Send an answer; False if it could not be written, so that it is lost."""
        try:
            await self._sending.respond(response, scope, receive, send)
        except ClientGoneError:
            response.lost()
            return False
        except BaseException:
            response.lost()
            raise
        if response.withdraw is not None and UNTIL_SENT in scope:
            scope[UNTIL_SENT](response)
        return True

    async def _handle(self, call: Call, head: Head, scope: Scope, receive: Receive) -> Response:
        answer = scope.get(HANDED_OVER)
        if answer is None:
            route = call.route
            if head.grant is not None and self.authority is not None:
                self.authority.check(head.grant, route)
            bare = route.takes is None or (route.body_optional and has_no_body(head, scope))
            if not bare and not route.body_lenient:
                refuse_encoding(scope)
            body = b""
            if not bare:
                body = await read_body(route, head, scope, receive, self.max_body_bytes)
            answer = self.answer_now(call, head, body, scope, is_exchange=True)
        if isinstance(answer, DurableResponse):
            return await answer  # soon, whether or not the client waits
        response = answer if isinstance(answer, Response) else await self._wait(answer, receive)
        if isinstance(response, Feed) and head.grant is not None:
            feed = cast("AsyncGenerator[bytes]", response.stream)
            response.stream = self._while_allowed(feed, call.route, scope)
        return response

    async def _wait(self, answer: Awaitable[Response], receive: Receive) -> Response:
        """Wait for the answer, a disconnection of the client, or the end of the process."""
        async with asyncio.TaskGroup() as group:
            answering = group.create_task(_settle(answer))
            gone = group.create_task(until_gone(receive))
            leaving = group.create_task(self._leaving.wait())
            try:
                await asyncio.wait({answering, gone, leaving}, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:  # of the exchange, at the end of the process
                if answering.done() and isinstance(answering.result(), Response):
                    cast("Response", answering.result()).lost()
                raise
            answered = answering.done()
            client_left = gone.done()
            for task in (answering, gone, leaving):
                task.cancel()  # withdraws a request still in the queue
        if not answered:
            if client_left:
                raise ClientGoneError
            raise ShuttingDown
        outcome = answering.result()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def _while_allowed(
        self, feed: AsyncGenerator[bytes], route: Route[Handler], scope: Scope
    ) -> AsyncGenerator[bytes]:
        """Pass a feed on until its token is revoked: it has no other end."""
        async with contextlib.aclosing(feed):
            async for piece in feed:
                grant = self._head_in(scope).grant
                if grant is None or not grant.allows(route):
                    return
                yield piece

    def fault(self, error: Exception, api: Api, method: str, raw_path: bytes) -> Response:
        """Turn an exception of a handler into an answer."""
        if isinstance(error, ServiceError | IndexerError):
            if isinstance(error, RouteNotFound) and raw_path == b"/":
                error.details = self._not_found_details
            self._traffic.refused(error)
            response = api.writer.refusal(error)
            if isinstance(error, MethodNotAllowed):
                response.headers += ((b"allow", self._router.allowed(raw_path).encode()),)
            elif isinstance(error, Unauthenticated | MissingScope):
                response.headers += ((b"www-authenticate", error.challenge),)
            return response
        self._traffic.crashes += 1
        where = {"method": method[:16], "path": short(raw_path)}
        with contextlib.nullcontext() if self._tracer is None else self._tracer.logging(error):
            _log.error("request failed", extra=where, exc_info=error)
        return api.writer.refusal(ServiceError("internal error"))


def _not_found_details(
    console: ConsoleApp | None, authority: Authority | None
) -> dict[str, object]:
    """Return the details of the 404 at `/`, which the contract leaves undefined.

    If tokens are required, the version is omitted: strangers could look up its weaknesses.
    """
    found: dict[str, object] = {"service": "select-service"}
    if authority is None:
        found["version"] = __version__
    if console is not None:
        found |= {"console": console.path, "docs": console.docs_path}
    return found | {"openapi": "/openapi.json", "health": "/health"}


def _stats_of(traffic: Traffic, route: Route[Handler]) -> RouteTraffic:
    return traffic.routes.setdefault((route.method, route.pattern), RouteTraffic())


def _nowhere(router: Router[Handler]) -> Route[Handler]:
    """Return the route of unknown paths and methods: its handler raises the matching error."""

    def miss(_: Api, request: Request) -> Response:
        method, path = request.params
        router.match(method, path.encode("latin-1"))
        raise AssertionError("the router finds a route after all")

    return Route("", "", miss)


def _body_is_unwelcome(scope: Scope, status: int) -> bool:
    """Whether a client that sent `Expect` gets a refusal.

    It will not send its body now, so what follows on the connection could be mistaken for the body.
    """
    return status >= _BAD_REQUEST and any(name == b"expect" for name, _ in scope["headers"])


def _warned(answer: Response | Awaitable[Response], warning: str) -> Response | Awaitable[Response]:
    """Add a Warning header to an answer, even if it comes later."""
    if isinstance(answer, DurableResponse):
        answer.response = _with_warning(answer.response, warning)
    elif isinstance(answer, Response):
        answer = _with_warning(answer, warning)
    else:
        return _warned_later(answer, warning)
    return answer


async def _warned_later(answer: Awaitable[Response], warning: str) -> Response:
    return _with_warning(await answer, warning)


def _with_warning(response: Response, warning: str) -> Response:
    response.headers += ((b"warning", warning.encode()),)
    return response


async def _settle(answer: Awaitable[Response]) -> Response | Exception:
    """Await an answer; return an error as a value, since a TaskGroup would wrap it."""
    try:
        return await answer
    except Exception as error:  # noqa: BLE001 - the caller raises it again
        return error
