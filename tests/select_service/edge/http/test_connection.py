"""Both ways to a handler give the same answers; the synchronous one is taken where it may be."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from select_service.edge.app import create_application, create_driver
from select_service.edge.codec.responses import Response
from select_service.edge.driver.driver import Driver
from select_service.edge.http.application import Application
from select_service.edge.http.connection import HttpConnection
from select_service.edge.http.routes import ROUTES
from select_service.edge.server import Server
from tests.coroutines import within
from tests.select_service.edge.serving import PROMPT, SETTINGS, Wire, add_worker, listening
from tests.wait import until

BOOKING = {**PROMPT, "reservation_id": "r/1"}
EXCHANGES: list[tuple[str, str, object]] = [
    ("GET", "/health", None),
    ("GET", "/ready", None),
    ("GET", "/workers?model_name=default&x=%ff", None),
    ("GET", "/workers?model_name=a&model_name=b", None),
    ("POST", "/select", PROMPT),
    ("POST", "/select", {**PROMPT, "surprise": 1}),
    ("POST", "/select", {**PROMPT, "isl_tokens": -1}),
    ("POST", "/select", {**PROMPT, "model_name": "nobody's"}),
    ("POST", "/select", None),
    ("GET", "/select", None),
    ("HEAD", "/health", None),
    ("GET", "/nowhere", None),
    ("GET", "/nowhere?asked=1", None),
    ("POST", "/nowhere", None),
    ("POST", "/nowhere", {"a": "body"}),
    ("HEAD", "/nowhere", None),
    ("OPTIONS", "/select", None),
    ("GET", "/", None),
    ("GET", "//", None),
    ("GET", "http://s/nowhere", None),
    ("DELETE", "/workers", None),
    ("PATCH", "/workers/one", {}),
    ("DELETE", "/reservations/never%20seen", None),
    ("DELETE", "/reservations/%ff", None),
    ("DELETE", "/reservations/", None),
    ("POST", "/reservations/never/output_block", {}),
    ("POST", "/leases", {"owner": "o", "ttl_s": 9, "lease_id": "l"}),
    ("POST", "/leases/never/renew", None),
    ("POST", "/leases/never/renew", {"ttl_s": 5}),
    ("DELETE", "/leases/never", None),
    ("DELETE", "/reservations/batch", None),
    ("POST", "/reservations/batch", {"operations": [{"op": "free", "reservation_id": "x"}]}),
    ("GET", "/loads#top", None),
    ("GET", "/dump", None),
]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The paths of the requests answered without an exchange."""
    paths: list[bytes] = []
    real = Application.answer_now

    def spy(self: Application, call: Any, *what: Any, is_exchange: bool = False) -> Any:
        answer = real(self, call, *what, is_exchange=is_exchange)
        if not is_exchange and isinstance(answer, Response) and answer.stream is None:
            paths.append(call.path)
        return answer

    monkeypatch.setattr(Application, "answer_now", spy)
    return paths


def _make_all_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HttpConnection, "data_received", HttpConnection.read)
    monkeypatch.setattr(Application, "call_for", lambda *_: None)


async def _exchange(
    wire: Wire, exchange: tuple[str, str, object], *headers: str, packed: bool = False
) -> tuple[int, dict[str, str], bytes]:
    ask = wire.ask_packed if packed else wire.ask
    ask(*exchange, *headers)
    if exchange[0] == "HEAD":
        status, got, body = await _head(wire)
    elif exchange[1] == "/dump":
        got, body = {}, (await wire.reader.readuntil(b"\r\n0\r\n\r\n")).partition(b"\r\n\r\n")[2]
        status = 200
    else:
        status, got, body = await wire.answer()
    got.pop("date", None)
    got.pop("connection", None)
    return status, got, body


async def _head(wire: Wire) -> tuple[int, dict[str, str], bytes]:
    lines = (await wire.reader.readuntil(b"\r\n\r\n")).decode().splitlines()
    headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
    return int(lines[0].split()[1]), headers, b""


@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda e: f"{e[0]} {e[1]}")
@within(listening)
async def test_both_ways_answer_alike(
    port: int,
    service: Driver,
    *,
    exchange: tuple[str, str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add_worker(service)
    service.dumps._clock = lambda: 0.0  # how a dump is cut in pieces is a matter of time
    fast = await _exchange(await Wire.to(port), exchange)
    _make_all_exchanges(monkeypatch)
    again = await _exchange(await Wire.to(port), exchange)
    assert again == fast or _without_time(again, json.loads) == _without_time(fast, json.loads)


FIXED = ("/dump", "/openapi.json", "/metrics")


@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda e: f"{e[0]} {e[1]}")
@pytest.mark.parametrize("packed", [True, False], ids=["packed body", "JSON body"])
async def test_both_ways_answer_alike_in_msgpack(
    exchange: tuple[str, str, object], packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept = "accept: application/x-msgpack"
    async with listening() as (port, service, _):
        add_worker(service)
        service.dumps._clock = lambda: 0.0  # how a dump is cut in pieces is a matter of time
        _, _, plain = await _exchange(await Wire.to(port), exchange)
        fast = await _exchange(await Wire.to(port), exchange, accept, packed=packed)
        _, headers, body = fast
        if exchange[1] in FIXED:
            assert headers.get("content-type") != "application/x-msgpack"
        else:
            assert headers["content-type"] == "application/x-msgpack"
            assert headers["vary"] == "accept"
            if exchange[0] != "HEAD":
                assert _told(msgspec.msgpack.decode(body)) == _told(json.loads(plain))
        _make_all_exchanges(monkeypatch)
        again = await _exchange(await Wire.to(port), exchange, accept, packed=packed)
        decode = msgspec.msgpack.decode
        assert again == fast or _without_time(again, decode) == _without_time(fast, decode)


def _without_time(
    answer: tuple[int, dict[str, str], bytes], decode: Callable[[bytes], Any]
) -> tuple[int, dict[str, str], Any]:
    """An answer whose seconds may be written with more digits, or fewer."""
    status, headers, body = answer
    return status, {**headers, "content-length": ""}, _told(decode(body))


def _told(answer: Any) -> Any:
    """An answer without what differs from one moment to the next."""
    if isinstance(answer, dict):
        return {k: _told(v) for k, v in answer.items() if k != "expires_in_s"}
    return [_told(v) for v in answer] if isinstance(answer, list) else answer


@pytest.mark.parametrize(
    ("name", "is_usual"),
    [
        ("0a9c-7f", True),
        ("r.1~x:prefill@host_2", True),
        ("batch", True),
        ("a%20b", False),
        ("caf\u00e9", False),
        ("a?x=1", False),
        ("a#b", False),
        ("a/b", False),
        ("", False),
    ],
)
def test_a_call_with_an_id_is_the_one_that_the_router_finds(name: str, is_usual: bool) -> None:
    application = create_application(create_driver(SETTINGS), SETTINGS)[0]
    head = application.head_of(b"application/json", None)
    found = set()
    for route in ROUTES:
        path = re.sub(r"{\w+}", name, route.pattern)
        for method in {route.method, "DELETE", "GET"}:
            line = f"{method} {path} HTTP/1.1".encode()
            call = application.call_in_line(line) or application.call_with_id(line)
            if call is not None:
                assert call == application.call_for(method.encode(), path.encode(), head, 2)
                found.add((method, route.pattern))
    with_id = {(route.method, route.pattern) for route in ROUTES if "{" in route.pattern}
    assert with_id <= found if is_usual else not with_id & found


@within(listening)
async def test_one_connection_may_speak_both(
    port: int, service: Driver, *, taken: list[bytes]
) -> None:
    add_worker(service)
    wire = await Wire.to(port)
    packed = {**PROMPT, "block_hashes": bytes(16), "sequence_hashes": bytes(16)}
    answers = []
    for _ in range(3):  # learnt, looked up by lines, looked up by the whole head
        answers.append((await wire.exchange("POST", "/select", PROMPT))[1:])
        answers.append(
            (await wire.exchange("POST", "/select", PROMPT, "accept: application/msgpack"))[1:]
        )
        wire.ask_packed("POST", "/select", packed)
        answers.append((await wire.answer())[1:])
        wire.ask_packed("POST", "/select", packed, "accept: application/vnd.msgpack")
        answers.append((await wire.answer())[1:])
    types = [headers["content-type"].partition("/")[2] for headers, _ in answers]
    assert types == ["json", "msgpack", "json", "vnd.msgpack"] * 3
    values = [
        json.loads(body) if kind == "json" else msgspec.msgpack.decode(body)
        for kind, (_, body) in zip(types, answers, strict=True)
    ]
    assert values == [values[0]] * 12
    assert len(taken) == 12


@within(listening)
async def test_a_lifecycle_needs_no_exchange(
    port: int, service: Driver, *, taken: list[bytes]
) -> None:
    add_worker(service)
    wire = await Wire.to(port)
    for method, path, body in (
        ("POST", "/select_and_reserve", BOOKING),
        ("POST", "/reservations/r%2F1/prefill_complete", None),
        ("POST", "/reservations/r%2F1/output_block", {}),
        ("DELETE", "/reservations/r%2F1", None),
    ):
        assert await wire.status(method, path, body) == 200
    assert len(taken) == 4


@within(listening)
async def test_who_pipelines_is_answered_in_order_and_one_at_a_time(
    port: int, service: Driver, server: Server, *, taken: list[bytes]
) -> None:
    add_worker(service)
    wire = await Wire.to(port)
    for path in ("/health", "/ready", "/workers", "/health"):
        wire.ask("GET", path)
    bodies = [json.loads((await wire.answer())[2]) for _ in range(4)]
    assert bodies[0] == bodies[3] == {"status": "ok"}
    assert "ready" in bodies[1]
    assert bodies[2][0]["worker_id"] == 1
    assert taken == [b"/health"]


@within(listening)
async def test_who_asks_for_what_is_not_there_is_told_so_at_once(
    port: int, *, taken: list[bytes]
) -> None:
    wire = await Wire.to(port)
    for _ in range(2):  # learnt, and known
        assert await wire.status("GET", "/nowhere?asked=1", None) == 404
        status, headers, _body = await wire.exchange("GET", "/select", None)
        assert (status, headers["allow"]) == (405, "POST")
        assert await wire.status("DELETE", "/reservations/%ff", None) == 400
    assert taken == 2 * [b"/nowhere", b"/select", b"/reservations/%ff"]
    wire.ask("POST", "/nowhere", {"a": "body"})  # which somebody has to read
    wire.ask("HEAD", "/nowhere", None)
    assert (await wire.answer())[0] == 404
    assert (await _head(wire))[0] == 404
    assert len(taken) == 6


@pytest.mark.parametrize(
    "headers",
    [("upgrade: x",), ("expect: 100-continue",), ("content-length: 99999999999999",)],
)
@within(listening)
async def test_the_unusual_goes_the_long_way(
    port: int, *, taken: list[bytes], headers: tuple[str, ...]
) -> None:
    wire = await Wire.to(port)
    wire.say("\r\n".join(["GET /health HTTP/1.1", "host: s", *headers, "", ""]).encode())
    assert (await wire.answer())[0] == 200
    assert taken == []


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.0\r\n\r\n",
        b"GET /health HTTP/1.0\r\nconnection: keep-alive\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: s\r\nconnection: close\r\n\r\n",
    ],
)
@pytest.mark.parametrize("more", [b"", b"GET /health HTTP/1.1\r\nhost: s\r\n\r\n", b"x\r\n"])
@within(listening)
async def test_who_asks_once_is_answered_and_parted_with(
    port: int, *, taken: list[bytes], head: bytes, more: bytes
) -> None:
    for _again in range(3):  # the second time its lines are known
        wire = await Wire.to(port)
        wire.say(head + more)
        status, headers, _body = await wire.answer()
        assert (status, headers["connection"]) == (200, "close")
        assert await wire.rest() == b""
    assert taken == [b"/health"] * 3


CHUNKED = (
    b"POST /select HTTP/1.1\r\nhost: s\r\ncontent-type: %b\r\ntransfer-encoding: Chunked\r\n\r\n"
)


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("end", [b"0\r\n\r\n", b"0\r\nx: y\r\n\r\n"])
@within(listening)
async def test_a_body_in_chunks(
    port: int, service: Driver, *, taken: list[bytes], size: int, end: bytes
) -> None:
    add_worker(service)
    body = json.dumps(PROMPT).encode()
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + end
    wire = await Wire.to(port)
    for _again in range(3):
        wire.say(CHUNKED % b"application/json" + chunks)
        assert (await wire.answer())[0] == 200
    assert taken == [b"/select"] * 3


@within(listening, max_body_bytes=64)
async def test_chunks_of_more_than_a_body_may_have(port: int, *, taken: list[bytes]) -> None:
    wire = await Wire.to(port)
    wire.say(CHUNKED % b"application/json" + b"40\r\n" + b" " * 64 + b"\r\n")
    wire.say(b"1\r\n \r\n0\r\n\r\n")
    status, _headers, body = await wire.answer()
    assert (status, json.loads(body)["code"]) == (413, "body_too_large")
    wire = await Wire.to(port)
    wire.say(CHUNKED % b"text/plain" + b"1\r\nx\r\n0\r\n\r\n")
    assert (await wire.answer())[0] == 415
    assert taken == []


@pytest.mark.parametrize(
    "body",
    [b"content-length: 64\r\n\r\n%b", b"transfer-encoding: chunked\r\n\r\n40\r\n%b\r\n0\r\n\r\n"],
    ids=["length", "chunks"],
)
@within(listening)
async def test_a_body_nobody_reads_is_not_kept(
    port: int, service: Driver, server: Server, *, body: bytes, taken: list[bytes]
) -> None:
    wire = await Wire.to(port)
    data = b"GET /health HTTP/1.1\r\nhost: s\r\n" + body % (b" " * 64)
    wire.say(data[:-10])
    await until(lambda: bool(server.server_state.connections))
    (connection,) = server.server_state.connections
    await until(lambda: getattr(connection, "_call", None) is not None)
    assert getattr(connection, "_body", None) == b""
    wire.say(data[-10:])
    assert (await wire.answer())[0] == 200
    assert taken == [b"/health"]


@pytest.mark.parametrize("more", [b"zzz\r\n", b""], ids=["nonsense", "nothing"])
@within(listening, max_body_bytes=64, body_timeout_s=0.3)
async def test_who_was_told_that_a_body_is_too_long_is_told_nothing_more(
    port: int, *, more: bytes
) -> None:
    """A proxy would take a second answer for that to the next request, which may be another's."""
    wire = await Wire.to(port)
    wire.say(CHUNKED % b"application/json" + b"40\r\n" + b" " * 64 + b"\r\n1\r\n \r\n")
    assert (await wire.answer())[0] == 413
    wire.say(more)
    assert await wire.rest() == b""


@within(listening, access_log=True)
async def test_with_an_access_log_every_request_is_in_it(port: int, *, taken: list[bytes]) -> None:
    wire = await Wire.to(port)
    assert await wire.status("GET", "/health") == 200
    assert taken == []


@pytest.mark.parametrize("way", ["fast", "asgi"])
@within(listening, keep_alive_timeout_s=1, header_timeout_s=0.3, body_timeout_s=0.3)
async def test_a_blank_line_after_an_answer_does_not_keep_the_connection(
    port: int, *, way: str
) -> None:
    wire = await Wire.to(port)
    wire.ask("GET" if way == "fast" else "HEAD", "/health")
    await wire.reader.readuntil(b"\r\n\r\n")
    wire.say(b"\r\n")  # a parser skips it: nothing has begun
    assert await wire.rest() in (b"", b'{"status":"ok"}')


@within(listening)
async def test_what_stands_before_a_request_is_no_part_of_its_head(
    port: int, *, taken: list[bytes]
) -> None:
    wire = await Wire.to(port)
    wire.say(b"\r\nGET /health HTTP/1.1\r\nhost: s\r\n\r\n")
    assert (await wire.answer())[0] == 200
    wire.say(b"GET /health HTTP/1.1\r\nGET /health HTTP/1.1\r\nhost: s\r\n\r\n")
    assert (await wire.answer())[0] == 400
    assert taken == [b"/health"]


@within(listening)
async def test_an_upgrade_does_not_overtake_who_came_before_it(
    port: int, service: Driver, server: Server
) -> None:
    wire = await Wire.to(port)
    known = b"GET /health HTTP/1.1\r\nhost: s\r\n\r\n"
    upgrade = known[:-2] + b"connection: upgrade\r\nupgrade: h2c\r\n\r\n"
    wire.say(known)
    assert (await wire.answer())[0] == 200
    wire.say(b"PUT /health HTTP/1.1\r\nhost: s\r\n\r\n" + upgrade)
    assert [(await wire.answer())[0] for _ in range(2)] == [405, 200]


@within(listening)
async def test_a_body_that_arrives_while_the_server_leaves(
    port: int, service: Driver, server: Server, *, taken: list[bytes]
) -> None:
    add_worker(service)
    body = json.dumps(PROMPT).encode()
    wire = await Wire.to(port)
    head = b"POST /select HTTP/1.1\r\nhost: s\r\ncontent-type: application/json\r\n"
    wire.say(head + b"content-length: %d\r\n\r\n" % len(body) + body[:-1])
    await until(lambda: len(server.server_state.connections) == 1)
    (connection,) = server.server_state.connections
    await until(lambda: getattr(connection, "_call", None) is not None)
    connection.shutdown()
    wire.say(body[-1:])
    status, headers, _ = await wire.answer()
    assert (status, headers["connection"]) == (200, "close")
    assert await wire.rest() == b""
    assert taken == [b"/select"]


@within(listening)
async def test_a_refusal_comes_behind_the_answer_before_it(port: int) -> None:
    wire = await Wire.to(port)
    for _ in range(2):  # the second time its lines are known
        await _exchange(wire, ("GET", "/health", None))
    wire.ask("GET", "/health", None)
    wire.writer.write(b"no HTTP\r\n\r\n")
    assert [(await wire.answer())[0] for _ in range(2)] == [200, 400]
