"""Reads the workers of all selectors with the SDK, and drains those that leave.

Catalogs are not shared, so every selector is called; one that does not know a worker is skipped.
Work in flight is shared between replicas, but with a delay: a worker is idle when all of them say
so.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar
from urllib.parse import urlencode, urlsplit

import msgspec
from typing_extensions import override

from select_service.client import AsyncClient, ClientError, Options, ServiceError, TimedOut
from select_service.planner.edge.selector_addresses import SelectorAddress, is_waited_for
from select_service.planner.errors import SelectorError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence

    from select_service.planner.edge.selector_addresses import SelectorAddresses
    from select_service.planner.types import ModelKey, PoolKey

TIMEOUT_S: Final = 5.0
CANDIDATES_MAX: Final = 64
"""Maximum candidates per request."""
_DRAINING: Final = "draining"
DRAINING: Final = f"{_DRAINING}: "
_NOT_FOUND: Final = 404
_T = TypeVar("_T")

_ONCE: Final = Options.single_attempt(TIMEOUT_S)  # the loop looks again anyway


class _Record(msgspec.Struct, frozen=True):
    """A row of the catalog, with the fields needed here."""

    worker_id: int
    role: str | None = None
    endpoint: str | None = None
    not_schedulable_reasons: list[str] = []


class MergedWorker(NamedTuple):
    """A worker, merged from the selectors that know it."""

    worker_id: int
    host: str
    """The host of its endpoint; empty: it has no readable one."""
    role: str
    drains: frozenset[str | None]
    """The reason of its drain at each selector; None: it does not drain there."""
    beside: tuple[int, ...] = ()
    """Other workers in the same pod, which go when it goes."""


class _Candidate(msgspec.Struct):
    worker_id: int


class _Candidates(msgspec.Struct):
    candidates: list[_Candidate]


class SelectorFleet:
    """All selectors of a fleet.

    Args:
        urls: one per selector.
        token: returns the bearer token, if one is required; it must permit draining.
        addresses: follows the names in the URLs; None: each URL is one selector.
        clock: monotonic seconds.

    One of several addresses of a name that has been silent for `SILENT_S` is not waited for, as
    long as another answers: it gets no traffic, and is sent everything once it answers again.

    Raises:
        SelectorError: an address is invalid.
    """

    def __init__(
        self,
        urls: Sequence[str],
        token: Callable[[], str] | None = None,
        addresses: SelectorAddresses | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._token = token
        self._clock = clock
        self._of_several: frozenset[str] = frozenset()  # URLs of names with several addresses
        self._answered_at: dict[str, float] = {}  # by URL; at first, when it was found
        self._addresses = addresses
        self._clients: dict[str, AsyncClient] = {}  # by URL
        self._left: list[AsyncClient] = []  # of those that were lost at the last look-up
        if addresses is None:
            self._clients = {url: self._client(SelectorAddress(url, url)) for url in urls}

    def _client(self, address: SelectorAddress) -> AsyncClient:
        trust: _NamedTrust | None = None
        if address.name and address.url.startswith("https:"):
            trust = _NamedTrust(ssl.PROTOCOL_TLS_CLIENT)
            trust.minimum_version = ssl.TLSVersion.TLSv1_2
            trust.load_default_certs()
            trust.name = address.name
        try:
            return AsyncClient(address.url, token=self._token, ca=trust, options=_ONCE)
        except ValueError as error:
            raise SelectorError(str(error)) from error

    async def _follow(self) -> None:
        """Keep a client for each address that the names lead to now.

        Raises:
            SelectorError: a name leads to none.
        """
        if self._addresses is None:
            return
        found = await self._addresses.look()
        if not found:
            raise SelectorError("; ".join(self._addresses.problems.values()) or "no selector")
        self._of_several = frozenset(one.url for one in found if one.is_one_of_several)
        known = self._clients
        if known.keys() == {one.url for one in found}:
            return
        self._clients = {one.url: known.get(one.url) or self._client(one) for one in found}
        self._answered_at = {
            url: at for url, at in self._answered_at.items() if url in self._clients
        }
        left, self._left = (
            self._left,
            [one for url, one in known.items() if url not in self._clients],
        )
        for client in left:  # not those that may be in use right now
            await client.aclose()

    async def workers(
        self, model: ModelKey, known: Collection[int] = ()
    ) -> dict[int, MergedWorker]:
        """Return a model's catalog by id, merged from all selectors that answer.

        Raises:
            SelectorError: none answers, or one that does not might know a worker of `known` that
                the others do not, so that worker cannot be declared gone.
        """
        pages, errors = await self._of_any(f"/workers?{_scope(model)}", list[_Record])
        found: dict[int, MergedWorker] = {}
        for record in (one for page in pages for one in page):
            before = found.get(record.worker_id)
            drains = frozenset({_why(record)}) | (before.drains if before else frozenset())
            role = record.role or "aggregated"
            found[record.worker_id] = MergedWorker(record.worker_id, _host(record), role, drains)
        if errors and not found.keys() >= set(known):
            raise SelectorError(errors)
        return found

    async def candidates(self, pool: PoolKey, count: int) -> list[int]:
        """Return the cheapest workers to lose, draining ones first, by the selector listing most.

        Raises:
            SelectorError: none answers.
        """
        most = min(count, CANDIDATES_MAX)
        path = f"/scale_down_candidates?{_scope(pool.model)}&role={pool.role}&count={most}"
        pages, _ = await self._of_any(path, _Candidates)
        longest = max((page.candidates for page in pages), key=len)
        return [one.worker_id for one in longest]

    async def in_flight(self, worker_id: int) -> str:
        """Return the work in flight on a draining worker, as text; empty: none.

        Raises:
            SelectorError: a selector does not answer.
        """
        await self._follow()
        statuses, errors = await self._ask(lambda client: client.drain_status(worker_id))
        if errors:
            raise errors[0]
        busy = [", ".join(one.waiting_for) for one in statuses if one and not one.safe_to_terminate]
        return next((one or "work" for one in busy), "")

    async def drain(self, worker_id: int, reason: str) -> None:
        """Give a worker no more work, at every selector that knows it. Repeatable.

        Raises:
            SelectorError: one of them was not reached.
        """
        await self._send(lambda client: client.drain_worker(worker_id, reason))

    async def undrain(self, worker_id: int) -> None:
        """Let a worker be chosen again, everywhere. Repeatable.

        Raises:
            SelectorError: one of them was not reached.
        """
        await self._send(lambda client: client.undrain_worker(worker_id))

    async def close(self) -> None:
        """Close the connections."""
        for client in (*self._clients.values(), *self._left):
            await client.aclose()

    async def _send(self, call: Callable[[AsyncClient], Awaitable[object]]) -> None:
        await self._follow()
        _, errors = await self._ask(call)
        if errors:  # all were asked, even after a failure
            raise errors[0]

    async def _of_any(self, path: str, kind: type[_T]) -> tuple[list[_T], str]:
        """Return the answers received, and the errors of the others that are waited for.

        Raises:
            SelectorError: there is no answer.
        """
        await self._follow()
        answers, failed = await self._ask(lambda client: client.call("GET", path, kind=kind))
        found = [one for one in answers if one is not None]
        errors = "; ".join(map(str, failed))
        if found:
            return found, errors
        raise SelectorError(errors or f"no selector knows {path}")

    async def _ask(
        self, call: Callable[[AsyncClient], Awaitable[_T]]
    ) -> tuple[list[_T | None], list[SelectorError]]:
        """Call every selector; return the answers, and why those that are waited for gave none.

        Of an unknown subject the answer is None. If no selector answers, all are waited for.
        """
        asked = dict(self._clients)
        results = await asyncio.gather(
            *(_answer(client, call) for client in asked.values()), return_exceptions=True
        )
        now = self._clock()
        answers: list[_T | None] = []
        failed: dict[str, SelectorError] = {}
        for url, one in zip(asked, results, strict=True):
            if isinstance(one, SelectorError):
                failed[url] = one
                self._answered_at.setdefault(url, now)
            elif isinstance(one, BaseException):
                raise one
            else:
                answers.append(one)
                self._answered_at[url] = now
        waited_for = [
            error
            for url, error in failed.items()
            if is_waited_for(self._answered_at[url], now, is_one_of_several=url in self._of_several)
        ]
        return answers, waited_for if answers else list(failed.values())


class _NamedTrust(ssl.SSLContext):
    """The usual trust in a server with a certificate of one name, whatever address is asked."""

    name: str

    @override
    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        return super().wrap_bio(*arguments, **{**options, "server_hostname": self.name})


async def _answer(client: AsyncClient, call: Callable[[AsyncClient], Awaitable[_T]]) -> _T | None:
    """Return an answer; None: the subject is unknown there.

    Raises:
        SelectorError: no readable answer came in time.
    """
    try:
        return await call(client)
    except ServiceError as error:
        if error.status == _NOT_FOUND:
            return None
        raise SelectorError(f"{client.selector}: answered {error.status}: {error}") from error
    except TimedOut as error:
        why = f"{client.selector}: no whole answer within {TIMEOUT_S:g} s"
        raise SelectorError(why) from error
    except ClientError as error:  # it names the selector
        raise SelectorError(str(error)) from error


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

    A worker that only its source holds back, because it is not ready, is not drained.
    """
    for one in record.not_schedulable_reasons:
        if one.startswith(DRAINING):
            return one.removeprefix(DRAINING)
    return "" if _DRAINING in record.not_schedulable_reasons else None
