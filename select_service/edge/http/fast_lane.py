"""Answers plain requests as soon as they are complete, without a task or an ASGI exchange.

Most requests arrive whole, are answered from memory and fit one write; for those a task, an event
and a scope per request cost more than the answer. Anything unusual (`Expect`, HEAD, a client that
pipelines or does not read, an answer that has to wait or is a stream) takes the ASGI path through
the same `Application`, routes and counters.

If a request arrives in one piece, usually not even its head is parsed: the header lines that matter
are the same in every request of a client (`header_cache.py`), so their parsed meaning is looked up
by their bytes (`head_memory.py`).
"""

from __future__ import annotations

import re
from time import perf_counter
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace
from typing_extensions import override

from select_service.edge.codec.responses import ONLY_JSON, DurableResponse, Response
from select_service.edge.http.application import HANDED_OVER
from select_service.edge.http.head_memory import Heads, Peers
from select_service.edge.http.header_cache import GUARDED, KEPT, HeaderCache
from select_service.edge.http.negotiation import CERTIFICATE
from select_service.edge.http.outbox import ANSWERS_MAX, Outbox
from select_service.edge.http.plain_fields import credentials_in, plain_fields
from select_service.edge.http.protocol import GuardedProtocol, Phase, TurnedAway
from select_service.edge.http.response_head import (
    CLOSE_LINE,
    ResponseHead,
    header_lines,
    length_line,
    status_line,
)

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable

    from select_service.edge.http.application import Application
    from select_service.edge.http.calls import Call, Head
    from select_service.edge.http.connection_limits import ConnectionLimits
    from select_service.edge.http.traffic import Connections
    from select_service.edge.security.authority import Authority, Grant
    from select_service.errors import ServiceError

__all__ = ["READ_BYTES_MAX", "FastLane", "fast_lane"]

_OLD: Final = b" HTTP/1.0"
"""End of the request lines of clients that do not keep connections alive; as a prefix of remembered
header lines, it marks that they followed such a line."""

_OK: Final = 200
_REST: Final = Phase.REST
_REQUEST_LINE: Final = re.compile(rb"(GET|POST|PUT|PATCH|DELETE) (/[!-~]*) HTTP/1\.1")

READ_BYTES_MAX: Final = 8192
"""The longest head that is looked up in the remembered ones."""


class _Debt:
    """Stands in for uvicorn's unanswered request, so that later requests queue up."""

    __slots__ = ("disconnected", "keep_alive", "message_event", "response_complete")

    def __init__(self) -> None:
        self.response_complete = False
        self.disconnected = False
        self.keep_alive = True
        self.message_event = _NO_EVENT


class _NoEvent:
    def set(self) -> None:
        """Do nothing: nobody waits."""


_NO_EVENT: Final = _NoEvent()


class FastLane(GuardedProtocol):
    """One connection. Created through `fast_lane`, which sets `door`, `limits` and `counts`."""

    door: Application
    heads: Heads
    peers: Peers
    outbox: Outbox
    steady: HeaderCache

    _certificate: tuple[str, ...] = ()  # the client's names, if they grant access
    _is_between = True  # between requests: nothing of the next one has arrived, no answer is owed
    _lines_read = b""  # the kept lines of the head being parsed, to be remembered
    _handed: Response | Awaitable[Response] | None = None  # answered before it was parsed
    preamble = ResponseHead()
    _call: Call | None = None  # the request whose body is arriving
    _head: Head  # of that request
    _body: bytes | bytearray = b""
    _grant: Grant | None = None  # of the last request: its tenant is known
    _turn_used = False  # one fast request per read: a pipelining client must not own the loop
    _is_last = False  # it closes after its next answer; set on the class when the server leaves,
    # so no instance may set it to False
    _debt: _Debt | None = None  # an answer that waits for the disk
    _idle_since: float | None = None  # 0.0: answered since the last sweep; else loop time of
    # the first sweep after that; None on the ASGI path

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        authority = self.door.authority
        tls = None if authority is None else transport.get_extra_info("ssl_object")
        if authority is not None and tls is not None:
            from select_service.edge.security.authority import certificate_names  # only with TLS

            names = certificate_names(tls.getpeercert())
            if names and authority.book.by_certificate(names) is not None:
                # certificates change what header lines mean
                self._certificate, self.heads = names, self.peers.heads_of(names)
        super().connection_made(transport)
        if self._is_reserved:
            self._is_between = False
        if self.door.is_leaving:  # accepted while the port was closing: nobody else would close it
            transport.close()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        if self._call is not None:
            self.door.count_gone(self._call)
            self._call = None
        super().connection_lost(exc)

    @override
    def data_received(self, data: bytes) -> None:
        if not (self._is_between and self._answer_whole(data)):
            super().data_received(data)

    @override
    def take(self, data: bytes) -> None:
        self._is_between = False  # an upgrade, parsed anew, must not overtake its predecessors
        self._turn_used = False
        self._idle_since = None
        super().take(data)
        self._lines_read = b""
        self._is_between = self._rests()
        if self._is_between and self._idle_since is None:
            self._idle_since = 0.0  # only a blank line: it has stopped uvicorn's keep-alive timer

    def _answer_whole(self, data: bytes) -> bool:
        """Answer data that is exactly one request with known header lines; False if it is not."""
        end = data.find(b"\r\n\r\n", 0, READ_BYTES_MAX)
        if (
            not 0 <= end <= self.limits.head_bytes_max - 4
            or self.flow.write_paused
            or self.transport.is_closing()
        ):
            return False
        line_end = data.find(b"\r\n")
        line, lines, size = data[:line_end], data[line_end:end], len(data) - end - 4
        door = self.door
        call = door.call_in_line(line) or door.call_with_id(line)
        read = None if call is None else self.heads.read.get(lines)
        if call is None or read is None:
            known = self._known_call(call, line, lines, size)
            if known is None:
                return False
            call, head = known
        else:
            head, length, breaks = read
            if (
                length != size
                or breaks > self.limits.header_lines_max
                or not door.suits(call.route, head, size)
            ):
                return False
        if head.grant is not self._grant and not self._is_for(head.grant):
            return False  # the parser refuses it
        self._phase = _REST  # even if it is the first
        if head.is_last:
            self._is_last = True
        self._idle_since = None
        answer = door.answer_now(call, head, data[end + 4 :] if size else b"")
        if type(answer) is Response and answer.stream is None:
            self.write_answer(answer)
            return True
        return self.hand_on(call, head, answer)

    def hand_on(self, call: Call, head: Head, answer: Response | Awaitable[Response]) -> bool:
        """Arrange for an answer that takes time; False if the ASGI path must send it."""
        if isinstance(answer, DurableResponse):
            self._is_between = False
            self._owe(call, head, answer)
            return True
        self._handed = answer
        return False

    def _known_call(
        self, call: Call | None, line: bytes, lines: bytes, size: int
    ) -> tuple[Call, Head] | None:
        """Return the call of a complete request, and its interpreted head.

        Args:
            call: of its request line, if that is plain.
            line: the request line.
            lines: all header lines, each after its line break.
            size: bytes after them.
        """
        kept, length = self.steady.read(lines)
        is_old = line.endswith(_OLD)
        head = self.heads.known.get(_OLD + kept if is_old else kept)
        if head is None:
            self._lines_read = kept
            return None
        breaks = lines.count(b"\r\n")
        if length != size or breaks > self.limits.header_lines_max:
            return None  # the parser refuses too many lines
        door = self.door
        if is_old:  # the remembered head says that the connection ends
            line = line[:-1] + b"1"
            call = door.call_in_line(line) or door.call_with_id(line)
        else:
            self.heads.note(lines, head, length, breaks)
        if call is not None:
            return (call, head) if door.suits(call.route, head, length) else None
        parts = _REQUEST_LINE.fullmatch(line)
        call = None if parts is None else door.call_for(parts[1], parts[2], head, length)
        return None if call is None else (call, head)

    def _rests(self) -> bool:
        """Return whether everything received is answered, and the next byte begins a request."""
        return (
            self._phase is _REST
            and self._call is None
            and self._debt is None
            and not self._refused
            and not self._is_last
            and self._pieces is None
            and not self.pipeline
            and self._unanswered() is None
        )

    @override
    def on_message_begin(self) -> None:
        if self._refused:  # the last answer is given
            raise TurnedAway
        self._enter_head()
        self.url = b""
        self.expect_100_continue = False
        self.headers = []

    def _is_for(self, grant: Grant | None) -> bool:
        """Count the connection for the tenant of a token; False: it has no room for one more."""
        if grant is not None and grant.whose is not None and not self.count_for(grant.whose):
            return False
        self._grant = grant
        return True

    def _check_tenant(self, authority: Authority) -> None:
        """Refuse the request whose head has arrived if its tenant has no room for a connection."""
        if self._call is None:
            grant = authority.grant(credentials_in(self.headers), self._certificate)
        else:
            assert self._head.grant is not None
            grant = self._head.grant
        if not self._is_for(grant) and not (self._is_reserved and self.is_reserve_for_this):
            self._call = None
            self.refuse_for(grant.whose)

    @override
    def on_headers_complete(self) -> None:
        self._call = None if self._is_reserved else self._plain_call()
        if self.door.authority is not None:
            self._check_tenant(self.door.authority)
        if self._call is None:
            self._take_asgi_way()
            if self._handed is not None:
                self.scope[HANDED_OVER] = self._handed  # type: ignore[typeddict-unknown-key]
                self._handed = None
        else:
            self._owes_answer = True
            self._enter_body()

    @override
    def on_body(self, body: bytes) -> None:
        self._line_bytes = 0
        if self._call is None:
            super().on_body(body)
        elif self._call.route.takes is None:
            return  # nobody reads it: buffering it would let strangers use our memory
        elif len(self._body) + len(body) > self.door.max_body_bytes:  # chunked, so not announced
            self._call, body, self._body = None, bytes(self._body) + body, b""
            self._owes_answer = False  # the ASGI cycle does
            self._take_asgi_way()
            super().on_body(body)
        elif not self._body:
            self._body = body
        else:
            if not isinstance(self._body, bytearray):
                self._body = bytearray(self._body)
            self._body += body

    @override
    def on_message_complete(self) -> None:
        call = self._call
        if call is None:
            super().on_message_complete()
            return
        body, self._body = self._body, b""
        self._call = None
        if not self.parser.should_keep_alive():  # a trailer may say so, too
            self._is_last = True
        self._owes_answer = False
        answer, self._handed = self._handed, None
        if answer is None:
            answer = self.door.answer_now(call, self._head, bytes(body))
        if isinstance(answer, Response) and answer.stream is None:
            self._enter_rest()
            self.write_answer(answer)
            return
        if isinstance(answer, DurableResponse):
            self._enter_rest()
            self._owe(call, self._head, answer)
            return
        self._take_asgi_way()
        self.scope[HANDED_OVER] = answer  # type: ignore[typeddict-unknown-key]
        super().on_message_complete()

    # -- answers that wait for the disk --------------------------------------------------------

    def _owe(self, call: Call, head: Head, answer: DurableResponse) -> None:
        """Answer once the disk has responded; what the client sends meanwhile queues up."""
        self._debt = debt = _Debt()
        self.cycle = debt  # type: ignore[assignment] # it has the attributes that uvicorn uses
        since = perf_counter()
        answer.written.add_done_callback(lambda _: self._pay(debt, call, head, answer, since))

    def _pay(
        self, debt: _Debt, call: Call, head: Head, answer: DurableResponse, since: float
    ) -> None:
        debt.response_complete = True
        self._debt = None
        if self.transport.is_closing() or not self.hears:
            self.door.count_gone(call)
            return
        self.write_answer(self.door.answer_settled(call, head, answer, since))
        if self.pipeline:
            self.on_response_complete()  # starts the next request
        self._is_between = self._rests()

    @override
    def _is_refusal_due(self) -> bool:
        return self._debt is None and super()._is_refusal_due()

    @override
    def _sweep_head(self, now: float) -> None:
        if self._debt is None:
            super()._sweep_head(now)
        else:
            self._since = now  # requests queued behind it are not late

    @override
    def _turn_away(self, error: ServiceError, *, linger: bool = True) -> None:
        self.outbox.flush()  # may hold earlier answers
        super()._turn_away(error, linger=linger)

    @override
    def eof_received(self) -> None:
        self.outbox.flush()  # a client that has finished sending waits for its answers
        super().eof_received()

    @override
    def shutdown(self) -> None:
        self.outbox.flush()
        if self._debt is not None:
            self._is_last = True
        elif self._call is None:
            super().shutdown()
        else:
            self._is_last = True

    @classmethod
    def part_with_answers(cls) -> None:
        """Make every connection, present or future, close after its next answer."""
        cls._is_last = True

    @override
    def excuse(self, seconds: float, now: float) -> None:
        super().excuse(seconds, now)
        if self._idle_since:
            self._idle_since = min(self._idle_since + seconds, now)

    @override
    def sweep(self, now: float) -> None:
        super().sweep(now)
        since = self._idle_since
        if since == 0.0:
            self._idle_since = now
        elif since is not None and now - since > self.timeout_keep_alive:
            self.transport.close()

    def _plain_call(self) -> Call | None:
        """Return the call if this request can be answered once its body is complete."""
        if (
            self._turn_used
            or self._debt is not None
            or self._unanswered() is not None
            or self.flow.write_paused
            or self.transport.is_closing()
        ):
            return None
        self._turn_used = True
        version = self.parser.get_http_version()
        is_old = version == "1.0"
        if version != "1.1" and not is_old:
            return None  # the ASGI path refuses it
        is_last = is_old or not self.parser.should_keep_alive()
        said = plain_fields(self.headers, self.steady.names, is_old=is_old)
        if said is None:
            return None
        head = self.door.head_of(
            said.content_type, said.accept, said.credentials, self._certificate
        )
        self._head = head
        call = self.door.call_for(self.parser.get_method(), self.url, head, said.length)
        if is_last and call is not None:
            self._is_last = True
        if said.is_chunked:  # chunks need the parser
            return call
        if head.grant is not None and head.grant.name is None:
            return call  # strangers must not evict the heads of others
        if call is not None and self._lines_read.count(b"\n") == said.kept:
            lines = _OLD + self._lines_read if is_old else self._lines_read
            self.heads.learn(lines, replace(head, is_last=True) if is_last else head)
        return call

    def _take_asgi_way(self) -> None:
        url, headers, expect = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expect
        self.headers += headers
        super().on_headers_complete()
        if self._certificate:
            self.scope[CERTIFICATE] = self._certificate  # type: ignore[typeddict-unknown-key]

    def write_answer(self, answer: Response) -> None:
        """Put a complete answer into the outbox."""
        preamble, body = self.preamble, answer.body
        lines = self.server_state.default_headers
        if lines is not preamble.headers:
            preamble.follow(lines)
        if answer.status == _OK and not self._is_last:
            headers = answer.headers
            ok = preamble.ok if headers is ONLY_JSON else preamble.of(headers)
            data = b"".join((ok, length_line(len(body)), body))
        else:
            own = header_lines(answer.headers)
            if self._is_last and CLOSE_LINE not in preamble.lines:
                own += CLOSE_LINE
            head = status_line(answer.status) + preamble.lines + own
            data = b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)
        self.outbox.put(self.transport, data, self.loop)
        self._idle_since = 0.0
        if self._is_last:
            self._refused = True
            self.outbox.flush()
            self.transport.close()


def fast_lane(
    door: Application,
    limits: ConnectionLimits,
    counts: Connections,
    kind: type[FastLane] = FastLane,
) -> type[FastLane]:
    """Create the protocol class of one server, as uvicorn creates the instances itself."""
    lane: type[FastLane] = type("Lane", (kind,), {})
    lane.door, lane.limits, lane.counts = door, limits, counts
    lane.heads, lane.peers, lane.outbox = Heads(), Peers(), Outbox(ANSWERS_MAX)
    lane.steady = HeaderCache(KEPT if door.authority is None else GUARDED)
    if door.authority is not None:
        door.authority.on_change(lane.heads.forget)
        door.authority.on_change(lane.peers.forget)
    return lane
