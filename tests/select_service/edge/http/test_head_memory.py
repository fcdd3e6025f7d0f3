"""Remembered heads change no answer: any stream of requests, cut anywhere, is answered as parsed.

The same bytes go to two servers, one of which may not answer from what it remembers of heads.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import tempfile
from collections.abc import Iterator
from typing import Any, Final, NamedTuple, TypeAlias
from unittest import mock

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from select_service.edge.app import create_application, create_driver
from select_service.edge.http.connection import HttpConnection
from select_service.edge.http.header_cache import PEERS_MAX, Peers
from select_service.edge.http.listening_sockets import ListeningSockets
from select_service.edge.http.traffic import CLIENT_GONE
from select_service.edge.server import Server
from select_service.settings import Durability
from tests.conftest import MEMORY
from tests.effort import examples, share_of
from tests.select_service.edge.serving import PROMPT, SETTINGS, add_worker

TURNS = 20
"""Of the loop, after which nobody has anything left to do who does not wait for disk or client."""

JSON = b"content-type: application/json"
PACKED = b"content-type: application/msgpack"
BODY = json.dumps(PROMPT).encode()
LENGTH = len(BODY)


def ask(
    line: bytes, *headers: bytes, body: bytes = b"", length: object = None, eol: bytes = b"\r\n"
) -> bytes:
    """A request; `length` is what it says of its body, and by default the truth."""
    said = length if length is not None else len(body) or None
    lengths = [] if said is None else [b"content-length: %b" % str(said).encode()]
    if b" HTTP/" not in line:
        line += b" HTTP/1.1"
    return eol.join([line, b"host: s", *headers, *lengths, b"", b""]) + body


def select(*headers: bytes, path: bytes = b"/select", **more: Any) -> bytes:
    return ask(b"POST " + path, JSON, *headers, **{"body": BODY, **more})


HEALTH = ask(b"GET /health")
PLAIN = [
    HEALTH,
    HEALTH,
    ask(b"GET /health", b"x: y"),
    select(),
    select(),
    select(path=b"/select?a=b"),
    select(path=b"/select_and_reserve"),
    ask(b"GET /loads?model_name=default"),
    ask(b"GET /loads#x"),
    ask(b"DELETE /leases/x"),
]
VARYING = [
    select(b"traceparent: x"),
    select(b"Baggage:", b"b3:  y"),
    select(b"b3: x", b"b3: y"),
    select(b"b3: \x80"),
    select(b"b3:" + b" " * 600),
    ask(b"GET /health", b"tracestate: a=b"),
    ask(b"GET /loads?model_name=default", b"x-request-id: 1"),
    select(b"X-Forwarded-For: 10.0.0.7, 10.0.0.8", b"cookie: a=b"),
    select(b"authorization: Bearer x"),
    select(b"x_y: z", b"via:", b"keep-alive: 5"),
    select(body=BODY + b" " * 9),
    select(body=BODY + b"\n"),
    select(length=f"0{LENGTH}"),
    select(length=f"\t{LENGTH}"),
]
LEASE = b'{"owner":"o","ttl_s":600,"lease_id":"l"}'
FORMS = [
    ask(b"GET /health", b"accept: application/msgpack"),
    ask(b"GET /nope", b"accept: application/msgpack"),
    select(b"accept: application/x-msgpack"),
    select(b"accept: application/json", b"accept: application/msgpack;q=0.1"),
    ask(b"POST /select", PACKED, body=msgspec.msgpack.encode(PROMPT)),
    ask(b"POST /select", PACKED, body=BODY),
    ask(b"POST /select", b"content-type: text/plain", body=b"nojson"),
]
CALLS = [
    ask(b"DELETE /reservations/a%2Fb"),
    ask(b"HEAD /health"),
    ask(b"PUT /health"),
    ask(b"GET /nope"),
    ask(b"GET /dump"),
    ask(b"GET http://s/health"),
    ask(b"POST /leases/x/renew"),
    ask(b"POST /leases/x/renew", length=0),
    ask(b"POST /leases", JSON, body=LEASE),
    select(body=b"{}"),
    ask(b"GET /health", body=b"zzz"),
]
LENGTHS = [
    select(b"expect: 100-continue"),
    select(b"transfer-encoding: chunked"),
    ask(b"POST /select", JSON, b"transfer-encoding: chunked")
    + b"%x\r\n%b\r\n0\r\n\r\n" % (LENGTH, BODY),
    select(b"content-length: 3"),
    select(length=f"{LENGTH} "),
    select(length=f"+{LENGTH}"),
    select(length=LENGTH + 3),
    select(length=LENGTH - 3),
]
UPGRADE = ask(b"GET /health", b"connection: upgrade", b"upgrade: h2c")
ENDS = [
    UPGRADE,
    select(b"x(y: z"),
    select(b"proxy-connection: close"),
    select(*(b"x: y" for _ in range(200))),
    select(b"connection: close"),
    select(b"connection: close, x") + HEALTH,
    ask(b"POST /select HTTP/1.0", JSON, body=BODY),
    ask(b"POST /select HTTP/1.0", JSON, b"transfer-encoding: chunked"),
    ask(b"GET /health HTTP/1.0").replace(b"host: s\r\n", b""),
    ask(b"GET /nope", b"connection: close"),
    ask(b"POST /select", JSON, b"transfer-encoding: chunked, chunked") + b"0\r\n\r\n",
    ask(b"POST /leases/x/renew", b"transfer-encoding: chunked") + b"1\r\nx\r\n0\r\nx: y\r\n\r\n",
    ask(b"GET /health", b"connection: close"),
    ask(b"GET /health", b"transfer-encoding: chunked") + b"0\r\nconnection: close\r\n\r\n",
    ask(b"GET /health HTTP/1.0"),
    ask(b"GET /health", b"connection: upgrade, http2-settings", b"upgrade: h2c"),
]
ODD = [
    b"\r\n\r\n",
    b"\r\n" + HEALTH,
    HEALTH + b"\r\n",
    b"GET /health HTTP/1.1\r\n" + HEALTH,
    b"GET /health HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/1.0\r\n\r\n",
    ask(b"GET /health", b"host: s"),
    select(b"host: t"),
    select().replace(b"host: s\r\n", b""),
    HEALTH.replace(b"host: s", b"host: a b"),
    ask(b"GET  /health"),
    ask(b"GET /he alth"),
    ask(b"get /health"),
    ask(b"GET /health", eol=b"\n"),
    ask(b"GET /health", b"a: b\r\n c"),
    ask(b"GET /health", b"b3: x\r\n content-length: 3"),
    select(b"b3: x\r\n b3: y"),
    select(b"b3 : x"),
]
sound = st.sampled_from(PLAIN) | st.sampled_from([*FORMS, *CALLS, *VARYING])
anything = sound | st.sampled_from(LENGTHS) | st.sampled_from(ENDS) | st.sampled_from(ODD)


class Stream(NamedTuple):
    """What one connection brings, in the pieces in which it is read."""

    pieces: list[bytes]
    is_hurried: bool = False  # the next piece comes while answers are still being made


@st.composite
def streams(draw: st.DrawFn) -> Stream:
    is_hurried = draw(st.booleans())
    # nonsense ends a connection, and with it the answers that are not out yet: when is chance
    asked = draw(st.lists(sound if is_hurried else anything, min_size=1, max_size=7))
    whole = b"".join(asked)
    starts = {sum(map(len, asked[:n])) for n in range(1, len(asked))}
    anywhere = st.integers(1, len(whole) - 1)
    cuts = draw(
        st.sampled_from([starts, set()])
        | st.sets(anywhere, max_size=3).map(starts.union)
        | st.sets(anywhere, max_size=40)
    )
    edges = [0, *sorted(cuts), len(whole)]
    return Stream([whole[a:b] for a, b in itertools.pairwise(edges)], is_hurried)


connections = st.lists(streams(), min_size=1, max_size=8)
LEARNT = Stream([HEALTH, HEALTH, HEALTH, select(), select(), select()])


class Wire(asyncio.Transport):
    """The server's end of a connection: keeps what is written until it is closed."""

    def __init__(self) -> None:
        super().__init__({"sockname": ("127.0.0.1", 80), "peername": ("127.0.0.1", 9)})
        self.said = b""
        self.is_ended = False
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.is_ended, "nothing is said after the end"
        if not self.is_closed:
            self.said += data

    def get_write_buffer_size(self) -> int:
        return 0

    def write_eof(self) -> None:
        self.is_ended = True

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def pause_reading(self) -> None:
        """Nothing is read that the test does not bring."""

    resume_reading = pause_reading


def waits(lane: HttpConnection) -> bool:
    """Whether an answer is being made, of a request that is all there."""
    if lane._awaits_disk is not None:
        return True
    newest = lane.exchange
    if lane.pipeline and not lane._refused:
        return True  # one before it has no answer yet
    return newest is not None and not (
        newest.response_complete or newest.disconnected or newest.more_body
    )


async def settle(lane: HttpConnection) -> None:
    while True:
        for _ in range(TURNS):
            await asyncio.sleep(0)
        if not waits(lane):
            return


async def answer_to(server: Server, stream: Stream) -> bytes:
    """All that one connection is answered, without what differs from one run to the next."""
    protocol: Any = server.config.http_protocol_class
    lane: HttpConnection = protocol(
        config=server.config, server_state=server.server_state, app_state={}
    )
    wire = Wire()
    lane.connection_made(wire)
    for piece in stream.pieces:
        if wire.is_closed:
            break
        lane.data_received(piece)
        await (asyncio.sleep(0) if stream.is_hurried else settle(lane))
    await settle(lane)
    lane.eof_received()
    wire.close()
    lane.connection_lost(None)
    await settle(lane)
    ids = re.sub(rb'"(selection|reservation)_id":"[^"]*"', b"ID", wire.said)
    timeless = re.sub(rb'"expires_in_s":[0-9.]+', b"TIME", ids)
    # which is written with more digits or fewer
    return re.sub(rb"content-length: [0-9]+(\r\n\r\n[^\r]*TIME)", rb"content-length: N\1", timeless)


Outcome: TypeAlias = tuple[list[bytes], dict[tuple[str, str], dict[int, int]]]


async def answers(streams: list[Stream], **chosen: Any) -> Outcome:
    """What a new server says to each of them, one after the other, and what it has counted."""
    options = msgspec.structs.replace(SETTINGS, **chosen)
    service = create_driver(options)
    await service.start()
    try:
        add_worker(service)
        service.dumps._clock = lambda: 0.0  # how a dump is cut in pieces is a matter of time
        with ListeningSockets.bound((options.host, 0), None, 0) as entrances:
            server = Server(options, *create_application(service, options), entrances)
            server.config.load()
            said = [await answer_to(server, stream) for stream in streams]
            traffic = server._application._traffic
            assert traffic.crashes == 0
            assert not server.server_state.tasks
            counted = {name: dict(one.statuses) for name, one in traffic.routes.items()}
            for name, one in traffic.routes.items():
                assert sum(one.buckets) == sum(counted[name].values())
            # who is next when a connection ends in nonsense may just have begun, or may not
            return said, {name: _answered(statuses) for name, statuses in counted.items()}
    finally:
        await service.close()


def _answered(statuses: dict[int, int]) -> dict[int, int]:
    return {status: count for status, count in statuses.items() if status != CLIENT_GONE}


@contextlib.contextmanager
def remembering() -> Iterator[list[bytes]]:
    """What is answered without having been parsed."""
    answered: list[bytes] = []
    receive, read = HttpConnection.data_received, HttpConnection.read
    parsed: list[bytes] = []

    def spy(self: HttpConnection, data: bytes) -> None:
        parsed.clear()
        receive(self, data)
        if not parsed:
            answered.append(data)

    def note(self: HttpConnection, data: bytes) -> None:
        parsed.append(data)
        read(self, data)

    with (
        mock.patch.object(HttpConnection, "data_received", spy),
        mock.patch.object(HttpConnection, "read", note),
    ):
        yield answered


def agree(streams: list[Stream], **chosen: Any) -> None:
    streams = [LEARNT, *streams]
    with remembering() as answered:
        remembered = asyncio.run(answers(streams, **chosen))
    assert HEALTH in answered
    assert select() in answered
    with mock.patch.object(HttpConnection, "data_received", HttpConnection.read):
        parsed = asyncio.run(answers(streams, **_elsewhere(chosen, "parsed")))
    assert remembered == parsed


def _elsewhere(chosen: dict[str, Any], where: str) -> dict[str, Any]:
    return {name: f"{v}-{where}" if name == "state_dir" else v for name, v in chosen.items()}


def agree_on_disk(streams: list[Stream]) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.exists() else None) as folder:
        agree(streams, state_dir=f"{folder}/state", durability=Durability.STRICT)


@settings(max_examples=examples(40))
@given(connections)
@example([Stream([ask(b"PUT /health") + UPGRADE])])
def test_remembered_heads_change_no_answer(streams: list[Stream]) -> None:
    agree(streams)


LAST: Final = b"GET /health HTTP/1.1\r\nhost: s\r\nconnection: close\r\n\r\n"
PIPELINED: Final = [
    *(Stream([HEALTH * count]) for count in (2, 16, 17, 40)),
    Stream([select() * 3 + HEALTH[:10], HEALTH[10:] + select()]),
    Stream([HEALTH + LAST + HEALTH]),
    Stream([LAST, HEALTH]),
    Stream([LAST]),
    Stream([HEALTH + ask(b"GET /nowhere") + HEALTH]),
    Stream([HEALTH + ask(b"GET /dump") + HEALTH * 2]),
]


def test_nor_where_clients_pipeline() -> None:
    agree(PIPELINED)
    agree_on_disk(PIPELINED)


@settings(max_examples=examples(20))
@given(connections)
def test_nor_where_answers_wait_for_the_disk(streams: list[Stream]) -> None:
    agree_on_disk(streams)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@settings(max_examples=share_of(3_000))
@given(connections)
def test_remembered_heads_change_no_answer_for_long(streams: list[Stream]) -> None:
    agree(streams)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@settings(max_examples=share_of(500))
@given(connections)
def test_nor_where_answers_wait_for_the_disk_for_long(streams: list[Stream]) -> None:
    agree_on_disk(streams)


def test_what_is_remembered_of_a_certificates_bearer_can_always_be_forgotten() -> None:
    """Also when more bear one than are remembered: a connection may outlast any table."""
    peers = Peers()
    kept = [peers.heads_of((str(number),)) for number in range(PEERS_MAX)]
    beyond = peers.heads_of(("one more",))
    head: Any = object()
    for heads in (*kept, beyond):
        heads.learn(b"lines", head)
    assert not beyond.known
    assert peers.heads_of(("0",)) is kept[0]
    peers.forget()
    assert not any(heads.known for heads in kept)
    del kept[:], heads
    assert peers.heads_of(("one more",)) is not beyond, "there is room again"
