"""Pods and EndpointSlices become workers and replicas, whatever the API server does meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from select_service.edge.discovery import kubernetes
from select_service.edge.discovery.kubernetes import Watched
from select_service.edge.discovery.setup import watched_replicas, watched_workers
from select_service.edge.discovery.source import DiscoverySource
from select_service.kubernetes_api import KubernetesApi
from select_service.types import WorkerSpec
from tests.coroutines import within
from tests.select_service.edge.discovery.fake_kubernetes import FakeKubernetes, pod
from tests.select_service.edge.security.credentials_made import Authority
from tests.wait import until

Workers = DiscoverySource[dict[int, WorkerSpec]]


def endpoints(source: Workers) -> set[str | None]:
    return {spec.endpoint for spec in (source.latest or {}).values()}


@contextlib.asynccontextmanager
async def watching(
    tmp_path: Path, *, slices: bool = False, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[FakeKubernetes, Workers]]:
    """An API server with three pods, and who looks at it."""
    async with FakeKubernetes().serving(tls) as api:
        await api.put("pods", "w-0", **pod("10.0.0.1"))
        await api.put("pods", "w-1", **pod("10.0.0.2"))
        await api.put("pods", "w-2", **pod("10.0.0.3"))
        (tmp_path / "namespace").write_text("ns\n")
        source = watched_workers(
            KubernetesApi(api.url, str(tmp_path)), "app=vllm", slices=slices, backoff_s=0.01
        )
        looking = asyncio.ensure_future(source.run())
        try:
            yield api, source
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)


THREE = {f"http://10.0.0.{n}:8000" for n in (1, 2, 3)}


@within(watching, "tmp_path")
async def test_garbage_in_a_watch(api: FakeKubernetes, source: Workers) -> None:
    await until(lambda: len(api.watches) == 1)
    garbage = (
        b"<html>",
        b'{"type":"ADDED","object":5}',
        b"\xff",
        b'{"type":"\xff"}',
        b'{"\xff":1}',
    )
    for number, text in enumerate(one + b"\n" for one in garbage):
        watches = len(api.watches)
        await api.say_raw(text)
        await until(lambda: source.failures.get("malformed", 0) > number)
        await until(lambda: len(api.watches) > watches)
        assert endpoints(source) == THREE
    assert source.failures["malformed"] == len(garbage)


async def test_an_event_without_end(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(kubernetes, "LINE_BYTES_MAX", 10_000)
    async with watching(tmp_path) as (api, source):
        await until(lambda: len(api.watches) == 1)
        await until(lambda: bool(api._watchers))
        await api.say_raw(b"x" * 20_000)
        await until(lambda: source.failures.get("too_large") == 1)
        await until(lambda: len(api.lists) == 4)
        assert endpoints(source) == THREE


@within(watching, "tmp_path")
async def test_no_more_objects_than_may_be(api: FakeKubernetes, source: Workers) -> None:
    """Neither in a list nor by and by; the last good state stays."""
    await until(lambda: len(api.watches) == 1)
    assert isinstance(source, Watched)
    source._api.objects_max = len(THREE)
    await api.put("pods", "w-3", **pod("10.0.0.4"))
    await until(lambda: source.failures.get("too_large", 0) > 1)
    assert endpoints(source) == THREE
    source._api.objects_max += 1
    await until(lambda: endpoints(source) != THREE)


async def test_over_tls_with_a_mounted_ca_and_token_that_both_rotate(tmp_path: Path) -> None:
    """As a kubelet mounts them: files behind a link that is changed for all of them at once."""
    authorities = [Authority(tmp_path, name) for name in ("old", "new")]
    chains = [one.issue(f"api-{one.cert.stem}") for one in authorities]
    for one in authorities:
        volume = tmp_path / f"..{one.cert.stem}"
        volume.mkdir()
        (volume / "ca.crt").write_bytes(one.cert.read_bytes())
        (volume / "token").write_text(f"of-{one.cert.stem}")
    mount(tmp_path, "..old")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*chains[0])
    async with watching(tmp_path, tls=context) as (api, source):
        api.token = "of-old"
        await until(lambda: len(api.watches) == 1)
        assert endpoints(source) == THREE
        context.load_cert_chain(*chains[1])  # for those who connect from now on
        api.token = "of-new"
        await api.break_watches()
        await until(lambda: source.failures.get("connection", 0) >= 2)
        assert len(api.watches) == 1, "whom it does not trust it shows no token"
        assert endpoints(source) == THREE
        mount(tmp_path, "..new")
        await api.put("pods", "w-3", **pod("10.0.0.4"))
        await until(lambda: len(endpoints(source)) == 4)
        assert len(api.lists) == 2, "it goes on from where it was"
        assert api.requests[-1][2]["authorization"] == "Bearer of-new"


def mount(folder: Path, volume: str) -> None:
    """Have ca.crt and token be those of another volume."""
    link = folder / "..data.tmp"
    link.symlink_to(volume)
    os.replace(link, folder / "..data")
    for name in ("ca.crt", "token"):
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(f"..data/{name}")


@within(watching, "tmp_path")
async def test_what_makes_no_sense_is_set_aside(api: FakeKubernetes, source: Workers) -> None:
    await until(lambda: len(api.watches) == 1)
    await api.put("pods", "bad", **pod("10.0.0.9", block_size="many"))
    await api.put("pods", "big", **pod("10.0.0.8", worker_id=str(1 << 64)))
    await api.put("pods", "good", **pod("10.0.0.4"))
    await until(lambda: len(endpoints(source)) == 4)
    assert source.rejected.keys() == {"ns/bad", "ns/big"}
    await api.put("pods", "bad", **pod("10.0.0.9", block_size="16"))
    await until(lambda: len(endpoints(source)) == 5)
    assert source.rejected.keys() == {"ns/big"}


def slice_of(*addresses: str, port: int = 9092, **conditions: bool) -> dict[str, Any]:
    return {
        "addressType": "IPv4",
        "endpoints": [
            {"addresses": [a], "conditions": conditions, "targetRef": {"name": f"pod-{a}"}}
            for a in addresses
        ],
        "ports": [{"name": "replica-sync", "port": port}, {"name": "http", "port": 8092}],
    }


async def test_replicas_ready_or_not_and_never_oneself(tmp_path: Path) -> None:
    async with FakeKubernetes().serving() as api:
        await api.put("endpointslices", "r-1", **slice_of("10.2.0.1", "10.2.0.2", ready=False))
        await api.put("endpointslices", "r-2", **slice_of("10.2.0.4", terminating=True))
        source = watched_replicas(
            KubernetesApi(api.url, str(tmp_path), "ns"), "app=s", ["10.2.0.1"], 0.01
        )
        looking = asyncio.ensure_future(source.run())
        there = frozenset(("tcp://10.2.0.2:9092", "tcp://10.2.0.4:9092"))
        await until(lambda: source.latest == there)
        await until(lambda: bool(api.watches))
        await api.put("endpointslices", "r-3", **slice_of("fd00::1"))
        await until(lambda: source.latest is not None and len(source.latest) == 3)
        assert source.latest == there | {"tcp://[fd00::1]:9092"}
        # a dual-stack Service has a slice of each family for the same pods; we are one of them
        twice = {"r-4": ("10.2.0.5", "10.2.0.1"), "r-5": ("fd00::5", "fd00::9")}
        for name, addresses in twice.items():
            fields = slice_of(*addresses)
            for pod, endpoint in zip(("five", "own"), fields["endpoints"], strict=True):
                endpoint["targetRef"] = {"name": pod}
            await api.put("endpointslices", name, **fields)
        await until(lambda: source.updates >= 4)
        assert source.latest == there | {"tcp://[fd00::1]:9092", "tcp://10.2.0.5:9092"}
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


async def test_nobody_says_where_the_api_server_is(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    source = watched_workers(
        KubernetesApi(None, str(tmp_path)), "a=b", slices=False, backoff_s=0.01
    )
    looking = asyncio.ensure_future(source.run())
    await until(lambda: source.failures.get("unconfigured", 0) > 1)
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    assert KubernetesApi(None, str(tmp_path)).url == "https://[fd00::1]:6443"


@within(watching, "tmp_path")
async def test_credentials_that_cannot_be_used(
    api: FakeKubernetes, source: Workers, *, tmp_path: Path
) -> None:
    (tmp_path / "ca.crt").write_text("no certificate")
    await until(lambda: len(api.watches) == 1 or "credentials" in source.failures)
    await api.break_watches()
    await until(lambda: source.failures.get("credentials", 0) > 0)
    (tmp_path / "ca.crt").unlink()
    await until(lambda: endpoints(source) == THREE)
    await api.put("pods", "w-3", **pod("10.0.0.4"))
    await until(lambda: len(endpoints(source)) == 4)
