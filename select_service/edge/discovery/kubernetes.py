"""Objects of the Kubernetes API: a list, then a watch from where the list ended, forever.

A watch that ends, or whose connection breaks, resumes from the last version seen (bookmarks keep it
recent). After anything else that goes wrong, after a watch that was silent to its end, and if
resuming does not help, the objects are listed again. `objects.py` interprets the objects.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast

import msgspec
from typing_extensions import override

from select_service.edge.discovery.source import BACKOFF_S, DiscoverySource, SourceFailed, insist
from select_service.kubernetes_api import KubernetesError, KubernetesStatus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping

    import httpx

    from select_service.edge.discovery.objects import EndpointSlice, Pod
    from select_service.kubernetes_api import KubernetesApi

    HasMeta = Pod | EndpointSlice

O = TypeVar("O", bound="HasMeta")  # noqa: E741 - an object of the API
T = TypeVar("T")

PAGE_OBJECTS: Final = 200
PAGE_BYTES_MAX: Final = 64 << 20
LINE_BYTES_MAX: Final = 4 << 20
"""Longest page of a list and longest event of a watch; etcd accepts 1.5 MiB per object."""

CONNECT_TIMEOUT_S: Final = 10.0
WATCH_S: Final = 60
"""How long the server may keep a watch open; it then resumes without a list if it said anything."""

WATCH_LATE_S: Final = 15.0
"""How much longer a watch is believed in: the server ends it in time, so it is dead otherwise,
whatever keeps the connection up."""

WATCH_SHORT_S: Final = 1.0
"""A watch that ends sooner than this and says nothing has failed, whatever its status."""

PAGE_TIMEOUT_S: Final = 30.0
"""Longest wait for a page of a list."""

RESUMES_MAX: Final = 3
"""So many connections of a watch may break in a row before the objects are listed again."""

REFUSAL_BYTES_MAX: Final = 64 << 10
"""Of an error's body, which is read for its message."""

_OK: Final = 200
_TOO_MANY: Final = 429
_CHANGES: Final = frozenset({"ADDED", "MODIFIED", "DELETED"})


class _ListMeta(msgspec.Struct):
    resourceVersion: str = ""
    continue_: str | None = msgspec.field(default=None, name="continue")


class _WatchEvent(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Bookmark(msgspec.Struct):
    """An object of which only the version counts; its other fields are null."""

    metadata: _ListMeta


_decode_event: Final = msgspec.json.Decoder(_WatchEvent).decode
_decode_status: Final = msgspec.json.Decoder(KubernetesStatus).decode
_decode_bookmark: Final = msgspec.json.Decoder(_Bookmark).decode


class Watched(DiscoverySource[T], Generic[O, T]):
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
        super().__init__(name, WATCH_S)
        self._api = api
        self._path = path
        self._selector = selector
        self._meaning = meaning
        self._backoff_s = backoff_s
        self._objects: dict[str, O] = {}
        self._version = ""  # to resume from; empty: list first
        self._resumes = 0  # in a row, of which none has brought anything
        self._in_pages = True  # False: the rest of a list had expired before it could be read
        self._decode: Callable[[bytes], O] = msgspec.json.Decoder(kind).decode
        page = msgspec.defstruct("Page", [("metadata", _ListMeta), ("items", list[kind] | None)])  # type: ignore[valid-type]
        self._decode_page: Callable[[bytes], Any] = msgspec.json.Decoder(page).decode

    @override
    async def run(self) -> None:
        await insist(self, self.look, self._backoff_s)

    async def look(self) -> None:
        """List if necessary, then watch until something fails; call it again then.

        Unless the failure is provably transient, the next call lists anew.

        Raises:
            SourceFailed: the server is unreachable, refuses, or sends nonsense.
        """
        try:
            await self._look()
        except SourceFailed as error:
            if not error.is_transient or self._resumes >= RESUMES_MAX:
                self._version, self._resumes = "", 0
            raise

    async def _look(self) -> None:
        import httpx

        try:
            timeout = httpx.Timeout(CONNECT_TIMEOUT_S, read=WATCH_S + WATCH_LATE_S)
            async with self._api.client(timeout) as client:
                while True:
                    if not self._version:
                        await self._list(client)
                        self._log_state()
                    await self._watch(client)
                    await asyncio.sleep(min(self._backoff_s, BACKOFF_S))
        except KubernetesError as error:
            raise SourceFailed(error.kind, str(error)) from None
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:  # nothing was asked yet
            why = f"{type(error).__name__}: {error}"
            raise SourceFailed("connection", why, is_transient=True) from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            self._resumes += 1
            why = f"{type(error).__name__}: {error}"
            raise SourceFailed("connection", why, is_transient=True) from None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise SourceFailed("malformed", str(error)) from None

    def _log_state(self) -> None:
        """Publish the objects, in an order independent of their arrival."""
        self.publish(self._meaning(self, (self._objects[key] for key in sorted(self._objects))))

    # -- list ----------------------------------------------------------------------------------

    async def _list(self, client: httpx.AsyncClient) -> None:
        found: dict[str, O] = {}
        more: str | None = ""
        version = ""
        in_pages, self._in_pages = self._in_pages, True
        while more is not None:
            try:
                text = await self._page(client, more, in_pages=in_pages)
            except SourceFailed as error:
                self._in_pages = not (more and error.kind == "gone")
                raise
            page = self._decode_page(text)
            found.update((_key(one), one) for one in cast("list[O]", page.items or []))
            self._count(found)
            version = page.metadata.resourceVersion
            more = page.metadata.continue_ or None
        self._objects, self._version, self._resumes = found, version, 0

    async def _page(self, client: httpx.AsyncClient, more: str, *, in_pages: bool) -> bytes:
        ask = {"limit": str(PAGE_OBJECTS)} if in_pages else {}
        ask |= {"continue": more} if more else {}
        body = bytearray()
        try:
            async with asyncio.timeout(PAGE_TIMEOUT_S):
                async for data in self._stream(client, self._query(**ask)):
                    body += data
                    if len(body) > PAGE_BYTES_MAX:
                        why = f"a list of more than {PAGE_BYTES_MAX} bytes"
                        raise SourceFailed("too_large", why)
        except TimeoutError:
            raise SourceFailed("timeout", f"no list within {PAGE_TIMEOUT_S:g} s") from None
        return bytes(body)

    def _count(self, found: Mapping[str, O]) -> None:
        most = self._api.objects_max
        if most is not None and len(found) > most:
            raise SourceFailed("too_large", f"more than {most} objects (--discovery-objects-max)")

    # -- watch ---------------------------------------------------------------------------------

    async def _watch(self, client: httpx.AsyncClient) -> None:
        """Watch until the server ends it in order.

        A watch without so much as a bookmark may begin at a version that is yet to come, as after
        etcd was restored from a backup: its server is silent until then. So a list follows.

        Raises:
            SourceFailed: it does not end in time, ends at once, or says that something is wrong.
        """
        before, began_at = self.progress, self.clock()
        try:
            async with asyncio.timeout(WATCH_S + WATCH_LATE_S):
                await self._watch_once(client)
        except TimeoutError:
            self._resumes += 1
            why = f"a watch of {WATCH_S} s that has not ended after {WATCH_S + WATCH_LATE_S:g} s"
            raise SourceFailed("silent", why, is_transient=True) from None
        if self.progress == before:
            if self.clock() - began_at < WATCH_SHORT_S:
                raise SourceFailed("short", "a watch that ended at once and said nothing")
            self._version = ""
            return
        self._resumes = 0
        self.is_good()

    async def _watch_once(self, client: httpx.AsyncClient) -> None:
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
                    self._log_state()
            if len(rest) > LINE_BYTES_MAX:
                raise SourceFailed("too_large", f"an event of more than {LINE_BYTES_MAX} bytes")

    def _take(self, line: bytes) -> bool:
        """Apply one event; False if it changes nothing."""
        event = _decode_event(line)
        if event.type == "ERROR":
            status = _decode_status(event.object)
            if status.is_gone:
                raise _gone(status)
            why = f"watch ended with {status.code} {status.reason}: {(status.message or '')[:200]}"
            raise SourceFailed("refused", why, retry_after_s=status.retry_after_s())
        changes = event.type in _CHANGES
        if changes:
            one = self._decode(bytes(event.object))
            version = one.metadata.resourceVersion
            if event.type == "DELETED":
                self._objects.pop(_key(one), None)
            else:
                self._objects[_key(one)] = one
                self._count(self._objects)
        else:  # a bookmark, or what a later API may send
            version = _decode_bookmark(event.object).metadata.resourceVersion
        self._version = version or self._version
        self.progress += 1
        self._resumes = 0
        self.is_good()
        return changes

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
            if answer.status_code != _OK:
                raise await self._refusal(answer, path)
            async for data in answer.aiter_bytes():
                yield data

    async def _refusal(self, answer: httpx.Response, path: str) -> SourceFailed:
        status = KubernetesStatus()
        with contextlib.suppress(msgspec.MsgspecError):
            body = bytearray()
            async for data in answer.aiter_bytes():
                body += data
                if len(body) > REFUSAL_BYTES_MAX:
                    break
            status = _decode_status(body)
        status.code = answer.status_code
        if status.is_gone:
            return _gone(status)
        is_busy = status.code == _TOO_MANY  # it has not looked at what we ask for
        self._resumes += is_busy
        return SourceFailed(
            "unauthorized" if status.code in (401, 403) else "status",
            f"status {status.code} for {path}: {(status.message or '')[:200]}",
            is_transient=is_busy,
            retry_after_s=status.retry_after_s(answer.headers),
        )


def _gone(status: KubernetesStatus) -> SourceFailed:
    why = f"the version watched from is gone ({status.code} {status.reason}); listing anew"
    return SourceFailed("gone", why, retry_after_s=status.retry_after_s())


def _key(one: HasMeta) -> str:
    return f"{one.metadata.namespace}/{one.metadata.name}"
