"""The SDK without sockets: a function, or an httpx transport, answers every request it sends."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Final

import httpcore
import httpx

from select_service.client import AsyncClient
from select_service.client.core.exchange import ExchangeOutcome, Send
from select_service.client.transport import SelectorEndpoints, failed

_RETRY_AFTER: Final = "retry-after"


class _Pool:
    """In the place of a client's pool of connections to one selector."""

    def __init__(self, endpoints: SelectorEndpoints, transport: httpx.AsyncBaseTransport) -> None:
        self._endpoints = endpoints
        self._transport = transport

    async def ask(self, send: Send, *, is_errand: bool) -> ExchangeOutcome:
        made = self._endpoints.request(send)
        url = httpx.URL(bytes(made.url).decode())
        request = httpx.Request(send.method, url, headers=made.headers, content=send.body)
        try:
            async with asyncio.timeout(min(send.timeout_s, send.whole_s)):
                response = await self._transport.handle_async_request(request)
                body = await response.aread()
        except TimeoutError:
            return failed(httpcore.ReadTimeout("silent"), monotonic())
        except httpx.ConnectError as error:
            return failed(httpcore.ConnectError(str(error)), monotonic())
        except httpx.TransportError as error:
            return failed(httpcore.NetworkError(str(error)), monotonic())
        delay = response.headers.get(_RETRY_AFTER, "")
        wait_s = float(delay) if delay.isdigit() else None
        kind = response.headers.get("content-type", "")
        return ExchangeOutcome(monotonic(), response.status_code, body, kind, wait_s)

    async def aclose(self) -> None:
        """Has nothing to close."""


def answered_by(client: AsyncClient, transport: httpx.AsyncBaseTransport) -> AsyncClient:
    """Have a client of one selector ask a transport instead of the network."""
    client._pools = [_Pool(client._endpoints, transport)]  # type: ignore[list-item]
    return client
