"""A relay that sees what an eavesdropper on the wire would."""

from __future__ import annotations

import asyncio
import contextlib

from tests.live.ports import HOST
from tests.live.tcp_server import tcp_server


class Relay:
    """A TCP relay that writes down every byte in both directions."""

    def __init__(self, endpoint: str) -> None:
        self._port = int(endpoint.rpartition(":")[2])
        self.seen = bytearray()
        self._serving = contextlib.AsyncExitStack()

    async def start(self) -> str:
        return f"tcp://{HOST}:{await self._serving.enter_async_context(tcp_server(self._serve))}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(HOST, self._port)
        try:
            await asyncio.gather(self._pass(reader, back), self._pass(there, writer))
        finally:
            back.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            self.seen += data
            writer.write(data)
        writer.close()

    async def stop(self) -> None:
        await self._serving.aclose()
