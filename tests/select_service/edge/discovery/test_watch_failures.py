"""Whatever goes wrong with a watch, it is begun again, and after most of it with a new list."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from select_service.edge.discovery import kubernetes
from select_service.edge.discovery import source as sources
from select_service.edge.discovery.kubernetes import RESUMES_MAX
from select_service.edge.discovery.source import DiscoverySource, SourceFailed, insist
from tests.coroutines import within
from tests.select_service.edge.discovery.fake_kubernetes import FakeKubernetes, pod, status
from tests.select_service.edge.discovery.test_kubernetes import (
    Workers,
    endpoints,
    watching,
)
from tests.wait import until

# as a kube-apiserver says it whose watch cache is behind the version asked for
TOO_LARGE = status(
    504,
    "Timeout",
    "Timeout: Too large resource version: 99999999, current: 208",
    details={
        "causes": [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}],
        "retryAfterSeconds": 1,
    },
)
STATUSES = {
    "too large": TOO_LARGE,
    "gone": status(410, "Gone", "too old resource version: 1 (100)"),
    "expired": status(410, "Expired", "The resourceVersion for the provided watch is too old."),
    "expired, no code": status(0, "Expired"),
    "internal": status(500, "InternalError", "etcdserver: request timed out"),
    "unavailable": status(503, "ServiceUnavailable", "apiserver is shutting down"),
    "too many": status(429, "TooManyRequests", details={"retryAfterSeconds": 0}),
    "forbidden": status(403, "Forbidden"),
    "not found": status(404, "NotFound"),
    "nulls": {"kind": "Status", "code": None, "reason": None, "message": None, "details": None},
}


async def missed_by_the_watch(api: FakeKubernetes) -> None:
    """A pod comes, and only a list tells."""
    name, one = "w-3", pod("10.0.0.4")
    api.version += 1
    meta = {"name": name, "namespace": "ns", **one["metadata"]}
    api.objects["pods", name] = {**one, "metadata": {**meta, "resourceVersion": str(api.version)}}


@pytest.mark.parametrize("how", STATUSES)
async def test_an_error_event_means_to_list_anew(how: str, tmp_path: Path) -> None:
    text = json.dumps({"type": "ERROR", "object": STATUSES[how]}).encode() + b"\n"
    async with watching(tmp_path) as (api, source):
        await until(lambda: len(api.watches) == 1)
        await missed_by_the_watch(api)
        await until(lambda: bool(api._watchers))
        await api.say_raw(text)
        await until(lambda: len(endpoints(source)) == 4)
        assert sum(source.failures.values()) == 1


@pytest.mark.parametrize("how", [one for one in STATUSES if one != "nulls"])
@within(watching, "tmp_path")
async def test_a_watch_that_is_refused_means_to_list_anew(
    api: FakeKubernetes, source: Workers, *, how: str
) -> None:
    """A server that is busy is asked for the same a few times before."""
    body = STATUSES[how]
    code = body["code"] or 410
    await until(lambda: len(api.watches) == 1)
    await missed_by_the_watch(api)
    before = len(api.watches)
    api.watches_fail_with = code, body
    await api.break_watches()
    await until(lambda: len(endpoints(source)) == 4)
    api.watches_fail_with = None
    versions = [query["resourceVersion"] for query in api.watches[before:]]
    broken = 1  # the connection, by which it began
    assert len(versions) >= (RESUMES_MAX - broken if code == 429 else 1)
    await until(lambda: bool(api._watchers))
    await api.put("pods", "w-4", **pod("10.0.0.5"))
    await until(lambda: len(endpoints(source)) == 5)


@pytest.mark.parametrize(
    "says",
    [
        b"",
        b"\n\n",
        b"<html>\n",
        b'{"type":"ADDED"}\n',
        b'{"kind":"Status","code":504}\n',
        b'{"type":"BOOKMARK","object":{"kind":"Pod"}}\n',
        b"\xff\xfe\n",
    ],
)
@within(watching, "tmp_path")
async def test_a_watch_that_ends_at_once_or_makes_no_sense(
    api: FakeKubernetes, source: Workers, *, says: bytes
) -> None:
    await until(lambda: len(api.watches) == 1)
    await missed_by_the_watch(api)
    api.watch_says = says
    await api.break_watches()
    await until(lambda: len(endpoints(source)) == 4)
    api.watch_says = None
    await until(lambda: bool(api._watchers))
    await api.put("pods", "w-4", **pod("10.0.0.5"))
    await until(lambda: len(endpoints(source)) == 5)


@within(watching, "tmp_path")
async def test_connections_that_break_again_and_again(api: FakeKubernetes, source: Workers) -> None:
    """A broken connection says nothing against what is known, a few of them in a row do."""
    await until(lambda: len(api.watches) == 1)
    await missed_by_the_watch(api)
    for number in range(RESUMES_MAX):
        await until(lambda: bool(api._watchers))
        assert len(api.lists) == 2, number
        await api.break_watches()
    await until(lambda: len(endpoints(source)) == 4)


@pytest.mark.parametrize("trickle", [False, True])
async def test_a_watch_that_does_not_end_in_time_is_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, trickle: bool
) -> None:
    """Whatever keeps its connection up, as a proxy's empty lines."""
    monkeypatch.setattr(kubernetes, "WATCH_S", 0.05)
    monkeypatch.setattr(kubernetes, "WATCH_LATE_S", 0.05)
    async with watching(tmp_path) as (api, source):

        async def say() -> None:
            while True:
                await api.say_raw(b"\n")
                await asyncio.sleep(0.01)

        saying = asyncio.ensure_future(say()) if trickle else None
        await until(lambda: bool(source.failures))
        await until(lambda: len(api.watches) >= 2)
        assert api.watches[1]["resourceVersion"] == api.watches[0]["resourceVersion"]
        await missed_by_the_watch(api)
        await until(lambda: len(endpoints(source)) == 4)  # after some of them it lists
        if saying is not None:
            saying.cancel()


@within(watching, "tmp_path", slices=True)
async def test_nothing_is_listed_as_null(api: FakeKubernetes, source: Workers) -> None:
    """Old servers write an empty list so."""
    api.nothing = None
    await until(lambda: source.latest == {})
    assert source.failures == {}


class Pauses:
    """Takes the place of asyncio.sleep: remembers, and ends the looking after some."""

    def __init__(self, most: int) -> None:
        self.all: list[float] = []
        self._most = most

    async def __call__(self, pause_s: float) -> None:
        self.all.append(pause_s)
        if len(self.all) >= self._most:
            raise asyncio.CancelledError


def pauses(
    source: DiscoverySource[int], look: Any, monkeypatch: pytest.MonkeyPatch, most: int
) -> list[float]:
    taken = Pauses(most)
    monkeypatch.setattr(asyncio, "sleep", taken)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(insist(source, look))
    return taken.all


def test_pauses_grow_within_bounds_even_if_lists_succeed(monkeypatch: pytest.MonkeyPatch) -> None:
    source: DiscoverySource[int] = DiscoverySource("s")

    async def look() -> None:
        source.publish(1)
        raise SourceFailed("refused", "and the watch fails at once")

    found = pauses(source, look, monkeypatch, 60)
    for number, pause in enumerate(found):
        longest = min(sources.BACKOFF_S * 2**number, sources.BACKOFF_MAX_S)
        assert longest / 2 <= pause <= longest
    assert len(set(found)) > 50, "replicas do not come back together"


def test_a_look_that_has_lasted_makes_pauses_short_again(monkeypatch: pytest.MonkeyPatch) -> None:
    source: DiscoverySource[int] = DiscoverySource("s")
    now = 0.0
    source.keep_time(lambda: now)

    async def look() -> None:
        nonlocal now
        now += 31.0
        raise SourceFailed("refused", "after half a minute")

    assert max(pauses(source, look, monkeypatch, 9)) <= sources.BACKOFF_S


def test_a_connection_that_brings_something_is_made_again_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source: DiscoverySource[int] = DiscoverySource("s")

    async def look() -> None:
        source.progress += 1
        raise SourceFailed("connection", "cut", is_transient=True)

    assert max(pauses(source, look, monkeypatch, 9)) <= sources.BACKOFF_S


@pytest.mark.parametrize(("details", "least", "most"), [(7.0, 7.0, 7.0), (1e6, 60.0, 60.0)])
def test_who_asks_to_be_left_alone_is(
    details: float, least: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def look() -> None:
        raise SourceFailed("status", "429", retry_after_s=details)

    (pause,) = pauses(DiscoverySource("s"), look, monkeypatch, 1)
    assert least <= pause <= most


@within(watching, "tmp_path")
async def test_retry_after_is_read_from_the_header_and_from_the_body(
    api: FakeKubernetes, source: Workers
) -> None:
    waits: list[float] = []
    await until(lambda: len(api.watches) == 1)
    looked = getattr(source, "look")  # noqa: B009 - of Watched

    async def look() -> None:
        try:
            await looked()
        except SourceFailed as error:
            waits.append(error.retry_after_s)
            error.retry_after_s = 0.0
            raise

    await api.break_watches()
    details: dict[str, Any] = {"details": {"retryAfterSeconds": 4}}
    for header, body in (("3", {}), (None, details), ("soon", {})):
        api.retry_after = header
        api.watches_fail_with = 503, status(503, "ServiceUnavailable", **body)
        with pytest.raises(SourceFailed):
            await look()
    assert waits == [3.0, 4.0, 0.0]
