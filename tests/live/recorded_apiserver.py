"""What a real kube-apiserver answered to us, step by step: recorded, or played again.

A scenario is a coroutine that gets a `World`. It does something to the cluster (`step`) and asserts
what our code makes of it. Recording, a proxy stands between our code and the server; played again,
the recorded bytes come in the same chunks once the scenario has reached their step.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl, urlsplit

import msgspec
from typing_extensions import override

from tests.live.apiserver import NAMESPACE, Admin
from tests.live.ports import HOST
from tests.live.tcp_server import tcp_server

GOLDEN = Path(__file__).parents[1] / "golden" / "kubernetes-apiserver"
TIMEOUT = "timeoutSeconds"
"""Of a watch: a number of ours that an answer does not depend on."""

Action = Callable[[Admin], object]


class Chunk(NamedTuple):
    """A piece of a body, and in which step it came."""

    step: int
    text: str  # latin-1


class Exchange(msgspec.Struct, omit_defaults=True):
    """One request, and all of its answer."""

    method: str
    path: str  # with its query
    step: int  # in which the answer began
    head: str = ""  # status line and headers, up to the empty line
    sent: str = ""  # the request's body
    kind: str = ""  # its content type
    chunks: list[Chunk] = []
    ends: str = ""  # "whole", "cut" or, as long as the scenario has lasted, not at all
    ended: int = 0  # the step

    @property
    def key(self) -> tuple[str, str, tuple[tuple[str, str], ...]]:
        """What a request is recognised by."""
        return _key(self.method, self.path)

    @property
    def status(self) -> int:
        return int(self.head.split()[1])

    @property
    def body(self) -> bytes:
        return "".join(chunk.text for chunk in self.chunks).encode("latin-1")


class Recording(msgspec.Struct):
    """A scenario."""

    server: str
    steps: list[str]
    exchanges: list[Exchange]


class World:
    """A cluster, live or recorded.

    Attributes:
        url: of what answers.
        credentials: folder with token and namespace, as mounted into pods.
        at: the present step.
    """

    def __init__(self, credentials: Path) -> None:
        self.credentials = credentials
        self.url = ""
        self.at = 0
        self._stepped = asyncio.Condition()
        (credentials / "namespace").write_text(NAMESPACE)
        (credentials / "token").write_text("recorded")

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[World]:
        async with tcp_server(self._serve) as port:
            self.url = f"http://{HOST}:{port}"
            yield self

    async def step(self, name: str, action: Action | None = None, *, cut: bool = False) -> None:
        """Do something to a live cluster; what comes of it belongs to this step.

        Args:
            name: of the step.
            action: what is done.
            cut: all connections break before it, and nothing is answered until it is done.
        """
        async with self._stepped:
            self.at += 1
            await self._take(name, action, cut=cut)
            self._stepped.notify_all()

    def before(self, text: str, action: Action) -> None:
        """Do something to a live cluster before the next request with a text in its path."""

    async def _take(self, name: str, action: Action | None, *, cut: bool) -> None:
        raise NotImplementedError

    async def _answer(self, one: Exchange, request: bytes, writer: asyncio.StreamWriter) -> None:
        raise NotImplementedError

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            fields = _fields(head)
            sent = await reader.readexactly(int(fields.get("content-length", 0)))
            method, path, _ = head.split("\r\n", 1)[0].split()
            one = Exchange(method, path, self.at, kind=fields.get("content-type", ""))
            one.sent = sent.decode("latin-1")
            await self._answer(one, head.encode("latin-1") + sent, writer)
            await writer.drain()


class LiveWorld(World):
    """Passes requests on to a real server, and writes everything down.

    Args:
        admin: of the cluster.
        credentials: folder for them.
        account: whose token is in there; empty: the server asks nobody for one.
    """

    def __init__(self, admin: Admin, credentials: Path, account: str) -> None:
        super().__init__(credentials)
        self._admin = admin
        version = admin.do("GET", "/version")["gitVersion"]
        self.recording = Recording(version, ["begin"], [])
        self._passes = asyncio.Event()
        self._passes.set()
        self._open: set[asyncio.StreamWriter] = set()
        self._before: tuple[str, Action] | None = None
        if account:
            (credentials / "token").write_text(admin.token(account))

    @override
    def before(self, text: str, action: Action) -> None:
        self._before = text, action

    @override
    async def _take(self, name: str, action: Action | None, *, cut: bool) -> None:
        self.recording.steps.append(name)
        if cut:
            self._passes.clear()
            for there in self._open:
                there.transport.abort()
        if action is not None:
            await asyncio.to_thread(action, self._admin)
        self._passes.set()

    @override
    async def _answer(self, one: Exchange, request: bytes, writer: asyncio.StreamWriter) -> None:
        self.recording.exchanges.append(one)
        if self._before is not None and self._before[0] in one.path:
            (_, action), self._before = self._before, None
            await asyncio.to_thread(action, self._admin)
        back, there = await self._connect()
        self._open.add(there)
        try:
            there.write(request)
            head = await back.readuntil(b"\r\n\r\n")
            one.head, one.step = head.decode("latin-1")[:-4], self.at
            writer.write(head)
            async for piece in _pieces(back, _fields(one.head)):
                if writer.is_closing():
                    return
                one.chunks.append(Chunk(self.at, piece.decode("latin-1")))
                _write_piece(writer, one, piece)
                await writer.drain()
            one.ends = "whole"
            _write_end(writer, one)
        except (asyncio.IncompleteReadError, ConnectionResetError):
            one.ends = "cut"
            writer.transport.abort()
        finally:
            one.ended = self.at
            self._open.discard(there)
            there.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        cluster = self._admin.cluster
        trust: ssl.SSLContext = cluster.authority.client()
        while True:
            await self._passes.wait()
            try:
                back, there = await asyncio.open_connection(HOST, cluster.port, ssl=trust)
            except OSError:  # it is restarted
                await asyncio.sleep(0.1)
                continue
            if self._passes.is_set():
                return back, there
            there.close()


class RecordedWorld(World):
    """Answers as was recorded.

    Args:
        recording: of the same scenario.
        credentials: folder for them.

    Attributes:
        unknown: requests that were not recorded, and got no answer.
    """

    def __init__(self, recording: Recording, credentials: Path) -> None:
        super().__init__(credentials)
        self._steps = recording.steps
        self._rest = list(recording.exchanges)
        self._refused: dict[object, Exchange] = {}
        self.unknown: list[str] = []

    @override
    async def _take(self, name: str, action: Action | None, *, cut: bool) -> None:
        assert self._steps[self.at] == name

    @override
    async def _answer(self, one: Exchange, request: bytes, writer: asyncio.StreamWriter) -> None:
        found = next((each for each in self._rest if each.key == one.key), None)
        if found is not None:
            self._rest.remove(found)
            if found.status >= 400:
                self._refused[one.key] = found
        elif one.key in self._refused:  # how often something is tried again depends on chance
            found = self._refused[one.key]
        else:
            self.unknown.append(f"{one.method} {one.path}")
            writer.transport.abort()
            return
        await self._reach(found.step)
        writer.write(f"{found.head}\r\n\r\n".encode("latin-1"))
        for chunk in found.chunks:
            await self._reach(chunk.step)
            _write_piece(writer, found, chunk.text.encode("latin-1"))
            await writer.drain()
        await self._reach(found.ended if found.ends else len(self._steps))
        if found.ends == "cut":
            writer.transport.abort()
        else:
            _write_end(writer, found)

    async def _reach(self, step: int) -> None:
        async with self._stepped:
            await self._stepped.wait_for(lambda: self.at >= step)


Scenario = Callable[[World], Awaitable[None]]


def recorded(name: str) -> Recording:
    """The recording of a scenario."""
    return msgspec.json.decode((GOLDEN / f"{name}.json").read_bytes(), type=Recording)


async def replay(name: str, scenario: Scenario, credentials: Path) -> None:
    """Play a scenario against what was recorded of it; nothing else may be asked for."""
    world = RecordedWorld(recorded(name), credentials)
    async with world.serving():
        await scenario(world)
    assert not world.unknown, world.unknown


async def _pieces(back: asyncio.StreamReader, fields: dict[str, str]) -> AsyncIterator[bytes]:
    if fields.get("transfer-encoding") != "chunked":
        if length := int(fields.get("content-length", 0)):
            yield await back.readexactly(length)
        return
    while length := int(await back.readuntil(b"\r\n"), 16):
        yield (await back.readexactly(length + 2))[:-2]
    await back.readuntil(b"\r\n")


def _write_piece(writer: asyncio.StreamWriter, one: Exchange, piece: bytes) -> None:
    is_chunked = "transfer-encoding" in _fields(one.head)
    writer.write(b"%x\r\n%s\r\n" % (len(piece), piece) if is_chunked else piece)


def _write_end(writer: asyncio.StreamWriter, one: Exchange) -> None:
    if "transfer-encoding" in _fields(one.head):
        writer.write(b"0\r\n\r\n")


def _fields(head: str) -> dict[str, str]:
    lines = (line.partition(": ") for line in head.split("\r\n")[1:] if line)
    return {name.lower(): value for name, _, value in lines}


def _key(method: str, path: str) -> tuple[str, str, tuple[tuple[str, str], ...]]:
    url = urlsplit(path)
    query = sorted(one for one in parse_qsl(url.query) if one[0] != TIMEOUT)
    return method, url.path, tuple(query)
