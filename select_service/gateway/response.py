"""What a gateway answers its client: the engine's bytes as they come, or an error in their form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from select_service.client import ClientError, NotCached, TimedOut
from select_service.errors import ServiceError
from select_service.errors.response import retry_after
from select_service.gateway.engine_exchange import EngineFailed, error_body

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from select_service.gateway.engine_exchange import EngineExchange

_UNAVAILABLE: Final = 503
_TIMED_OUT: Final = 504
_JSON: Final = "application/json"


class GatewayResponse:
    """An answer: `status` and `headers` now, the body by iterating. `aclose` it, however it ends.

    Attributes:
        status: Of HTTP.
        headers: As pairs, in lower case; without a length where the body is still to come.
    """

    def __init__(
        self,
        status: int,
        headers: list[tuple[str, str]],
        body: bytes = b"",
        exchange: EngineExchange | None = None,
    ) -> None:
        self.status = status
        self.headers = headers
        self._body = body
        self._exchange = exchange

    @property
    def reservation_id(self) -> str | None:
        """The reservation behind it; None: there is none."""
        return None if self._exchange is None else self._exchange.reservation.reservation_id

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self._exchange is None:
            yield self._body
            return
        async for piece in self._exchange.pieces():
            yield piece

    async def aclose(self) -> None:
        """Free the reservation and leave the engine, if it is still at work. Idempotent."""
        if self._exchange is not None:
            await self._exchange.aclose()


def json_response(
    status: int, body: object, headers: Mapping[str, str] | None = None
) -> GatewayResponse:
    """Return an answer with a JSON body."""
    content = msgspec.json.encode(body)
    all_headers = {"content-type": _JSON, "content-length": str(len(content)), **(headers or {})}
    return GatewayResponse(status, list(all_headers.items()), content)


def refusal(error: ServiceError | ClientError | EngineFailed) -> GatewayResponse:
    """Return the answer for a request that got no worker, or whose workers failed."""
    headers: dict[str, str] = {}
    param = None
    if isinstance(error, ServiceError):
        status, code, param = error.status, error.code, error.field
        again = retry_after(error)
        if again is not None:
            headers["retry-after"] = str(again)
    elif isinstance(error, EngineFailed):
        status, code = error.status, error.code
    elif isinstance(error, NotCached):
        status, code = _UNAVAILABLE, "cache_threshold"
    else:
        status = _TIMED_OUT if isinstance(error, TimedOut) else _UNAVAILABLE
        code = "selector_timeout" if isinstance(error, TimedOut) else "selector_unreachable"
        headers["retry-after"] = "1"
    return json_response(status, error_body(status, str(error), str(code), param), headers)
