"""Somebody who looks at the console: reads the event stream as the page does."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from tests.select_service.edge.serving import Wire

Event = tuple[str, dict[str, Any]]


class Watcher:
    """One stream of events, on a socket of its own."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.headers: dict[str, str] = {}

    async def next(self) -> Event:
        """The next message: its kind and its data."""
        while True:
            size = int(await self.wire.reader.readuntil(b"\r\n"), 16)
            if not size:
                raise EOFError
            text = (await self.wire.reader.readexactly(size + 2))[:-2].decode()
            lines = dict(line.split(": ", 1) for line in text.strip().split("\n"))
            if "data" in lines:
                return lines["event"], json.loads(lines["data"])

    async def until(self, name: str) -> dict[str, Any]:
        """The data of the next message that has this member."""
        while True:
            _, data = await self.next()
            if data.get(name):
                return data


@contextlib.asynccontextmanager
async def watching(port: int) -> AsyncIterator[Watcher]:
    """Open the stream; the head has been read."""
    wire = await Wire.to(port)
    wire.ask("GET", "/console/events")
    watcher = Watcher(wire)
    head = (await wire.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    assert head[0].split()[1] == "200", head
    watcher.headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    try:
        yield watcher
    finally:
        wire.close()


def ranks_of(data: dict[str, Any], fields: list[str]) -> dict[tuple[str, int], dict[str, Any]]:
    """The rows of a message by worker and rank."""
    rows = [dict(zip(fields, row, strict=True)) for row in data["ranks"]]
    return {(row["worker_id"], row["dp_rank"]): row for row in rows}
