"""The protocol of sources, and how their answers become readings."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import httpx

from select_service.planner.errors import SourceError
from select_service.planner.types import IDLE, Missing, Value

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from select_service.planner.types import Load, ModelKey, Reading, Window

__all__ = ["Page", "Source", "counted", "fetched", "ratio"]

PAGE_BYTES_MAX: Final = 64 << 20
"""Maximum size of an answer: half a million series. No legitimate server sends more."""


class Source(Protocol):
    """Provides measurements of the traffic."""

    async def begin(self, models: Sequence[ModelKey]) -> None:
        """Start: the first window begins here."""

    async def windows(self, models: Sequence[ModelKey], seconds: float) -> dict[ModelKey, Window]:
        """Return the measurements of the last `seconds`; unknown ones are Missing."""

    async def loads(self, models: Sequence[ModelKey]) -> dict[ModelKey, Load]:
        """Return the current load of the engines."""

    async def close(self) -> None:
        """Close the connections."""


def counted(number: float | None, why: str) -> Reading:
    """Turn a count of requests into a reading: 0 is idle, None is missing."""
    if number is None or not math.isfinite(number) or number < 0:
        return Missing(why)
    return Value(number) if number > 0 else IDLE


def ratio(total: float | None, count: float | None, why: str, scale: float = 1.0) -> Reading:
    """Turn a sum and a count into a mean: a count of 0 is idle, whatever the sum."""
    if total is None or count is None or not (math.isfinite(total) and math.isfinite(count)):
        return Missing(why)
    if count <= 0:
        return IDLE
    return Value(scale * total / count)


class Page(NamedTuple):
    """A complete answer."""

    status: int
    body: bytes


async def fetched(
    client: httpx.AsyncClient,
    url: str,
    *,
    within_s: float,
    params: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Page:
    """GET a page completely within a time limit, even from a server that trickles bytes.

    Raises:
        SourceError: there is no answer, or too long a one; its text lacks the address.
    """
    body = bytearray()
    try:
        async with (
            asyncio.timeout(within_s),
            client.stream("GET", url, params=params, headers=headers) as answer,
        ):
            async for piece in answer.aiter_bytes():
                body += piece
                if len(body) > PAGE_BYTES_MAX:
                    raise SourceError(f"an answer of more than {PAGE_BYTES_MAX} bytes")
    except TimeoutError as error:
        raise SourceError(f"no whole answer within {within_s:g} s") from error
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        raise SourceError(str(error) or type(error).__name__) from error
    return Page(answer.status_code, bytes(body))
