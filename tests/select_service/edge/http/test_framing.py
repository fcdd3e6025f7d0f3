"""Where one request ends and the next begins: forms that servers and proxies read in two ways."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from select_service.edge.driver.driver import Driver
from select_service.edge.http.connection import HttpConnection
from select_service.edge.http.pieces import LINES_PER_TURN
from select_service.edge.server import Server
from tests.coroutines import within
from tests.select_service.edge.serving import PROMPT, Wire, add_worker, listening
from tests.wait import until

HEAD = b"POST /select HTTP/1.1\r\nhost: s\r\ncontent-type: application/json\r\n"
BODY = json.dumps(PROMPT).encode()
CHUNK = b"%x\r\n%s\r\n" % (len(BODY), BODY)
LAST = b"0\r\n\r\n"
HIDDEN = b"GET /metrics HTTP/1.1\r\nhost: s\r\nconnection: close\r\n\r\n"
SIZED = b"content-length: %d\r\n" % len(BODY)
CHUNKED = b"transfer-encoding: chunked\r\n"


async def statuses(wire: Wire) -> list[int]:
    """Read what is answered until the end."""
    heads = re.findall(rb"HTTP/1\.1 (\d+) ", await wire.rest())
    return [int(status) for status in heads]


REFUSED = {
    "both": HEAD + SIZED + CHUNKED + b"\r\n" + CHUNK + LAST,
    "both, no length": HEAD + b"content-length: 0\r\n" + CHUNKED + b"\r\n" + CHUNK + LAST,
    "blank before the colon": HEAD + b"transfer-encoding : chunked\r\n\r\n" + CHUNK + LAST,
    "another coding": HEAD + b"transfer-encoding: xchunked\r\n\r\n" + CHUNK + LAST,
    "chunked is not the last": HEAD + b"transfer-encoding: chunked, identity\r\n\r\n" + CHUNK,
    "two codings": HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n" + CHUNK + LAST,
    "two lines": HEAD + CHUNKED + b"transfer-encoding: identity\r\n\r\n" + CHUNK + LAST,
    "vertical tab": HEAD + b"transfer-encoding:\x0bchunked\r\n\r\n" + CHUNK + LAST,
    "chunks of 1.0": HEAD.replace(b"1.1", b"1.0") + CHUNKED + b"\r\n" + CHUNK + LAST,
    "length with a sign": HEAD + b"content-length: +%d\r\n\r\n" % len(BODY) + BODY,
    "length in hex": HEAD + b"content-length: 0x10\r\n\r\n" + BODY,
    "a list of lengths": HEAD + b"content-length: 9, 9\r\n\r\n" + BODY,
    "the same length twice": HEAD + SIZED + SIZED + b"\r\n" + BODY,
    "a length beyond 64 bits": HEAD + b"content-length: 99999999999999999999\r\n\r\n" + BODY,
    "folded line": HEAD + SIZED + b"x: a\r\n b\r\n\r\n" + BODY,
    "folded length": HEAD + b"content-length:\r\n %d\r\n\r\n" % len(BODY) + BODY,
    "folded coding": HEAD + b"transfer-encoding:\r\n chunked\r\n\r\n" + CHUNK + LAST,
    "bare line feeds": (HEAD + SIZED + b"\r\n").replace(b"\r\n", b"\n") + BODY,
    "one bare line feed": HEAD + b"x: a\n" + SIZED + b"\r\n" + BODY,
    "bare carriage return": HEAD + b"x: a\r" + SIZED + b"\r\n" + BODY,
    "chunk ends in a line feed": HEAD + CHUNKED + b"\r\n%x\n%s\r\n" % (len(BODY), BODY) + LAST,
    "data ends in a line feed": HEAD + CHUNKED + b"\r\n%x\r\n%s\n" % (len(BODY), BODY) + LAST,
    "chunk of 0x": HEAD + CHUNKED + b"\r\n0x2\r\n{}\r\n" + LAST,
    "chunk of blank": HEAD + CHUNKED + b"\r\n 2\r\n{}\r\n" + LAST,
    "chunk beyond 64 bits": HEAD + CHUNKED + b"\r\nffffffffffffffffff\r\n",
    "chunk below zero": HEAD + CHUNKED + b"\r\n-1\r\n",
    "line feed in an extension": HEAD + CHUNKED + b'\r\n2;a="\n"\r\n{}\r\n' + LAST,
    "a version to come": b"GET /health HTTP/2.0\r\nhost: s\r\n\r\n",
    "a version between": b"GET /health HTTP/1.2\r\nhost: s\r\n\r\n",
    "blank in a name": b"GET /health HTTP/1.1\r\nx y: 1\r\n\r\n",
    "no name": b"GET /health HTTP/1.1\r\n: 1\r\n\r\n",
    "tabs": b"GET\t/health\tHTTP/1.1\r\nhost: s\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "no HTTP": b"NONSENSE\r\n\r\n",
    "blank in a path": b"GET /a b HTTP/1.1\r\nhost: s\r\n\r\n",
    "zero byte in a value": b"GET /health HTTP/1.1\r\nx: a\x00b\r\n\r\n",
    "a proxy is asked for": b"CONNECT example.org:80 HTTP/1.1\r\nhost: example.org:80\r\n\r\n",
    "two lengths": HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}",
    "length below zero": HEAD + b"content-length: -1\r\n\r\n{}",
    "chunk of no number": HEAD + CHUNKED + b"\r\nzz\r\n",
    "no host": b"GET /health HTTP/1.1\r\nx: y\r\n\r\n",
    "no host, with a body": HEAD.replace(b"host: s\r\n", b"") + SIZED + b"\r\n" + BODY,
    "no host, with a whole URL": b"GET http://s/health HTTP/1.1\r\n\r\n",
    "two hosts": HEAD + b"host: t\r\n" + SIZED + b"\r\n" + BODY,
    "the same host twice": HEAD + b"host: s\r\n" + SIZED + b"\r\n" + BODY,
    "two hosts of 1.0": b"GET /health HTTP/1.0\r\nhost: s\r\nhost: s\r\n\r\n",
} | {
    f"host {value!r}": b"GET /health HTTP/1.1\r\nhost: %b\r\n\r\n" % value
    for value in (b"a b", b"a, b", b"a/b", b"u@h", b"s:80a", b"[::1", b"s:1:2", b"\xc3\xa4", b"%zz")
}


@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED.keys())
@within(listening)
async def test_what_can_be_read_in_two_ways_is_refused(
    port: int, service: Driver, server: Server, *, data: bytes
) -> None:
    """And nothing behind it is taken for a request."""
    add_worker(service)
    wire = await Wire.to(port)
    wire.say(data + HIDDEN)
    status, headers, body = await wire.answer()
    assert (status, json.loads(body)["code"]) == (400, "malformed_http")
    assert headers["content-type"] == "application/json"
    assert headers["connection"] == "close"
    assert await wire.rest() == b""
    assert server._counts.malformed == 1


@pytest.mark.parametrize(
    ("lines", "why"),
    [(b"", "no Host"), (b"host: a b\r\n", "no valid Host"), (b"host:\r\n" * 2, "more than one")],
)
@within(listening)
async def test_a_refusal_says_what_is_wrong(
    port: int, service: Driver, server: Server, *, lines: bytes, why: str
) -> None:
    wire = await Wire.to(port)
    wire.say(b"GET /health HTTP/1.1\r\n%b\r\n" % lines)
    assert why in (await wire.rest()).decode()
    assert server._counts.malformed == 1


READ = {
    "chunks": (HEAD + CHUNKED + b"\r\n" + CHUNK + LAST, [200]),
    "extensions": (HEAD + CHUNKED + b"\r\n2;a=b\r\n{}\r\n0;c\r\n\r\n", [400]),  # an empty object
    "trailers": (HEAD + CHUNKED + b"\r\n" + CHUNK + b"0\r\nx-more: y\r\n\r\n", [200]),
    "a body where none is asked for": (
        b"GET /health HTTP/1.1\r\nhost: s\r\ncontent-length: %d\r\n\r\n" % len(HIDDEN) + HIDDEN,
        [200],
    ),
    "HEAD": (b"HEAD /health HTTP/1.1\r\nhost: s\r\n\r\n", [200]),
    "OPTIONS": (b"OPTIONS /select HTTP/1.1\r\nhost: s\r\n\r\n", [405]),
    "OPTIONS of everything": (b"OPTIONS * HTTP/1.1\r\nhost: s\r\n\r\n", [404]),
    "two slashes": (b"GET //health HTTP/1.1\r\nhost: s\r\n\r\n", [404]),
    "TRACE": (b"TRACE /health HTTP/1.1\r\nhost: s\r\nx: secret\r\n\r\n", [405]),
    "blank lines before": (b"\r\n\r\n" + HEAD + SIZED + b"\r\n" + BODY, [200]),
    "expected": (HEAD + b"expect: 100-continue\r\n" + SIZED + b"\r\n" + BODY, [100, 200]),
    "gzip": (HEAD + b"content-encoding: gzip\r\n" + SIZED + b"\r\n" + BODY, [415]),
    "gzip in chunks": (
        HEAD + b"content-encoding: GZIP\r\n" + CHUNKED + b"\r\n" + CHUNK + LAST,
        [415],
    ),
    "identity": (HEAD + b"content-encoding: identity\r\n" + SIZED + b"\r\n" + BODY, [200]),
} | {
    f"host {value!r}": (b"GET /health HTTP/1.1\r\nhost:%b\r\n\r\n" % value, [200])
    for value in (b"", b" S.a_b-c~1:8092\t", b" [::1]:1", b" [fe80::1%25eth0]", b"%2Frun%2Fs.sock:")
}


@pytest.mark.parametrize(("data", "answers"), READ.values(), ids=READ.keys())
@within(listening)
async def test_what_has_one_reading(
    port: int, service: Driver, *, data: bytes, answers: list[int]
) -> None:
    """And the request behind it is answered."""
    add_worker(service)
    wire = await Wire.to(port)
    wire.say(data + HIDDEN)
    assert await statuses(wire) == [*answers, 200]


@within(listening)
async def test_a_trailer_is_no_header(port: int, service: Driver, server: Server) -> None:
    """A token behind the body was not there when the request was judged."""
    add_worker(service)
    wire = await Wire.to(port)
    wire.say(HEAD + CHUNKED + b"\r\n" + CHUNK)
    await until(lambda: bool(server.server_state.connections))
    (protocol,) = server.server_state.connections
    assert isinstance(protocol, HttpConnection)
    await until(lambda: bool(getattr(protocol, "headers", None)))
    seen = list(protocol.headers)
    wire.say(b"0\r\nauthorization: Bearer x\r\n" + b"a: b\r\n" * 500 + b"\r\n")
    assert (await wire.answer())[0] == 200
    assert protocol.headers == seen


@pytest.mark.parametrize("lines", [31, 32, 33])
@within(listening, header_lines_max=32)
async def test_header_lines_have_a_limit(port: int, *, lines: int) -> None:
    """Each costs forty times its bytes: sixty kilobytes of them were two megabytes and 10 ms."""
    wire = await Wire.to(port)
    wire.say(b"GET /health HTTP/1.1\r\nhost: s\r\n" + b"a:\r\n" * (lines - 1) + b"\r\n" + HIDDEN)
    assert await statuses(wire) == ([200, 200] if lines <= 32 else [431])
    other = await Wire.to(port)
    text = (await other.exchange("GET", "/metrics"))[2].decode()
    assert f'limit_hits_total{{name="header_lines_max"}} {float(lines > 32)}' in text


FLOODS = {
    "requests": (b"GET /health HTTP/1.1\r\nhost: s\r\n\r\n" * 3_000, 3_000),
    "chunks": (HEAD + CHUNKED + b"\r\n" + b"1\r\n \r\n" * 20_000 + CHUNK + LAST, 1),
    "trailers": (HEAD + CHUNKED + b"\r\n" + CHUNK + b"0\r\n" + b"a:\r\n" * 20_000 + b"\r\n", 1),
}


@pytest.mark.parametrize(("data", "answers"), FLOODS.values(), ids=FLOODS.keys())
async def test_many_lines_are_parsed_in_many_turns(
    data: bytes, answers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five thousand requests in one read held the loop for 0.4 s."""
    most = 0
    genuine = HttpConnection.take

    def take(self: HttpConnection, piece: bytes) -> None:
        nonlocal most
        most = max(most, piece.count(b"\n"))
        genuine(self, piece)

    monkeypatch.setattr(HttpConnection, "take", take)
    async with listening() as (port, service, _):
        add_worker(service)
        wire, other = await Wire.to(port), await Wire.to(port)
        wire.say(data + HIDDEN)
        other.ask("GET", "/health")
        assert (await other.answer())[0] == 200
        found = await statuses(wire)
        assert found == [200] * (answers + 1)
    assert most == LINES_PER_TURN


@within(listening)
async def test_half_closed_connections_are_given_back(
    port: int, service: Driver, server: Server
) -> None:
    """Clients that stop talking: with half a head, half a body, or all said."""
    wires, whole = [], b"GET /health HTTP/1.1\r\nhost: s\r\n\r\n"
    for said in (b"", b"GET /hea", HEAD + SIZED + b"\r\n{", whole) * 50:
        wires.append(await Wire.to(port))
        wires[-1].say(said)
        wires[-1].writer.write_eof()
    answers = await asyncio.gather(*(wire.rest() for wire in wires))
    assert sum(one.startswith(b"HTTP/1.1 200") for one in answers) == 50
    await until(lambda: not server.server_state.connections)


ENDLESS = {
    "a trailer": CHUNK + b"0\r\nx: ",
    "the name of a trailer": CHUNK + b"0\r\n",
    "an extension": b"2;",
    "a size": b"0" * 9,
    "a trailer behind others": CHUNK + b"0\r\n" + b"a: b\r\n" * 500 + b"x: ",
}


@pytest.mark.parametrize("way", ["fast", "asgi"])
@pytest.mark.parametrize("start", ENDLESS.values(), ids=ENDLESS.keys())
@within(listening, head_bytes_max=20_000)
async def test_a_line_around_chunks_has_an_end(
    port: int, service: Driver, server: Server, *, start: bytes, way: str
) -> None:
    """A trailer was kept as it grew, as long as a body may take to arrive."""
    add_worker(service)
    wire = await Wire.to(port)
    more = b"" if way == "fast" else b"content-encoding: identity\r\n"
    wire.say(HEAD + more + CHUNKED + b"\r\n" + start)
    while not server._counts.malformed:
        wire.say(b"0" * 4_000)
        await asyncio.sleep(0)
    assert await statuses(wire) == [431]


@within(listening, head_bytes_max=20_000)
async def test_trailers_within_the_limit_are_passed_over(port: int, service: Driver) -> None:
    add_worker(service)
    wire = await Wire.to(port)
    wire.say(HEAD + CHUNKED + b"\r\n" + CHUNK + b"0\r\n")
    for _line in range(30):
        wire.say(b"x: " + b"a" * 1_000 + b"\r\n")
        await asyncio.sleep(0)
    wire.say(b"\r\n" + HIDDEN)
    assert await statuses(wire) == [200, 200]


@pytest.mark.parametrize("more", [b"", b"content-encoding: identity\r\n"], ids=["fast", "asgi"])
@within(listening)
async def test_a_connection_whose_end_is_said_in_a_trailer_ends(
    port: int, service: Driver, *, more: bytes
) -> None:
    """The parser passes over all that follows: who asked again waited for nothing."""
    add_worker(service)
    wire = await Wire.to(port)
    wire.say(HEAD + more + CHUNKED + b"\r\n" + CHUNK + b"0\r\nconnection: close\r\n\r\n")
    assert await statuses(wire) == [200]


@within(listening, max_body_bytes=64)
async def test_nor_does_it_last_if_all_is_answered_before(port: int) -> None:
    wire = await Wire.to(port)
    wire.say(HEAD + CHUNKED + b"\r\n40\r\n" + b" " * 64 + b"\r\n1\r\n \r\n")
    assert (await wire.answer())[0] == 413
    wire.say(b"0\r\nconnection: close\r\n\r\n")
    assert await wire.rest() == b""
