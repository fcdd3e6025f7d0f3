"""The planner's client of selectors: reads their workers, and drains those that leave.

Catalogs are not shared, so every selector is told; one that does not know a worker is skipped. Work
in flight is shared between replicas, but with a delay: a worker is idle when all of them say so.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar
from urllib.parse import urlencode, urlsplit

import httpx
import msgspec
import orjson

from select_service.planner.errors import SelectorError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from select_service.planner.types import ModelKey, PoolKey

__all__ = ["Candidate", "Selectors", "Worker"]

TIMEOUT_S: Final = 5.0
CANDIDATES_MAX: Final = 64
"""Maximum candidates per request."""
_DRAINING: Final = "draining"
DRAINING: Final = f"{_DRAINING}: "
_JSON: Final = {"content-type": "application/json"}
_OK, _NOT_FOUND = 200, 404
_T = TypeVar("_T")


class _Record(msgspec.Struct, frozen=True):
    """A row of the catalog, with the fields needed here."""

    worker_id: int
    role: str | None = None
    endpoint: str | None = None
    not_schedulable_reasons: list[str] = []


class Worker(NamedTuple):
    """A worker, merged from the selectors that know it."""

    worker_id: int
    host: str
    """The host of its endpoint; empty: it has no readable one."""
    role: str
    drains: frozenset[str | None]
    """The reason of its drain at each selector; None: it does not drain there."""
    beside: tuple[int, ...] = ()
    """Other workers in the same pod, which go when it goes."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that is cheap to lose."""

    worker_id: int
    drains: bool = False


class _Candidates(msgspec.Struct):
    candidates: list[Candidate]


class _Status(msgspec.Struct):
    safe_to_terminate: bool = False
    waiting_for: list[str] = []


class Selectors:
    """All selectors of a fleet.

    Args:
        urls: one per selector.
        token: bearer token, if required; it must permit draining.
        client: for tests.
    """

    def __init__(
        self, urls: Sequence[str], token: str | None = None, client: httpx.AsyncClient | None = None
    ) -> None:
        self._urls = [url.rstrip("/") for url in urls]
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        self._client = client or httpx.AsyncClient(timeout=TIMEOUT_S)
        self._headers = headers

    async def workers(self, model: ModelKey, known: Collection[int] = ()) -> dict[int, Worker]:
        """Return a model's catalog by id, merged from all selectors that answer.

        Raises:
            SelectorError: none answers, or one that does not might know a worker of `known` that
                the others do not, so that worker cannot be declared gone.
        """
        pages, errors = await self._of_any(f"/workers?{_scope(model)}", list[_Record])
        found: dict[int, Worker] = {}
        for record in (one for page in pages for one in page):
            before = found.get(record.worker_id)
            drains = frozenset({_why(record)}) | (before.drains if before else frozenset())
            role = record.role or "aggregated"
            found[record.worker_id] = Worker(record.worker_id, _host(record), role, drains)
        if errors and not found.keys() >= set(known):
            raise SelectorError(errors)
        return found

    async def candidates(self, pool: PoolKey, count: int) -> list[Candidate]:
        """Return the cheapest workers to lose, draining ones first, by the selector listing most.

        Raises:
            SelectorError: none answers.
        """
        most = min(count, CANDIDATES_MAX)
        path = f"/scale_down_candidates?{_scope(pool.model)}&role={pool.role}&count={most}"
        pages, _ = await self._of_any(path, _Candidates)
        return max((page.candidates for page in pages), key=len)

    async def in_flight(self, worker_id: int) -> str:
        """Return the work in flight on a draining worker, in words; empty: none.

        Raises:
            SelectorError: a selector does not answer.
        """
        path = f"/workers/{worker_id}/drain"
        told = await asyncio.gather(*(self._ask("GET", url + path, _Status) for url in self._urls))
        busy = [", ".join(one.waiting_for) for one in told if one and not one.safe_to_terminate]
        return next((one or "work" for one in busy), "")

    async def drain(self, worker_id: int, reason: str) -> None:
        """Give a worker no more work, at every selector that knows it. Repeatable.

        Raises:
            SelectorError: one of them was not told.
        """
        body = orjson.dumps({"reason": reason})
        await self._tell("POST", worker_id, body)

    async def undrain(self, worker_id: int) -> None:
        """Let a worker be chosen again, everywhere. Repeatable.

        Raises:
            SelectorError: one of them was not told.
        """
        await self._tell("DELETE", worker_id)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _tell(self, method: str, worker_id: int, body: bytes | None = None) -> None:
        path = f"/workers/{worker_id}/drain"
        told = await asyncio.gather(
            *(self._ask(method, url + path, _Status, body) for url in self._urls),
            return_exceptions=True,
        )
        for one in told:  # all were asked, even after a failure
            if isinstance(one, BaseException):
                raise one

    async def _of_any(self, path: str, kind: type[_T]) -> tuple[list[_T], str]:
        """Return the answers received, and the errors of the others.

        Raises:
            SelectorError: there is no answer.
        """
        told = await asyncio.gather(
            *(self._ask("GET", url + path, kind) for url in self._urls), return_exceptions=True
        )
        found: list[_T] = []
        for one in told:
            if isinstance(one, BaseException):
                if not isinstance(one, SelectorError):
                    raise one
            elif one is not None:
                found.append(one)
        errors = "; ".join(str(one) for one in told if isinstance(one, BaseException))
        if found:
            return found, errors
        raise SelectorError(errors or f"no selector knows {path}")

    async def _ask(
        self, method: str, url: str, kind: type[_T], body: bytes | None = None
    ) -> _T | None:
        """Return an answer; None: the subject is unknown there.

        Raises:
            SelectorError: no readable answer came in time.
        """
        headers = self._headers if body is None else {**self._headers, **_JSON}
        try:
            async with asyncio.timeout(TIMEOUT_S):
                answer = await self._client.request(method, url, content=body, headers=headers)
        except TimeoutError as error:
            raise SelectorError(f"{url}: no whole answer within {TIMEOUT_S:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise SelectorError(f"{url}: {str(error) or type(error).__name__}") from error
        if answer.status_code == _NOT_FOUND:
            return None
        if answer.status_code != _OK:
            raise SelectorError(f"{url}: answered {answer.status_code}")
        try:
            return msgspec.json.decode(answer.content, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise SelectorError(f"{url}: {error}") from error


def _scope(model: ModelKey) -> str:
    return urlencode({"model_name": model.model_name, "tenant_id": model.tenant_id})


def _host(record: _Record) -> str:
    endpoint = record.endpoint or ""
    try:  # of `host:port`, too: only callers need to understand endpoints
        return urlsplit(endpoint if "//" in endpoint else f"//{endpoint}").hostname or ""
    except ValueError:
        return ""


def _why(record: _Record) -> str | None:
    """Return the reason of a drain, perhaps empty; None: no drain.

    A worker that only its source holds back, because it is not ready, is nobody's drain.
    """
    for one in record.not_schedulable_reasons:
        if one.startswith(DRAINING):
            return one.removeprefix(DRAINING)
    return "" if _DRAINING in record.not_schedulable_reasons else None
