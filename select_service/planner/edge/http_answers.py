"""Whole answers of other servers: in time, and no longer than an answer may be.

Sources read metrics with it, connectors and leases the APIs of Kubernetes and Ray.
"""

from __future__ import annotations

import asyncio
from base64 import b64encode
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import unquote, urlsplit, urlunsplit

import httpx

from indexer.redaction import redact
from select_service.token_file import TokenUnreadable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from select_service.planner.errors import PlannerError

OK: Final = 200
PAGE_BYTES_MAX: Final = 64 << 20
"""Maximum size of an answer: half a million series. No legitimate server sends more."""


class Page(NamedTuple):
    """A complete answer."""

    status: int
    body: bytes
    headers: Mapping[str, str]


async def whole_answer(
    client: httpx.AsyncClient,
    method: str,
    url: str,
    *,
    within_s: float,
    failure: type[PlannerError],
    params: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | Callable[[], Mapping[str, str]] | None = None,
    content: bytes | None = None,
    extensions: dict[str, object] | None = None,
) -> Page:
    """Send a request and read its answer within a time limit, even if the server trickles bytes.

    Args:
        client: sends it.
        method: of the request.
        url: of the request.
        within_s: seconds until the last byte.
        failure: the class of the error; its text lacks the address.
        params: query parameters.
        headers: of the request; what returns them is called for each, as files of credentials
            change.
        content: body of the request.
        extensions: of httpx.

    Raises:
        failure: there is no answer, or too long a one.
    """
    body = bytearray()
    try:
        shown = headers() if callable(headers) else headers
        async with (
            asyncio.timeout(within_s),
            client.stream(
                method, url, params=params, headers=shown, content=content, extensions=extensions
            ) as answer,
        ):
            async for piece in answer.aiter_bytes():
                body += piece
                if len(body) > PAGE_BYTES_MAX:
                    raise failure(f"an answer of more than {PAGE_BYTES_MAX} bytes")
    except TimeoutError as error:
        raise failure(f"no whole answer within {within_s:g} s") from error
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        raise failure(redact(str(error)) or type(error).__name__) from error
    except TokenUnreadable as error:
        raise failure(str(error)) from error
    return Page(answer.status_code, bytes(body), answer.headers)


def without_user(url: str) -> tuple[str, dict[str, str]]:
    """Split NAME:PASSWORD@ off an address; return the rest, and the header that shows them."""
    parts = urlsplit(url)
    user, has_user, host = parts.netloc.rpartition("@")
    if not has_user:
        return url, {}
    shown = b64encode(unquote(user).encode()).decode()
    return urlunsplit(parts._replace(netloc=host)), {"authorization": f"Basic {shown}"}
