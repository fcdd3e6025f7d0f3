"""A proxy for HTTP/1.1 that loses replies and holds others back, request by request.

It understands just enough to know where a request and its answer end. Runs on a thread of its own.
"""

from __future__ import annotations

import asyncio
import random
import threading
from dataclasses import dataclass
from typing import Self

from tests.live.ports import HOST
from tests.live.tcp_server import tcp_server
from tests.wait import PATIENCE_S

SIZE = 1 << 16


@dataclass
class FlakyProxy:
    """Between a client and a port. The shares are of requests."""

    upstream: int
    drop: float = 0.0  # carried out, and the connection is closed without a reply
    swallow: float = 0.0  # carried out, and nothing comes
    delay: float = 0.0  # the reply is late
    delay_s: float = 0.05
    late: float = 0.0  # the client is sent away, and the request carried out later
    seed: int = 0
    port: int = 0
    seen: int = 0
    lost: int = 0
    held: int = 0  # requests to be carried out later
    _loop: asyncio.AbstractEventLoop | None = None

    def __enter__(self) -> Self:
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)))
        self._thread.start()
        assert ready.wait(PATIENCE_S)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _serve(self, ready: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._random = random.Random(self.seed)
        async with tcp_server(self._relay) as self.port:
            ready.set()
            await self._stop.wait()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(HOST, self.upstream)
        try:
            while True:
                request = await _message(reader)
                self.seen += 1
                dice = self._random.random()
                fates = (self.drop, self.swallow, self.delay, self.late)
                names = ("drop", "swallow", "delay", "late")
                fate = ""
                for name, share in zip(names, fates, strict=True):
                    if dice < share:
                        fate = name
                        break
                    dice -= share
                if fate == "late":
                    writer.close()
                    self.held += 1
                    await asyncio.sleep(self.delay_s)
                up_writer.write(request)
                reply = await _message(up_reader)
                self.held -= fate == "late"
                self.lost += fate in {"drop", "swallow", "late"}
                if fate in {"drop", "late"}:
                    return
                if fate == "swallow":
                    await reader.read(1)  # until the client gives up
                    return
                if fate == "delay":
                    await asyncio.sleep(self.delay_s)
                writer.write(reply)
        finally:
            up_writer.close()


async def _message(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return head + await reader.readexactly(int(line.split(b":")[1]))
        assert not line.startswith(b"transfer-encoding"), "no route of these tests streams"
    return head
