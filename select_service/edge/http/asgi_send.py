"""Sends answers through ASGI: whole ones, and streams that end with their client or the process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from select_service.edge.codec.encoder import JSON_WRITER
from select_service.edge.codec.responses import Feed
from select_service.edge.http.asgi_receive import ClientGoneError, until_gone
from select_service.edge.stream_limit import StreamCut
from select_service.errors import HttpVersionTooOld

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.types import Receive, Scope, Send

    from select_service.edge.codec.responses import Response
    from select_service.edge.http.traffic import Traffic

_log = logging.getLogger("select_service.http")


class Sending:
    """Sends the answers of one application."""

    def __init__(self, traffic: Traffic, leaving: asyncio.Event) -> None:
        """Set up.

        Args:
            traffic: counts failed streams.
            leaving: set when the process is about to end, which cuts streams.
        """
        self._traffic, self._leaving = traffic, leaving

    async def respond(self, response: Response, scope: Scope, receive: Receive, send: Send) -> None:
        """Send an answer.

        Raises:
            ClientGoneError: not all of it could be written, or not all of a stream's head or end.
        """
        is_head = scope["method"] == "HEAD"
        if response.stream is not None and not is_head:
            await self._stream(response, scope, receive, send)
            return
        headers = [*response.headers]
        if response.stream is None:
            headers.append((b"content-length", b"%d" % len(response.body)))
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        body = b"" if is_head else response.body
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _stream(self, response: Response, scope: Scope, receive: Receive, send: Send) -> None:
        """Send a stream piece by piece; for HTTP/1.0 the connection's end marks its end."""
        assert response.stream is not None
        if scope.get("http_version") == "1.0" and isinstance(response, Feed):
            why = HttpVersionTooOld("this needs HTTP/1.1: it has no end")
            await self.respond(JSON_WRITER.refusal(why), scope, receive, send)
            return
        headers = [*response.headers]
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        async with asyncio.TaskGroup() as group:
            gone = group.create_task(until_gone(receive))
            complete = await self._pass_on(response.stream, gone, send)
            gone.cancel()
        if isinstance(response.stream, AsyncGenerator):
            await response.stream.aclose()  # releases its place at once
        if complete:  # otherwise the missing last piece tells the client that it is incomplete
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pass_on(
        self, stream: AsyncIterator[bytes], gone: asyncio.Task[None], send: Send
    ) -> bool:
        try:
            async for piece in stream:
                if self._leaving.is_set() or gone.done():
                    return False
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except (StreamCut, ClientGoneError):
            return False
        except Exception:  # noqa: BLE001 - logged and counted; the client sees a cut stream
            self._traffic.crashes += 1
            _log.exception("stream failed")
            return False
        return True
