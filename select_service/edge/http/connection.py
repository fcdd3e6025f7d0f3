"""One way from the bytes of a connection to the handler of a request, and back.

`uvicorn.Server` creates an `HttpConnection` for each client, through `Config(http=...)`; nothing
else of uvicorn is used. What arrives takes the first of these steps that can answer it:

1. `data_received`: the data is exactly one request, with header lines whose meaning is known by
   their bytes (`header_cache.py`), and not even its head is parsed.
2. `read` and the parser's callbacks: the request is plain, and its handler is called once its body
   is complete. Most requests arrive whole, are answered from memory and fit one write: a task, an
   event and a scope per request would cost more than the answer.
3. An exchange (`exchange.py`): anything unusual (`Expect`, HEAD, a client that pipelines or does
   not read, an answer that has to wait or is a stream) goes through the same `Application` as ASGI.

All three end in `Application.answer_now`, which calls the handler. `connection_guard.py` has the
limits and deadlines, `request_reader.py` feeds the parser.
"""

from __future__ import annotations

import re
from time import perf_counter
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace
from typing_extensions import override

from select_service.edge.codec.responses import ONLY_JSON, DurableResponse, Response
from select_service.edge.http.application import HANDED_OVER, UNTIL_SENT
from select_service.edge.http.connection_guard import Phase
from select_service.edge.http.exchange import Exchange, scope_of
from select_service.edge.http.framing import judge_framing
from select_service.edge.http.header_cache import (
    HeaderCache,
    Heads,
    Peers,
    credentials_in,
    plain_fields,
)
from select_service.edge.http.negotiation import CERTIFICATE
from select_service.edge.http.request_reader import PIPELINED_MAX, RequestParser
from select_service.edge.http.response_head import ResponseHead, length_line

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable

    from select_service.edge.http.application import Application
    from select_service.edge.http.calls import Call, Head
    from select_service.edge.security.authority import Authority, Grant

ANSWERS_MAX: Final = 16
"""Answers of one turn of the loop are sent at the latest after this many, so that the first does
not wait long: 16 take half a millisecond to make."""

READ_BYTES_MAX: Final = 8192
"""The longest head that is looked up in the remembered ones."""

_OLD: Final = b" HTTP/1.0"
"""End of the request lines of clients that do not keep connections alive; as a prefix of remembered
header lines, it marks that they followed such a line."""

_OK: Final = 200
_REST: Final = Phase.REST
_REQUEST_LINE: Final = re.compile(rb"(GET|POST|PUT|PATCH|DELETE) (/[!-~]*) HTTP/1\.1")


class HttpConnection(RequestParser):
    """One connection; `server.py` makes the class of a server, with what they share."""

    application: Application
    heads: Heads
    peers: Peers
    header_cache: HeaderCache
    outbox: list[tuple[HttpConnection, bytes, Response]]
    """Complete answers to what this turn of the loop has read, across all connections of a server:
    a client woken by the first answer would compete for the processor while the others are made.
    Call `flush` before writing anything else to one of these connections."""
    read_bytes_max = READ_BYTES_MAX  # at most what a head may have
    preamble = ResponseHead()
    is_last = False  # it closes after its next answer; set on the class when the server leaves,
    # so no instance may set it to False

    _certificate: tuple[str, ...] = ()  # the client's names, if they grant access
    _grant: Grant | None = None  # of the last request: its tenant is known
    _is_between = True  # between requests: nothing of the next one has arrived, no answer is owed
    _turn_used = False  # one plain request per read: a pipelining client must not own the loop
    _lines_read = b""  # the kept lines of the head being parsed, to be remembered
    _call: Call | None = None  # the plain request whose body is arriving
    _head: Head  # of that request
    _body: bytes | bytearray = b""
    _handed: Response | Awaitable[Response] | None = None  # answered before it was parsed

    # -- asyncio.Protocol ----------------------------------------------------------------------

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        # what every request reads: of the class, it costs a search through all base classes
        self.application, self.heads = self.application, self.heads
        self.read_bytes_max = self.read_bytes_max
        self.preamble, self.outbox, self._grant = self.preamble, self.outbox, None
        authority = self.application.authority
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
        # accepted while the port was closing: nothing else would close it
        if self.application.is_leaving:
            transport.close()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        if self._call is not None:
            self.application.count_gone(self._call)
            self._call = None
        if self._awaits_disk is not None:  # at once: a repeat may be on its way
            self._awaits_disk.response.lost()
        super().connection_lost(exc)

    @override
    def eof_received(self) -> None:
        self.flush()  # a client that has finished sending waits for its answers

    def shutdown(self) -> None:
        """Close after the answer that is owed, or now; `uvicorn.Server` calls this at its end."""
        self.flush()
        exchange = self._unanswered()
        if self._awaits_disk is not None or self._call is not None:
            self.is_last = True
        elif exchange is None or not self.is_receiving:
            self.transport.close()
        else:
            exchange.keep_alive = False

    @override
    def data_received(self, data: bytes) -> None:
        """Answer data that is exactly one request with known header lines; parse any other."""
        end = data.find(b"\r\n\r\n", 0, self.read_bytes_max) if self._is_between else -1
        if end < 0 or self.flow.write_paused or self.transport.is_closing():
            self.read(data)
            return
        line_end, size, application = data.find(b"\r\n"), len(data) - end - 4, self.application
        line, lines = data[:line_end], data[line_end:end]
        call = application.call_in_line(line) or application.call_with_id(line)
        read = None if call is None else self.heads.read.get(lines)
        if call is None or read is None:
            known = self._known_call(call, line, lines, size)
            if known is None:
                self.read(data)
                return
            call, head = known
        else:
            head, length = read
            if (
                length != size
                or size > application.max_body_bytes
                or (
                    id(call.route) not in head.suited
                    and not application.suits(call.route, head, size)
                )
            ):
                self.read(data)
                return
        if head.grant is not self._grant and not self._is_for(head.grant):
            self.read(data)  # the parser refuses it
            return
        self.phase = _REST  # even if it is the first
        if head.is_last:
            self.is_last = True
        self._idle_since = None
        answer = application.answer_now(call, head, data[end + 4 :] if size else b"", lines)
        if type(answer) is Response and answer.stream is None:
            self.write_answer(answer)
        elif isinstance(answer, DurableResponse):
            self._is_between = False
            self._answer_once_durable(call, head, answer)
        else:
            self._handed = answer
            self.read(data)

    # -- known heads ---------------------------------------------------------------------------

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
        kept, length = self.header_cache.read(lines)
        is_old = line.endswith(_OLD)
        head = self.heads.known.get(_OLD + kept if is_old else kept)
        if head is None:
            self._lines_read = kept
            return None
        if length != size or lines.count(b"\r\n") > self.limits.header_lines_max:
            return None  # the parser refuses too many lines
        application = self.application
        if is_old:  # the remembered head says that the connection ends
            line = line[:-1] + b"1"
            call = application.call_in_line(line) or application.call_with_id(line)
        else:
            self.heads.note(lines, head, length)
        if call is not None:
            return (call, head) if application.suits(call.route, head, length) else None
        parts = _REQUEST_LINE.fullmatch(line)
        call = None if parts is None else application.call_for(parts[1], parts[2], head, length)
        return None if call is None else (call, head)

    def _is_for(self, grant: Grant | None) -> bool:
        """Count the connection for the tenant of a token; False: it has no room for one more."""
        if grant is not None and grant.whose is not None and not self.count_for(grant.whose):
            return False
        self._grant = grant
        return True

    def _rests(self) -> bool:
        """Return whether everything received is answered, and the next byte begins a request."""
        return (
            self.phase is _REST
            and self._call is None
            and self._awaits_disk is None
            and not self._refused
            and not self.is_last
            and not self._is_parting
            and self._pieces is None
            and not self.pipeline
            and self._unanswered() is None
        )

    # -- parsing -------------------------------------------------------------------------------

    @override
    def take(self, data: bytes) -> None:
        self._is_between = False  # an upgrade, parsed anew, must not overtake its predecessors
        self._turn_used = False
        self._idle_since = None
        super().take(data)
        self._lines_read = b""
        self._is_between = self._rests()
        if self._is_between and self._idle_since is None:
            self._idle_since = 0.0  # only a blank line

    # -- callbacks of the parser ---------------------------------------------------------------

    @override
    def on_headers_complete(self) -> None:
        """Choose how the request will be answered."""
        self._call = None if self._is_reserved else self._plain_call()
        if self.application.authority is not None:
            self._check_tenant(self.application.authority)
        if self._call is not None:
            self._owes_answer = True
        else:
            judge_framing(self.parser.get_http_version(), self.headers)
            self._upgrading = self.parser.should_upgrade()
            if self._upgrading:
                return
            if self._is_reserved and not self.is_reserve_for_this:
                self.refuse_for(None)
            answer, self._handed = self._handed, None
            self._begin_exchange(answer)
        self._enter_body()

    @override
    def on_body(self, body: bytes) -> None:
        """Take a piece of a body."""
        self._line_bytes = 0
        if self._call is None:
            if self.exchange is not None and not self._upgrading:
                self.exchange.feed(body)
        elif self._call.route.takes is None:
            return  # it is not read: buffering it would let strangers use our memory
        # chunked, so not announced
        elif len(self._body) + len(body) > self.application.max_body_bytes:
            self._call, body, self._body = None, bytes(self._body) + body, b""
            self._owes_answer = False  # the exchange does
            self._begin_exchange(None).feed(body)
        elif not self._body:
            self._body = body
        else:
            if not isinstance(self._body, bytearray):
                self._body = bytearray(self._body)
            self._body += body

    @override
    def on_message_complete(self) -> None:
        """Answer a plain request; let an exchange know that its request is complete."""
        if self._upgrading:
            return
        call, self._call = self._call, None
        is_parting = not self.parser.should_keep_alive()  # a trailer may say so, too
        self.phase = _REST
        if call is None:
            exchange = self.exchange
            assert exchange is not None
            if is_parting:
                exchange.keep_alive = False
                if exchange.response_complete:
                    self.transport.close()
            exchange.end_body()
            return
        body, self._body = self._body, b""
        if is_parting:
            self.is_last = True
        self._owes_answer = False
        answer, self._handed = self._handed, None
        if answer is None:
            answer = self.application.answer_now(call, self._head, bytes(body), self.headers)
        if isinstance(answer, Response) and answer.stream is None:
            self.write_answer(answer)
        elif isinstance(answer, DurableResponse):
            self._answer_once_durable(call, self._head, answer)
        else:
            self._begin_exchange(answer).end_body()

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

    def _plain_call(self) -> Call | None:
        """Return the call if this request can be answered once its body is complete."""
        if (
            self._turn_used
            or self._awaits_disk is not None
            or self._unanswered() is not None
            or self.flow.write_paused
            or self.transport.is_closing()
        ):
            return None
        self._turn_used = True
        version = self.parser.get_http_version()
        is_old = version == "1.0"
        if version != "1.1" and not is_old:
            return None  # `judge_framing` refuses it
        is_last = is_old or not self.parser.should_keep_alive()
        fields = plain_fields(self.headers, self.header_cache.names, is_old=is_old)
        if fields is None:
            return None
        head = self.application.head_of(
            fields.content_type, fields.accept, fields.credentials, self._certificate
        )
        self._head = head
        call = self.application.call_for(self.parser.get_method(), self.url, head, fields.length)
        if is_last and call is not None:
            self.is_last = True
        if fields.is_chunked:  # chunks need the parser
            return call
        if head.grant is not None and head.grant.name is None:
            return call  # strangers must not evict the heads of others
        if call is not None and self._lines_read.count(b"\n") == fields.kept:
            lines = _OLD + self._lines_read if is_old else self._lines_read
            self.heads.learn(lines, replace(head, is_last=True) if is_last else head)
        return call

    # -- answers -------------------------------------------------------------------------------

    def write_answer(self, answer: Response) -> None:
        """Put a complete answer into the outbox."""
        preamble, body, lines = self.preamble, answer.body, self.server_state.default_headers
        if lines is not preamble.headers:
            preamble.follow(lines)
        if answer.status == _OK and not self.is_last:
            headers = answer.headers
            ok = preamble.ok if headers is ONLY_JSON else preamble.of(headers)
            data = b"".join((ok, length_line(len(body)), body))
        else:
            data = preamble.whole(answer, is_last=self.is_last) + body
        outbox = self.outbox
        if not outbox:
            self.loop.call_soon(self.flush)
        outbox.append((self, data, answer))
        self._idle_since = 0.0
        if self.is_last:
            self._refused = True
            self.flush()
            self.transport.close()
        elif len(outbox) >= ANSWERS_MAX:
            self.flush()

    @override
    def flush(self) -> None:
        """Send what is in the outbox, of all connections; what cannot be written is lost."""
        answers = self.outbox.copy()
        self.outbox.clear()
        for connection, data, answer in answers:
            transport = connection.transport
            if not transport.is_closing():
                transport.write(data)
            if answer.withdraw is not None:
                if transport.is_closing():
                    answer.lost()
                elif connection.tls_socket is not None or transport.get_write_buffer_size():
                    connection.until_sent(answer)

    @property
    def default_lines(self) -> bytes:
        """The header lines of every answer, as text."""
        self.preamble.follow(self.server_state.default_headers)
        return self.preamble.lines

    @classmethod
    def part_with_answers(cls) -> None:
        """Make every connection, present or future, close after its next answer."""
        cls.is_last = True

    def _answer_once_durable(self, call: Call, head: Head, answer: DurableResponse) -> None:
        """Answer once the disk has responded; what the client sends meanwhile queues up."""
        self._awaits_disk = answer
        since = perf_counter()
        answer.written.add_done_callback(lambda _: self._settle(call, head, answer, since))

    def _settle(self, call: Call, head: Head, answer: DurableResponse, since: float) -> None:
        self._awaits_disk = None
        if self.transport.is_closing() or not self.is_receiving:
            answer.response.lost()
            self.application.count_gone(call)
            return
        self.write_answer(self.application.answer_settled(call, head, answer, since))
        if self.pipeline:
            self.exchange_done()  # starts the next request
        self._is_between = self._rests()

    # -- exchanges -----------------------------------------------------------------------------

    def _begin_exchange(self, answer: Response | Awaitable[Response] | None) -> Exchange:
        """Pass the request whose head has arrived to the application, in its turn.

        Args:
            answer: what its handler has returned, if it has been called.
        """
        version = self.parser.get_http_version()
        scope = scope_of(self.parser, self.url, self.headers, self.transport)
        if self._certificate:
            scope[CERTIFICATE] = self._certificate
        if answer is not None:
            scope[HANDED_OVER] = answer
        scope[UNTIL_SENT] = self.until_sent
        is_waiting = self._awaits_disk is not None or self._unanswered() is not None
        self.exchange = exchange = Exchange(
            self,
            scope,
            keep_alive=(
                not self._is_reserved and version != "1.0" and self.parser.should_keep_alive()
            ),
            expects_continue=self._expects_continue,
        )
        if not is_waiting:
            self._at_work = exchange
            self._start(exchange)
            return exchange
        self.pipeline.append(exchange)
        if len(self.pipeline) < PIPELINED_MAX:
            self.flow.resume_reading()  # else a disconnection would go unnoticed while one waits
        else:
            self.flow.pause_reading()
        return exchange

    def _start(self, exchange: Exchange) -> None:
        self._idle_since = None
        tasks = self.server_state.tasks
        task = self.loop.create_task(exchange.run(self.application))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def exchange_done(self) -> None:
        """Start the next request: an answer is out."""
        is_full = len(self.pipeline) >= PIPELINED_MAX
        if is_full and self._pieces is not None:
            self.loop.call_soon(self._take_next)
        if self.transport.is_closing() or not self.is_receiving:
            self._at_work = None
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._at_work = self.pipeline.popleft()
            self._start(self._at_work)
            return
        self._at_work = None
        self._is_between = self._rests()
        if self.phase is _REST:
            self._idle_since = 0.0
