"""Whatever a client calls things: no header, log line, series or event of the console is broken."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple, Self
from urllib.parse import quote

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from select_service.edge import logs
from select_service.edge.http.routes import ROUTES
from select_service.edge.routing import Route
from tests.effort import share_of
from tests.fuzz.bodies import PATHS, members_of, templates
from tests.live.ports import free_port
from tests.select_service.edge.serving import Wire, add_worker, listening
from tests.wait import PATIENCE_S

EVIL: Final = [
    *("\r\nset-cookie: a=b\r\n\r\n", "\n2026-11-22T00:00:00Z [error] forged", 'a"} 1\nforged 1\n'),
    *("\x00", "\x1b[31m", "\x7f", "\x85", "\u2028", "\u202e", "\ufeff", "\\", "\\n", '"', "%0a"),
    *("\r", "\t", "\x0b\x0c", "data: x\n\n", "<script>", "\U000e0001", "a" * 300 + "\n"),
]
evil = st.sampled_from(EVIL) | st.text('\r\n\x00\x1b\x85\u2028\u202e"\\ aé', max_size=12)
# what the parser lets through in a header line
lines = st.binary(max_size=12).map(lambda text: bytes(b for b in text if b >= 32 and b != 127))
HEADERS: Final = (b"x-request-id", b"traceparent", b"accept", b"user-agent", b"content-type")


class Call(NamedTuple):
    """One request."""

    method: str
    path: str
    body: Any
    headers: tuple[tuple[bytes, bytes], ...] = ()


def _renamed(value: Any, draw: st.DrawFn) -> Any:
    """A template, some of whose texts are others."""
    if isinstance(value, str):
        return draw(evil) if draw(st.integers(0, 2)) == 0 else value
    if isinstance(value, dict):
        return {name: _renamed(one, draw) for name, one in value.items()}
    if isinstance(value, list):
        return [_renamed(one, draw) for one in value]
    return value


@st.composite
def calls(draw: st.DrawFn) -> Call:
    route: Route[Any] = draw(st.sampled_from(ROUTES))
    params = {
        name: draw(evil) or "x" if draw(st.booleans()) else value for name, value in PATHS.items()
    }
    path = route.pattern.format(**{name: quote(one, safe="") for name, one in params.items()})
    for name in route.query:
        if draw(st.booleans()):
            path += ("&" if "?" in path else "?") + f"{name}={quote(draw(evil), safe='')}"
    body = None
    if route.takes is not None:
        body = _renamed(draw(st.sampled_from(templates(route))), draw)
        for name in draw(st.lists(st.sampled_from(members_of(route)), max_size=2)):
            body |= {name: draw(st.sampled_from([draw(evil), [draw(evil)], {draw(evil): "x"}]))}
        if draw(st.integers(0, 2)) == 0:
            body |= {draw(evil): 1}
    chosen = draw(st.lists(st.tuples(st.sampled_from(HEADERS), lines), max_size=2))
    return Call(route.method, path, body, tuple(chosen))


class Stage:
    """A server whose log is read, on a port."""

    def __init__(self, **chosen: Any) -> None:
        self._chosen = chosen
        self._runner = asyncio.Runner()
        self._stack = contextlib.AsyncExitStack()
        self._wire: Wire | None = None
        self.text, self.json = io.StringIO(), io.StringIO()
        self.records = 0

    def __enter__(self) -> Self:
        root = logging.getLogger()
        self._before = root.level, root.handlers[:]  # others must not log for us from then on
        logs.configure("text", "debug", access_log=True, stream=self.text)
        logging.getLogger("asyncio").setLevel(logging.WARNING)
        other = logging.StreamHandler(self.json)
        other.setFormatter(logs.JsonLines())
        other.addFilter(self._count)
        logging.getLogger().addHandler(other)
        self._runner.run(self._open())
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._close())
        self._runner.close()
        level, handlers = self._before
        logs.configure("text", logging.getLevelName(level).lower(), access_log=True)
        logging.getLogger().handlers[:] = handlers

    def _count(self, record: logging.LogRecord) -> bool:
        self.records += 1
        return True

    async def _open(self) -> None:
        self._port, self.service, _ = await self._stack.enter_async_context(
            listening(**self._chosen)
        )
        add_worker(self.service)

    async def _close(self) -> None:
        await Wire.close_all()
        await self._stack.aclose()

    def play(self, call: Call) -> tuple[int, bytes]:
        return self._runner.run(asyncio.wait_for(self._play(call), PATIENCE_S))

    async def _play(self, call: Call) -> tuple[int, bytes]:
        content = b"" if call.body is None else json.dumps(call.body).encode()
        headers = dict(call.headers)
        if call.body is not None:
            headers.setdefault(b"content-type", b"application/json")
        head = [f"{call.method} {call.path} HTTP/1.1".encode(), b"host: s", b"connection: close"]
        head += [b"%b: %b" % header for header in headers.items()]
        wire = await Wire.to(self._port)
        wire.say(b"\r\n".join([*head, b"content-length: %d" % len(content), b"", content]))
        answer = await wire.rest()
        said, _, body = answer.partition(b"\r\n\r\n")
        status, *lines = said.split(b"\r\n")
        assert all(re.fullmatch(rb"[a-z-]+: [ -~]*", line) for line in lines), lines
        assert b"set-cookie" not in [line.partition(b":")[0] for line in lines]
        found = re.fullmatch(rb"HTTP/1\.1 (\d{3}) [A-Za-z -]*", status)
        assert found is not None, answer
        assert int(found[1]) != 500
        wire.close()
        return int(found[1]), body

    def judge(self) -> None:
        """Look at all that was said meanwhile."""
        for stream in (self.text, self.json):
            *whole, rest = stream.getvalue().split("\n")
            assert rest == ""
            assert len(whole) == self.records
            assert all(line.isprintable() for line in whole), [
                line for line in whole if not line.isprintable()
            ]
            stream.seek(0)
            stream.truncate()
        self.records = 0
        status, text = self.play(Call("GET", "/metrics", None))
        assert status == 200
        assert text.decode().replace("\n", "").isprintable()
        for family in text_string_to_metric_families(text.decode()):
            for sample in family.samples:
                assert all(value.isprintable() for value in sample.labels.values()), sample
        self.service.core.check()


@pytest.fixture(autouse=True)
def _untouched_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    access = logging.getLogger("select_service.access")
    disabled = access.disabled
    yield
    root.handlers[:], root.level = handlers, level
    access.disabled = disabled


def _raise(message: str) -> None:
    raise ValueError(message)


@pytest.mark.parametrize("message", EVIL)
def test_nor_what_an_exception_says(message: str) -> None:
    """A traceback takes lines of its own: none of them may look like a record, or move a cursor."""
    text, packed = io.StringIO(), io.StringIO()
    for form, stream in (("text", text), ("json", packed)):
        logs.configure(form, "info", access_log=True, stream=stream)  # type: ignore[arg-type]
        try:
            _raise(message)
        except ValueError:
            logging.getLogger("a").exception("failed", extra={"said": [message, {message: 1}]})
    first, *lines = text.getvalue().rstrip("\n").split("\n")
    assert first.isprintable()
    assert all(line.isprintable() and line.startswith("    ") for line in lines)
    (line,) = packed.getvalue().rstrip("\n").split("\n")
    assert line.isprintable()
    assert "Traceback" in json.loads(line)["exception"]


def run(examples: int) -> None:
    with Stage(replica_sync_port=free_port()) as stage:

        @settings(max_examples=examples, deadline=None)
        @given(st.lists(calls(), min_size=1, max_size=8))
        @example([Call("POST", "/select", {"token_ids": [1], one: 1}) for one in EVIL])
        @example([Call("DELETE", f"/leases/{quote(one, safe='')}", None) for one in EVIL])
        @example([Call("DELETE", f"/reservations/{quote(one, safe='')}", None) for one in EVIL])
        def behaves(made: list[Call]) -> None:
            for call in made:
                stage.play(call)
            stage.judge()

        behaves()


def test_nothing_a_client_calls_things_breaks_what_we_say() -> None:
    run(25)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_nothing_a_client_calls_things_breaks_what_we_say_for_long() -> None:
    run(share_of(3_000))
