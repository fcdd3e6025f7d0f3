"""One request at the worker that is reserved for it, from its first byte to its end.

What comes is passed on as it comes; the service hears of the first bytes, of output as it fills
blocks, of what the engine had cached, and of the end, whoever causes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Self

import httpx
import msgspec

from select_service.gateway.failures import EngineFailed, error_body
from select_service.gateway.usage_reader import UsageReader

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from select_service.client import Reservation
    from select_service.gateway.gateway_traffic import GatewayTraffic
    from select_service.gateway.options import GatewayOptions
    from select_service.types.reservations import Outcome

_REFUSED: Final = 400
_BROKE: Final = 500
_HOP_BY_HOP: Final = frozenset(
    (
        "connection",
        "content-length",
        "keep-alive",
        "proxy-authenticate",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)


class EngineExchange:
    """An answer that has begun. Iterate `pieces` once; `aclose` it, however it ends."""

    def __init__(
        self,
        reservation: Reservation,
        response: httpx.Response,
        reader: UsageReader,
        traffic: GatewayTraffic,
        *,
        has_tokens: bool,
    ) -> None:
        self.reservation = reservation
        self.response = response
        self._chunks = response.aiter_raw()
        self._first: bytes | None = None
        self._reader = reader
        self._traffic = traffic
        self._has_tokens = has_tokens  # else nothing was predicted that could be compared
        self._told = 0  # output tokens
        self._is_over = False

    @classmethod
    async def begun(
        cls,
        http: httpx.AsyncClient,
        request: httpx.Request,
        reservation: Reservation,
        traffic: GatewayTraffic,
        options: GatewayOptions,
        *,
        drops_usage: bool,
        has_tokens: bool,
    ) -> Self:
        """Send a request and wait for the first bytes of its answer.

        Raises:
            EngineFailed: there is none; the reservation is still to be freed.
        """
        try:
            response = await http.send(request, stream=True)
        except httpx.HTTPError as error:
            raise _failed(request, error) from error
        kind = response.headers.get("content-type", "")
        reader = UsageReader(
            is_stream=kind.startswith("text/event-stream"),
            drops_usage=drops_usage,
            bytes_max=options.answer_bytes_max,
        )
        made = cls(reservation, response, reader, traffic, has_tokens=has_tokens)
        try:
            made._first = await anext(made._chunks, None)
        except httpx.HTTPError as error:
            await response.aclose()
            raise _failed(request, error) from error
        except BaseException:
            await response.aclose()
            raise
        return made

    @property
    def status(self) -> int:
        """What the engine answers."""
        return self.response.status_code

    def headers(self) -> list[tuple[str, str]]:
        """Return the engine's headers, as far as they concern the client."""
        named = self.response.headers.multi_items()
        return [one for one in named if one[0].lower() not in _HOP_BY_HOP]

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body; the reservation ends with it."""
        reader, piece = self._reader, self._first
        try:
            while piece is not None:
                passed = reader.feed(piece)
                self._report()
                if passed:
                    yield passed
                piece = await anext(self._chunks, None)
            rest = reader.finish()
            self._report()
            if rest:
                yield rest
            has_failed = reader.has_failed if self.status < _REFUSED else self.status >= _BROKE
            await self._end("failed" if has_failed else "completed")
        except httpx.HTTPError as error:
            self._traffic.broken += 1
            await self._end("failed")
            failure = _failed(self.response.request, error)
            if not self.response.headers.get("content-type", "").startswith("text/event-stream"):
                raise failure from error  # the client sees a connection that breaks
            told = msgspec.json.encode(error_body(failure.status, str(failure), failure.code))
            yield b"data: " + told + b"\n\n"
        finally:
            await self.aclose()

    async def abandon(self) -> None:
        """End it unread, as failed: another worker takes the request."""
        await self._end("failed")

    async def aclose(self) -> None:
        """Free the reservation and leave the engine, which stops its work for us. Idempotent."""
        if not self._is_over:
            self._traffic.left += 1
            await self._end("cancelled")

    def _report(self) -> None:
        reader = self._reader
        if self.status >= _REFUSED:
            return
        if not self._told and reader.output_tokens:
            self.reservation.prefill_complete()
        if reader.output_tokens > self._told:
            self.reservation.output_tokens(reader.output_tokens - self._told)
            self._told = reader.output_tokens

    async def _end(self, outcome: Outcome) -> None:
        if self._is_over:
            return
        self._is_over = True
        cached = self._reader.cached_tokens
        if cached is not None and self._has_tokens and outcome == "completed":
            self.reservation.prefill_complete(cached_tokens=cached)
        self.reservation.free(outcome)
        await self.response.aclose()


def _failed(request: httpx.Request, error: httpx.HTTPError) -> EngineFailed:
    why = str(error) or type(error).__name__
    where = f"{request.url.scheme}://{request.url.netloc.decode()}"
    if isinstance(error, httpx.ReadTimeout):  # it may still be at work: two would be at one request
        text = f"{where} is silent: {why}"
        return EngineFailed(text, status=504, code="engine_timeout", may_retry=False)
    return EngineFailed(f"{where} failed: {why}")
