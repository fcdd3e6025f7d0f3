"""The other selectors of a Ray cluster and its workers, found at the meeting point.

What is found there is followed like any other source of workers and replicas
(`edge/discovery`). `serve_ray.py` stands before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import uuid
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import msgspec

from select_service.client import AsyncClient, ClientError, NotAnAnswer, Options, ServiceError
from select_service.client.ray.registry import BEAT_S, SelectorRegistry
from select_service.edge.discovery.followers import Discovery, ReplicaFollower
from select_service.edge.discovery.setup import worker_follower
from select_service.edge.discovery.source import DiscoverySource, SourceFailed
from select_service.types import WorkerSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.types import Scope

    from select_service.client.ray.registry import Present
    from select_service.edge.driver.driver import Driver
    from select_service.edge.security.credentials import ClientCredentials
    from select_service.settings import Settings

_log = logging.getLogger("select_service")

CATALOG: Final = "/workers"
_SOURCE: Final = "ray"
_API: Final = "api"
_PASS_ON_S: Final = 2.0
"""Longest wait for another selector to receive what changes the catalog; one that is slower has
either received it, or reads it all when it starts again."""

_MSGPACK: Final = b"application/msgpack"
_BEARER: Final = "bearer "


class RayDiscovery:
    """The other selectors, and the workers of the cluster, as they come and go."""

    def __init__(
        self,
        meeting: SelectorRegistry,
        url: str,
        endpoint: str,
        passport: ClientCredentials | None = None,
    ) -> None:
        """Look for none yet.

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
        self._tls = _tls(passport) if url.startswith("https") else None
        self.not_passed_on = 0  # changes of the catalog that a selector may not have received

    def followed_by(self, service: Driver, settings: Settings) -> Discovery:
        """Have a service agree with it, beside what its settings have it follow."""
        grace_s = settings.discovery_grace_s
        before = [] if service.discovery is None else service.discovery.followers
        workers = worker_follower(self._workers, service, settings, grace_s=grace_s, lets_end=True)
        clock = service.turn.clock
        peers = ReplicaFollower(self._peers, service.replica_plane, clock, grace_s=grace_s)
        return Discovery(service.readiness, [*before, workers, peers])

    async def look(self) -> None:
        """Say that we are here, and see which others are.

        Raises:
            SourceFailed: the cluster does not answer.
        """
        try:
            present = await self._meeting.selector(self._name, *self._me)
        except Exception as error:
            raise SourceFailed("unreachable", repr(error)) from error
        self._take(present)

    def _take(self, present: Present) -> None:
        url, endpoint = self._me
        self._urls = frozenset(one for one, _ in present.selectors.values()) - {url}
        self._peers.set_all(frozenset(one for _, one in present.selectors.values()) - {endpoint})
        workers: dict[int, WorkerSpec] = {}
        rejected: dict[str, str] = {}
        for worker_id, members in present.workers.items():
            try:
                workers[worker_id] = msgspec.convert(members, WorkerSpec)
            except msgspec.ValidationError as error:
                rejected[str(worker_id)] = str(error)
        self._workers.reject(rejected)
        self._workers.set_all(workers)

    async def leave(self) -> None:
        """Be looked for no longer."""
        await self._meeting.leave(selector=self._name)

    async def pass_on(self, scope: Scope, body: bytes) -> None:
        """Send all others what a proxy has sent us, as its caller; their answers are their own."""
        with contextlib.suppress(SourceFailed):
            await self.look()  # one may just have come
        method, path = scope["method"], scope["raw_path"].decode("ascii")
        headers = dict(scope["headers"])
        token = _token_of(headers.get(b"authorization", b"").decode("latin-1"))
        is_msgpack = headers.get(b"content-type", b"").startswith(_MSGPACK)
        decode = msgspec.msgpack.decode if is_msgpack else msgspec.json.decode
        try:
            members = decode(body) if body else None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.not_passed_on += len(self._urls)
            _log.warning("%s %s was not passed on: %s", method, path, error)
            return

        async def send(url: str) -> None:
            try:
                async with self._client(url, token) as client:
                    await client.call(method, path, members)
            except (ServiceError, NotAnAnswer):
                return
            except ClientError as error:
                self.not_passed_on += 1
                _log.warning("%s %s did not reach %s: %r", method, path, url, error)

        await asyncio.gather(*map(send, self._urls))

    async def copy_catalog(self, service: Driver) -> None:
        """Begin with the workers that were registered over HTTP, from any replica that has them."""
        with contextlib.suppress(SourceFailed):
            await self.look()
        for url in self._urls:
            try:
                async with self._client(url, self._own_token(url)) as client:
                    records = await client.call("GET", CATALOG, kind=list[dict[str, Any]])
                specs = [
                    msgspec.convert(one, WorkerSpec) for one in records if one["source"] == _API
                ]
            except (ServiceError, ClientError, msgspec.ValidationError) as error:
                _log.warning("no catalog from %s: %r", url, error)
                continue
            for spec in specs:
                with contextlib.suppress(ServiceError):  # it may be full; that is counted there
                    service.upsert_worker(spec)
            return

    def _client(self, url: str, token: str | None) -> AsyncClient:
        """Return a client for one call: whose token is shown differs from call to call."""
        return AsyncClient(
            url, token=token, ca=self._tls, options=Options.single_attempt(_PASS_ON_S)
        )

    def _own_token(self, url: str) -> str | None:
        if self._passport is None:
            return None
        headers = self._passport.headers(url, urlsplit(url).hostname)
        return _token_of(headers.get("authorization", ""))


def _token_of(authorization: str) -> str | None:
    scheme, token = authorization[: len(_BEARER)], authorization[len(_BEARER) :]
    return token.strip() if scheme.lower() == _BEARER else None


def _tls(passport: ClientCredentials | None) -> ssl.SSLContext:
    """Return the context for the others; without credentials nothing says what to trust."""
    if passport is not None:
        return passport.tls()
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


class _SetSource(DiscoverySource[Any]):
    """One whose content is set from outside."""

    def set_all(self, everything: Mapping[int, WorkerSpec] | frozenset[str]) -> None:
        """Publish what is new."""
        self.is_good()
        if everything != self.latest:
            self.publish(everything)


class _Peers(_SetSource):
    async def run(self) -> None:
        await asyncio.Event().wait()


class _Workers(_SetSource):
    """Looks, for both."""

    def __init__(self, discovery: RayDiscovery) -> None:
        super().__init__(_SOURCE, BEAT_S)
        self._discovery = discovery

    async def run(self) -> None:
        while True:
            try:
                await self._discovery.look()
            except SourceFailed as error:
                self.fail(error.kind, str(error))
            await asyncio.sleep(BEAT_S)
