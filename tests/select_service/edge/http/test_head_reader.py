"""Heads: their length, and what may be before and in a request line."""

from __future__ import annotations

import asyncio
import re

import h11
import pytest

from select_service.edge.driver.driver import Driver
from select_service.edge.http.request_reader import HeadReader
from select_service.edge.server import Server
from tests.coroutines import within
from tests.select_service.edge.serving import Wire, listening

MOST = 300
HOST = b"host: s\r\n"
TAIL = HOST + b"connection: close\r\n\r\n"


def head(size: int, line: bytes = b"GET /health HTTP/1.1\r\n", more: bytes = b"") -> bytes:
    start = line + more + HOST + b"x: "
    return start + b"a" * (size - len(start) - 4) + b"\r\n\r\n"


async def statuses(wire: Wire) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", await wire.rest())]


WAYS = {
    "as bytes known before": (b"GET /health HTTP/1.1\r\n", b""),
    "of a path with an id": (b"DELETE /reservations/r-1 HTTP/1.1\r\n", b""),
    "parsed": (b"GET /health?a=b HTTP/1.1\r\n", b""),
    "as a task": (b"GET /health HTTP/1.1\r\n", b"expect: nothing\r\n"),
    "offering an upgrade": (
        b"GET /health HTTP/1.1\r\n",
        b"connection: upgrade\r\nupgrade: h2c\r\n",
    ),
    "HTTP/1.0": (b"GET /health HTTP/1.0\r\n", b"connection: close\r\n"),
    "of the console": (b"GET /console HTTP/1.1\r\n", b""),
    "not found": (b"GET /nothing HTTP/1.1\r\n", b""),
}


async def say(wire: Wire, data: bytes, pieces: int) -> None:
    step = -(-len(data) // pieces)
    for at in range(0, len(data), step):
        wire.say(data[at : at + step])
        await asyncio.sleep(0)


@pytest.mark.parametrize("pieces", [1, 2, 40])
@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("size", [MOST - 1, MOST, MOST + 1])
@within(listening, head_bytes_max=MOST)
async def test_a_head_has_a_longest_length(
    port: int, service: Driver, server: Server, *, pieces: int, after: int, size: int
) -> None:
    """However it arrives, whatever was answered before on the same connection."""
    for way, (line, more) in WAYS.items():
        wire, before = await Wire.to(port), server._counts.malformed
        for _again in range(after):  # its header lines are known then
            wire.say(head(MOST - 50))
            assert (await wire.answer())[0] == 200
        blank = b"\r\n" if pieces == 2 else b""
        await say(wire, blank + head(size, line, more), pieces)
        status = (await wire.answer())[0]
        assert (status == 431) is (size > MOST), (way, status)
        assert server._counts.malformed - before == (size > MOST), way


@pytest.mark.parametrize("size", [MOST, MOST + 1])
@within(listening, head_bytes_max=MOST)
async def test_each_head_of_a_read_is_measured_by_itself(port: int, *, size: int) -> None:
    wire = await Wire.to(port)
    wire.say(head(MOST) + head(size) + b"GET /health HTTP/1.1\r\n" + TAIL)
    assert await statuses(wire) == ([200] * 3 if size <= MOST else [200, 431])


LINES = {
    "line feed before it": b"\nGET /health HTTP/1.1\r\n",
    "carriage return before it": b"\rGET /health HTTP/1.1\r\n",
    "line feed behind an empty line": b"\r\n\nGET /health HTTP/1.1\r\n",
    "blank before it": b" GET /health HTTP/1.1\r\n",
    "two blanks behind the method": b"GET  /health HTTP/1.1\r\n",
    "two blanks behind the target": b"GET /health  HTTP/1.1\r\n",
    "blank at the end": b"GET /health HTTP/1.1 \r\n",
    "tab behind the method": b"GET\t/health HTTP/1.1\r\n",
    "tab behind the target": b"GET /health\tHTTP/1.1\r\n",
    "no version": b"GET /health\r\n",
    "no version, but a blank": b"GET /health \r\n",
    "version in small letters": b"GET /health http/1.1\r\n",
    "method in small letters": b"get /health HTTP/1.1\r\n",
    "version of two digits": b"GET /health HTTP/1.10\r\n",
    "version of one number": b"GET /health HTTP/1\r\n",
    "HTTP/0.9": b"GET /health HTTP/0.9\r\n",
    "another protocol": b"OPTIONS /health RTSP/1.0\r\n",
    "another protocol yet": b"SOURCE /health ICE/1.1\r\n",
    "two carriage returns": b"GET /health HTTP/1.1\r\r\n",
    "line feed at its end": b"GET /health HTTP/1.1\n",
    "carriage return at its end": b"GET /health HTTP/1.1\r",
    "zero byte": b"GET /hea\0lth HTTP/1.1\r\n",
    "byte beyond ASCII": b"GET /h\xc3\xa4 HTTP/1.1\r\n",
    "zero byte before it": b"\0GET /health HTTP/1.1\r\n",
    "vertical tab": b"GET\x0b/health HTTP/1.1\r\n",
}


GET: bytes = b"GET /health HTTP/1.1\r\n" + HOST
CHUNKED = b"transfer-encoding: chunked\r\n\r\n2\r\n\n\n\r\n0\r\na: b\r\n\r\n"
BEFORE = {
    "nothing": b"",
    "an empty line": b"\r\n",
    "a request": GET + b"\r\n",
    "one with chunks": GET + CHUNKED,
    "one with a body": GET + b"content-length: 5\r\n\r\n\n\nG  ",
}


@pytest.mark.parametrize("before", BEFORE.values(), ids=BEFORE.keys())
@pytest.mark.parametrize(("pieces", "pause"), [(1, False), (50, False), (1, True)])
@within(listening)
async def test_request_lines_of_two_readings_are_refused(
    port: int, service: Driver, server: Server, *, before: bytes, pieces: int, pause: bool
) -> None:
    for name, line in LINES.items():
        wire, already = await Wire.to(port), server._counts.malformed
        expected, data = [400], before + line + TAIL
        if before.strip() and pause:
            await say(wire, before, pieces)
            assert (await wire.answer())[0] == 200
            data = line + TAIL
        elif before.strip():
            expected = [200, 400]
        await say(wire, data, pieces)
        assert await statuses(wire) == expected, name
        assert server._counts.malformed == already + 1, name


SOUND = [
    b"GET /health HTTP/1.1\r\n",
    b"GET /health#top HTTP/1.1\r\n",
    b"GET http://s/health HTTP/1.1\r\n",
    b"GET /health?a=%20b&c HTTP/1.1\r\n",
    b"GET /health HTTP/1.0\r\n",
]


@pytest.mark.parametrize("blank", [0, 1, 2])
@pytest.mark.parametrize("pieces", [1, 50])
@within(listening)
async def test_empty_lines_before_a_sound_line_are_passed_over(
    port: int, *, blank: int, pieces: int
) -> None:
    for line in SOUND:
        wire = await Wire.to(port)
        await say(wire, b"\r\n" * blank + line + TAIL, pieces)
        assert await statuses(wire) == [200], line


def is_refused_by_h11(data: bytes) -> bool:
    """H11 takes line feeds alone, and refuses methods in small letters no more than others."""
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(data)
    try:
        return connection.next_event() is h11.NEED_DATA
    except h11.RemoteProtocolError:
        return True


@pytest.mark.parametrize("line", [*LINES.values(), *SOUND])
def test_what_h11_refuses_is_refused(line: bytes) -> None:
    reader = HeadReader()
    reader.read(line + TAIL, 0)
    if is_refused_by_h11(line + TAIL):
        assert reader.is_wrong
    assert reader.is_wrong is (line not in SOUND and line not in ALSO_THE_PARSERS)


ALSO_THE_PARSERS = [LINES["method in small letters"], LINES["HTTP/0.9"]]
"""Sound in form; the parser knows no such method, and `judge_framing` no such version."""
