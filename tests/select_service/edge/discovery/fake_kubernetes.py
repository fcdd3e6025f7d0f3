"""A small Kubernetes API server: lists in pages, watches, 410, and mishaps.

It keeps objects with versions as etcd does and speaks chunked HTTP/1.1 on a loopback port. A test
changes objects and breaks things; `requests` is what clients asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.live.ports import HOST
from tests.live.tcp_server import tcp_server


class FakeKubernetes:
    """One namespace's pods and EndpointSlices."""

    def __init__(self) -> None:
        self.version = 100
        self.oldest = 0  # versions before are compacted: 410
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}  # (kind, name)
        self.history: list[tuple[int, str, str, dict[str, Any]]] = []
        self.requests: list[tuple[str, dict[str, str], dict[str, str]]] = []
        self.token: str | None = None  # what clients must bear
        self.page_size = 2
        self.nothing: list[Any] | None = []  # how an empty list is written
        self.watches_fail_with: tuple[int, dict[str, Any]] | None = None  # status, and its body
        self.retry_after: str | None = None  # sent with it
        self.watch_says: bytes | None = None  # all that a watch says before it ends in order
        self.url = ""
        self._watchers: set[asyncio.StreamWriter] = set()
        self._changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def serving(
        self, tls: ssl.SSLContext | None = None, host: str = HOST
    ) -> AsyncIterator[FakeKubernetes]:
        async with tcp_server(self._serve, host, tls=tls) as port:
            scheme = "http" if tls is None else "https"
            self.url = f"{scheme}://{host}:{port}"
            yield self

    # -- what a test does ----------------------------------------------------------------------

    async def put(self, kind: str, name: str, **fields: Any) -> None:
        known = (kind, name) in self.objects
        await self._record(kind, "MODIFIED" if known else "ADDED", name, fields)

    async def delete(self, kind: str, name: str) -> None:
        one = self.objects[kind, name]
        await self._record(kind, "DELETED", name, one)

    async def break_watches(self) -> None:
        """The connections drop, in the middle of whatever they say."""
        for writer in list(self._watchers):
            writer.transport.abort()
        self._watchers.clear()
        async with self._changed:
            self._changed.notify_all()

    async def say_raw(self, text: bytes) -> None:
        """Put bytes of its own into every open watch."""
        for writer in self._watchers:
            with contextlib.suppress(ConnectionError):
                _chunk(writer, text)
                await writer.drain()

    def compact(self) -> None:
        """Forget what happened until now."""
        self.history.clear()
        self.version += 1
        self.oldest = self.version

    @property
    def watches(self) -> list[dict[str, str]]:
        return [query for _, query, _ in self.requests if "watch" in query]

    @property
    def lists(self) -> list[dict[str, str]]:
        return [query for _, query, _ in self.requests if "watch" not in query]

    async def _record(self, kind: str, event: str, name: str, fields: dict[str, Any]) -> None:
        self.version += 1
        meta = {"name": name, "namespace": "ns", **fields.get("metadata", {})}
        one = {**fields, "metadata": {**meta, "resourceVersion": str(self.version)}}
        if event == "DELETED":
            del self.objects[kind, name]
        else:
            self.objects[kind, name] = one
        self.history.append((self.version, kind, event, one))
        async with self._changed:
            self._changed.notify_all()

    # -- HTTP ----------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = {
                    name.lower(): value
                    for name, _, value in (line.partition(": ") for line in head[1:] if line)
                }
                url = urlsplit(head[0].split()[1])
                query = {name: values[0] for name, values in parse_qs(url.query).items()}
                self.requests.append((url.path, query, headers))
                await self._answer(url.path, query, headers, writer)
        finally:
            self._watchers.discard(writer)

    async def _answer(
        self,
        path: str,
        query: dict[str, str],
        headers: dict[str, str],
        writer: asyncio.StreamWriter,
    ) -> None:
        if self.token is not None and headers.get("authorization") != f"Bearer {self.token}":
            _reply(writer, 401, status(401, "Unauthorized", "Unauthorized"))
        elif "watch" in query and self.watches_fail_with is not None:
            _reply(writer, *self.watches_fail_with, retry_after=self.retry_after)
        elif "watch" in query and self.watch_says is not None:
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            if self.watch_says:
                _chunk(writer, self.watch_says)
            writer.write(b"0\r\n\r\n")
        elif "watch" in query:
            await self._watch(path.rsplit("/", 1)[1], int(query["resourceVersion"]), writer)
            self._watchers.discard(writer)
            writer.write(b"0\r\n\r\n")
        else:
            self._list(path.rsplit("/", 1)[1], query, writer)
        await writer.drain()

    def _list(self, kind: str, query: dict[str, str], writer: asyncio.StreamWriter) -> None:
        names = sorted(name for k, name in self.objects if k == kind)
        start = int(query.get("continue", "0"))
        page = names[start : start + self.page_size]
        meta = {"resourceVersion": str(self.version)}
        if start + self.page_size < len(names):
            meta["continue"] = str(start + self.page_size)
        items = [self.objects[kind, name] for name in page] or self.nothing
        _reply(writer, 200, {"kind": "List", "metadata": meta, "items": items})

    async def _watch(self, kind: str, version: int, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        if version < self.oldest:
            why = f"too old resource version: {version} ({self.oldest})"
            gone = status(410, "Expired", why)
            _chunk(writer, json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
            return
        self._watchers.add(writer)
        while not writer.transport.is_closing():
            for at, what, event, one in self.history:
                if at > version and what == kind:
                    text = json.dumps({"type": event, "object": one}).encode() + b"\n"
                    _chunk(writer, text[: len(text) // 2])  # an event may come in two pieces
                    _chunk(writer, text[len(text) // 2 :])
                    version = at
            await writer.drain()
            async with self._changed:
                await self._changed.wait()


def _reply(
    writer: asyncio.StreamWriter,
    status: int,
    body: dict[str, Any],
    retry_after: str | None = None,
) -> None:
    text = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} Whatever\r\ncontent-type: application/json\r\n"
    if retry_after is not None:
        head += f"retry-after: {retry_after}\r\n"
    writer.write(f"{head}content-length: {len(text)}\r\n\r\n".encode() + text)


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


def status(code: int, reason: str, message: str = "", **more: Any) -> dict[str, Any]:
    """A Status, as API servers write it."""
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
        **more,
    }


def pod(ip: str, *, ready: bool = True, **annotations: str) -> dict[str, Any]:
    """The fields of a running pod, as an API server sends them (much else left out)."""
    named = {f"select-service.io/{k.replace('_', '-')}": v for k, v in annotations.items()}
    ports = [
        {"name": "http", "containerPort": 8000, "protocol": "TCP"},
        {"name": "kv-events", "containerPort": 5557, "protocol": "TCP"},
    ]
    return {
        "metadata": {"annotations": named, "labels": {"app": "vllm"}, "uid": f"uid-{ip}"},
        "spec": {"containers": [{"name": "engine", "image": "vllm", "ports": ports}]},
        "status": {
            "phase": "Running",
            "podIP": ip,
            "podIPs": [{"ip": ip}],
            "conditions": [
                {"type": "PodScheduled", "status": "True"},
                {"type": "Ready", "status": "True" if ready else "False"},
            ],
        },
    }
