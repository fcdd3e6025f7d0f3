"""The kernel of the fast lane finds what the door finds, for each of many connections."""

from __future__ import annotations

import asyncio
import functools
import re
from typing import Any, cast
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from uvicorn import Config
from uvicorn.server import ServerState

from select_service.edge.app import create_door, create_driver
from select_service.edge.codec.answers import Response
from select_service.edge.http import fast_lane
from select_service.edge.http.asgi import Door
from select_service.edge.http.calls import Head
from select_service.edge.http.connections import ConnectionLimits
from select_service.edge.http.outbox import ANSWERS_MAX, Outbox
from select_service.edge.http.routes import ROUTES
from select_service.edge.http.steady import KEPT
from select_service.edge.http.traffic import Traffic
from tests.effort import examples
from tests.select_service.edge.serving import SETTINGS

IDS = st.text(st.characters(max_codepoint=0x7F), max_size=12)


@pytest.mark.skipif(fast_lane.Turnstile is None, reason="the kernel is not built")
@settings(max_examples=examples(300))
@given(
    method=st.sampled_from(["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD"]),
    pattern=st.sampled_from(sorted({route.pattern for route in ROUTES})),
    name=IDS | st.sampled_from(["batch", "a.b~c:d@e-f_g", "0", "a b", "a%20b", "a/b", "\u00e9"]),
    behind=st.sampled_from([" HTTP/1.1", " HTTP/1.0", "?a=b HTTP/1.1", "", " HTTP/1.1 "]),
)
@example("DELETE", "/reservations/{reservation_id}", "batch", " HTTP/1.1")
@example("POST", "/reservations/batch", "", " HTTP/1.1")
def test_the_kernel_finds_the_calls_that_the_door_finds(
    method: str, pattern: str, name: str, behind: str
) -> None:
    line = (method + " " + re.sub(r"{\w+}", lambda _: name, pattern) + behind).encode()
    door = _door()
    asked = re.sub(rb" HTTP/1\.0$", b" HTTP/1.1", line)
    call = door.call_in_line(asked) or door.call_with_id(asked)
    found = _found_by_the_kernel(door, line)
    if call is None:
        assert found is None
    else:
        assert found == (call.route, call.params)


@functools.cache
def _door() -> Door:
    return create_door(create_driver(SETTINGS), SETTINGS)[0]


class _Lane(mock.Mock):
    """A connection to which nothing has come yet."""

    def data_received(self, data: bytes) -> None:
        self.twin(data)


def _found_by_the_kernel(door: Door, line: bytes) -> tuple[Any, tuple[str, ...]] | None:
    """Have the kernel answer a request that has nothing but its line and a plain header."""
    asked: list[tuple[Any, tuple[str, ...]]] = []
    lines = b"\r\nhost: s"

    class Counter:
        def direct(self, _: Any) -> None:
            return None

        def do(self, route: Any, request: Any) -> Response:
            assert request.query == request.body == b""
            asked.append((route, request.params))
            return Response(418, b"", ())  # the lane itself writes no such head

    lane: Any = _Lane()
    api = cast("Any", Counter())
    old = Head(api, True, False, is_last=True)
    lane.heads.known = {lines: Head(api, True, False), b" HTTP/1.0" + lines: old}
    lane._is_last = False
    lane.transport.is_closing.return_value = False
    lane.flow.write_paused = False
    assert fast_lane.Turnstile is not None
    outbox, limits = Outbox(ANSWERS_MAX), mock.Mock(header_lines_max=9)
    turnstile = fast_lane.Turnstile(door, mock.Mock(), outbox, limits, KEPT)
    turnstile.passage(lane).data_received(line + lines + b"\r\n\r\n")
    assert lane.write_answer.called is bool(asked)
    assert lane._is_last is (bool(asked) and line.endswith(b"1.0"))
    assert lane.twin.called is not bool(asked)
    return asked[0] if asked else None


def test_connections_of_one_server_share_what_is_alike_and_nothing_else() -> None:
    traffic = Traffic()
    limits = ConnectionLimits(1.0, 1.0, 9, 65536, 128, 9, 9, 1 << 20, 0)
    made = fast_lane.fast_lane(_door(), limits, traffic.connections)
    config = Config(_door(), ws="none", lifespan="off", log_config=None)
    state, other = ServerState(), ServerState()

    async def use() -> None:
        first: Any = made(config, state, {})
        second: Any = made(config, state, {})
        elsewhere: Any = made(config, other, {})
        assert first.connections is second.connections is state.connections
        assert elsewhere.connections is elsewhere.server_state.connections is other.connections
        for one in (first, second, elsewhere):
            transport = mock.Mock()
            transport.get_extra_info = {"peername": ("10.0.0.1", 7), "sockname": "/s"}.get
            one.connection_made(transport)
            assert (one.client, one.server, one.scheme) == (("10.0.0.1", 7), ("/s", None), "http")
        assert first.parser is not second.parser
        assert first.pipeline is not second.pipeline
        assert first.flow is not second.flow
        first.headers = [(b"a", b"b")]
        assert second.headers is None
        assert state.connections == {first, second}
        assert traffic.connections.by_address == {"10.0.0.1": 3}
        for one in (first, second, elsewhere):
            one.connection_lost(None)
        assert not state.connections
        assert not traffic.connections.by_address

    asyncio.run(use())
