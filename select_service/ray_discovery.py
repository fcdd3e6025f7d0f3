"""The other selectors of a Ray cluster and its workers, found at the meeting point.

What is found there is followed like any other source of workers and replicas
(`edge/discovery`). `serve_ray.py` stands before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import httpx
import msgspec

from select_service.client.ray.registry import BEAT_S, Registry
from select_service.edge.discovery.followers import Discovery, ReplicaFollower
from select_service.edge.discovery.setup import worker_follower
from select_service.edge.discovery.source import Source, SourceFailed
from select_service.errors import ServiceError
from select_service.types import WorkerSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.types import Scope

    from select_service.client.ray.registry import Present
    from select_service.edge.driver.driver import Driver
    from select_service.edge.security.client_credentials import ClientCredentials
    from select_service.settings import Settings

__all__ = ["CATALOG", "RayDiscovery"]

_log = logging.getLogger("select_service")

CATALOG: Final = "/workers"
_SOURCE: Final = "ray"
_API: Final = "api"
_PASS_ON_S: Final = 2.0
"""Longest wait for another selector to hear what changes the catalog; one that is slower has either
heard it, or reads it all when it starts again."""

_PASSED_HEADERS: Final = (b"content-type", b"authorization")
_records: Final = msgspec.json.Decoder(list[dict[str, Any]])


class RayDiscovery:
    """The other selectors, and the workers of the cluster, as they come and go."""

    def __init__(
        self, meeting: Registry, url: str, endpoint: str, passport: ClientCredentials | None = None
    ) -> None:
        """Look for nobody yet.

        Args:
            meeting: where they are found.
            url: our own address.
            endpoint: of our replica plane.
            passport: shown to the others.
        """
        self._meeting = meeting
        self._passport = passport
        self._me = (url, endpoint)
        self._name = uuid.uuid4().hex
        self._workers = _Workers(self)
        self._peers = _Peers(_SOURCE, BEAT_S)
        self._urls: frozenset[str] = frozenset()
        tls = passport.tls() if passport is not None and url.startswith("https") else False
        self._http = httpx.AsyncClient(trust_env=False, timeout=_PASS_ON_S, verify=tls)
        self.not_passed_on = 0  # changes of the catalog that a selector may not have heard

    def followed_by(self, service: Driver, settings: Settings) -> Discovery:
        """Have a service agree with it, beside what its settings have it follow."""
        grace_s = settings.discovery_grace_s
        before = [] if service.discovery is None else service.discovery.followers
        workers = worker_follower(self._workers, service, settings, grace_s=grace_s, lets_end=True)
        clock = service.turn.clock
        peers = ReplicaFollower(self._peers, service.replica_plane, clock, grace_s=grace_s)
        return Discovery(service.readiness, [*before, workers, peers])

    async def look(self) -> None:
        """Say that we are here, and see who else is.

        Raises:
            SourceFailed: nobody says so.
        """
        try:
            present = await self._meeting.selector(self._name, *self._me)
        except Exception as error:
            raise SourceFailed("unreachable", repr(error)) from error
        self._take(present)

    def _take(self, present: Present) -> None:
        url, endpoint = self._me
        self._urls = frozenset(one for one, _ in present.selectors.values()) - {url}
        self._peers.tell(frozenset(one for _, one in present.selectors.values()) - {endpoint})
        workers: dict[int, WorkerSpec] = {}
        rejected: dict[str, str] = {}
        for worker_id, members in present.workers.items():
            try:
                workers[worker_id] = msgspec.convert(members, WorkerSpec)
            except msgspec.ValidationError as error:
                rejected[str(worker_id)] = str(error)
        self._workers.reject(rejected)
        self._workers.tell(workers)

    async def leave(self) -> None:
        """Be looked for no longer."""
        await self._http.aclose()
        await self._meeting.leave(selector=self._name)

    async def pass_on(self, scope: Scope, body: bytes) -> None:
        """Tell all others what a proxy has told us; their answers are their own."""
        with contextlib.suppress(SourceFailed):
            await self.look()  # somebody may just have come
        path = scope["raw_path"].decode("ascii")
        headers = [(name, one) for name, one in scope["headers"] if name in _PASSED_HEADERS]

        async def tell(url: str) -> None:
            try:
                await self._http.request(scope["method"], url + path, content=body, headers=headers)
            except httpx.HTTPError as error:
                self.not_passed_on += 1
                _log.warning("%s %s did not reach %s: %r", scope["method"], path, url, error)

        await asyncio.gather(*map(tell, self._urls))

    async def copy_catalog(self, service: Driver) -> None:
        """Begin with the workers that were registered over HTTP, from whoever has them."""
        with contextlib.suppress(SourceFailed):
            await self.look()
        for url in self._urls:
            try:
                answer = await self._http.get(url + CATALOG, headers=self._headers(url))
                records = _records.decode(answer.raise_for_status().content)
                specs = [
                    msgspec.convert(one, WorkerSpec) for one in records if one["source"] == _API
                ]
            except (httpx.HTTPError, msgspec.DecodeError, UnicodeDecodeError) as error:
                _log.warning("no catalog from %s: %r", url, error)
                continue
            for spec in specs:
                with contextlib.suppress(ServiceError):  # it may be full; that is counted there
                    service.upsert_worker(spec)
            return

    def _headers(self, url: str) -> Mapping[str, str]:
        host = urlsplit(url).hostname
        return {} if self._passport is None else self._passport.headers(url, host)


class _Told(Source[Any]):
    """One that is told what there is."""

    def tell(self, everything: Mapping[int, WorkerSpec] | frozenset[str]) -> None:
        """Publish what is new."""
        self.is_good()
        if everything != self.latest:
            self.publish(everything)


class _Peers(_Told):
    async def run(self) -> None:
        await asyncio.Event().wait()


class _Workers(_Told):
    """Looks, for both."""

    def __init__(self, company: RayDiscovery) -> None:
        super().__init__(_SOURCE, BEAT_S)
        self._company = company

    async def run(self) -> None:
        while True:
            try:
                await self._company.look()
            except SourceFailed as error:
                self.fail(error.kind, str(error))
            await asyncio.sleep(BEAT_S)
