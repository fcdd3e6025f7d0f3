"""The Kubernetes API over httpx: a list, then a watch from where the list ended, forever.

Token and CA are reread for every connection, since both rotate. A broken watch resumes from the
last version seen (bookmarks keep it recent); after 410 Gone the objects are listed again.
`objects.py` interprets the objects.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast

import msgspec
from typing_extensions import override

from select_service.config import Settings
from select_service.edge.discovery.source import BACKOFF_S, Source, SourceFailed, insist

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping

    import httpx

    from select_service.edge.discovery.objects import EndpointSlice, Pod

    HasMeta = Pod | EndpointSlice

__all__ = ["KubernetesApi", "Watched"]

O = TypeVar("O", bound="HasMeta")  # noqa: E741 - an object of the API
T = TypeVar("T")

_SETTINGS: Final = Settings()
PAGE_OBJECTS: Final = 200
PAGE_BYTES_MAX: Final = 64 << 20
LINE_BYTES_MAX: Final = 4 << 20
"""Longest page of a list and longest event of a watch; etcd accepts 1.5 MiB per object."""

CONNECT_TIMEOUT_S: Final = 10.0
WATCH_S: Final = 240
"""How long the server may keep a watch open; it then resumes without a list."""

SILENCE_S: Final = 300.0
"""Longest silence of a watch: the server ends it sooner, so silence this long is a dead connection.
"""

_GONE: Final = 410
_OK: Final = 200


class Gone(Exception):
    """The version to resume from is too old: list again."""


class _ListMeta(msgspec.Struct):
    resourceVersion: str = ""
    continue_: str | None = msgspec.field(default=None, name="continue")


class _WatchEvent(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Status(msgspec.Struct):
    code: int = 0
    message: str = ""


_decode_event: Final = msgspec.json.Decoder(_WatchEvent).decode
_decode_status: Final = msgspec.json.Decoder(_Status).decode


class KubernetesApi:
    """The API server and our credentials."""

    def __init__(
        self,
        url: str | None,
        credentials: str,
        namespace: str | None = None,
        *,
        objects_max: int = _SETTINGS.discovery_objects_max,
    ) -> None:
        """Read nothing yet.

        Args:
            url: of the API server; None: from the environment.
            credentials: the folder with token, ca.crt and namespace, as mounted into pods.
            namespace: None: that of the service account.
            objects_max: most objects a selector may match.
        """
        self.objects_max = objects_max
        self._url = url
        self._folder = Path(credentials)
        self._namespace = namespace

    @property
    def url(self) -> str:
        """The URL of the API server.

        Raises:
            SourceFailed: it is not configured.
        """
        if self._url is not None:
            return self._url
        host, port = (
            os.environ.get("KUBERNETES_SERVICE_HOST"),
            os.environ.get("KUBERNETES_SERVICE_PORT", "443"),
        )
        if not host:
            raise SourceFailed("unconfigured", "no --kubernetes-api, and not in a cluster")
        return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"

    @property
    def namespace(self) -> str:
        """The namespace to look in."""
        return self._namespace or self._mounted("namespace") or "default"

    def headers(self) -> dict[str, str]:
        """Return the request headers; the token is replaced every hour or so."""
        token = self._mounted("token")
        headers = {"accept": "application/json"}
        return headers | ({"authorization": f"Bearer {token}"} if token else {})

    def client(self) -> httpx.AsyncClient:
        """Open a client that trusts the cluster's current CA."""
        import httpx  # 0.1 s, paid only with Kubernetes

        ca = self._folder / "ca.crt"
        try:
            trust = ssl.create_default_context(cafile=str(ca) if ca.exists() else None)
        except (OSError, ssl.SSLError) as error:
            raise SourceFailed("credentials", f"{ca}: {error}") from None
        timeout = httpx.Timeout(CONNECT_TIMEOUT_S, read=SILENCE_S)
        return httpx.AsyncClient(base_url=self.url, verify=trust, timeout=timeout, trust_env=False)

    def _mounted(self, name: str) -> str:
        try:
            return (self._folder / name).read_text("ascii").strip()
        except FileNotFoundError:
            return ""
        except (OSError, ValueError) as error:
            raise SourceFailed("credentials", f"{self._folder / name}: {error}") from None


class Watched(Source[T], Generic[O, T]):
    """All objects of a kind with certain labels, and their meaning as a whole."""

    def __init__(  # noqa: PLR0917 - what is watched, and how it is read
        self,
        name: str,
        api: KubernetesApi,
        kind: type[O],
        path: str,
        selector: str,
        meaning: Callable[[Watched[O, T], Iterable[O]], T],
        backoff_s: float = BACKOFF_S,
    ) -> None:
        """Request nothing yet.

        Args:
            name: of the source.
            api: the API server.
            kind: what the objects are decoded as.
            path: of the list, with `{namespace}`.
            selector: label selector.
            meaning: turns the objects into what is published.
            backoff_s: pause after a failure, growing.
        """
        super().__init__(name)
        self._api = api
        self._path = path
        self._selector = selector
        self._meaning = meaning
        self._backoff_s = backoff_s
        self._objects: dict[str, O] = {}
        self._version = ""  # to resume from; empty: list first
        self._decode: Callable[[bytes], O] = msgspec.json.Decoder(kind).decode
        page = msgspec.defstruct("Page", [("metadata", _ListMeta), ("items", list[kind])])  # type: ignore[valid-type]
        self._decode_page: Callable[[bytes], Any] = msgspec.json.Decoder(page).decode

    @override
    async def run(self) -> None:
        await insist(self, self.look, self._backoff_s)

    async def look(self) -> None:
        """List if necessary, then watch until something fails; call it again then.

        Raises:
            SourceFailed: the server is unreachable, refuses, or sends nonsense.
        """
        import httpx

        try:
            async with self._api.client() as client:
                if not self._version:
                    await self._list(client)
                    self._say()
                while True:
                    await self._watch(client)
                    await asyncio.sleep(min(self._backoff_s, BACKOFF_S))
        except Gone:
            self._version = ""
            raise SourceFailed("gone", "the version watched from is gone; listing anew") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            why = f"{type(error).__name__}: {error}"
            raise SourceFailed("connection", why) from None
        except msgspec.MsgspecError as error:
            self._version = ""
            raise SourceFailed("malformed", str(error)) from None

    def _say(self) -> None:
        """Publish the objects, in an order independent of their arrival."""
        self.publish(self._meaning(self, (self._objects[key] for key in sorted(self._objects))))

    # -- list ----------------------------------------------------------------------------------

    async def _list(self, client: httpx.AsyncClient) -> None:
        found: dict[str, O] = {}
        more: str | None = ""
        version = ""
        while more is not None:
            page = self._decode_page(await self._page(client, more))
            found.update((_key(one), one) for one in cast("list[O]", page.items))
            self._count(found)
            version = page.metadata.resourceVersion
            more = page.metadata.continue_ or None
        self._objects, self._version = found, version

    async def _page(self, client: httpx.AsyncClient, more: str) -> bytes:
        ask = self._query(limit=str(PAGE_OBJECTS), **({"continue": more} if more else {}))
        body = bytearray()
        async for data in self._stream(client, ask):
            body += data
            if len(body) > PAGE_BYTES_MAX:
                raise SourceFailed("too_large", f"a list of more than {PAGE_BYTES_MAX} bytes")
        return bytes(body)

    def _count(self, found: Mapping[str, O]) -> None:
        most = self._api.objects_max
        if len(found) > most:
            self._version = ""
            raise SourceFailed("too_large", f"more than {most} objects (--discovery-objects-max)")

    # -- watch ---------------------------------------------------------------------------------

    async def _watch(self, client: httpx.AsyncClient) -> None:
        ask = self._query(
            watch="1",
            allowWatchBookmarks="true",
            resourceVersion=self._version,
            timeoutSeconds=str(WATCH_S),
        )
        rest = bytearray()
        async for data in self._stream(client, ask):
            rest += data
            end = rest.rfind(b"\n")
            if end >= 0:
                lines = bytes(rest[:end]).split(b"\n")
                del rest[: end + 1]
                if sum(self._take(line) for line in lines if line.strip()):
                    self._say()
            if len(rest) > LINE_BYTES_MAX:
                self._version = ""
                raise SourceFailed("too_large", f"an event of more than {LINE_BYTES_MAX} bytes")

    def _take(self, line: bytes) -> bool:
        """Apply one event; False if it changes nothing."""
        event = _decode_event(line)
        self.progress += 1
        if event.type == "ERROR":
            status = _decode_status(event.object)
            if status.code == _GONE:
                raise Gone
            raise SourceFailed("refused", f"watch ended with {status.code}: {status.message[:200]}")
        one = self._decode(bytes(event.object))
        self._version = one.metadata.resourceVersion or self._version
        if event.type in ("ADDED", "MODIFIED"):
            self._objects[_key(one)] = one
            self._count(self._objects)
        elif event.type == "DELETED":
            self._objects.pop(_key(one), None)
        else:
            return False
        return True

    # -- both ----------------------------------------------------------------------------------

    def _query(self, **more: str) -> Mapping[str, str]:
        return {"labelSelector": self._selector, **more}

    async def _stream(
        self, client: httpx.AsyncClient, ask: Mapping[str, str]
    ) -> AsyncIterator[bytes]:
        path = self._path.format(namespace=self._api.namespace)
        async with client.stream(
            "GET", path, params=dict(ask), headers=self._api.headers()
        ) as answer:
            if answer.status_code == _GONE:
                raise Gone
            if answer.status_code != _OK:
                kind = "unauthorized" if answer.status_code in (401, 403) else "status"
                raise SourceFailed(kind, f"status {answer.status_code} for {path}")
            async for data in answer.aiter_bytes():
                yield data


def _key(one: HasMeta) -> str:
    return f"{one.metadata.namespace}/{one.metadata.name}"
