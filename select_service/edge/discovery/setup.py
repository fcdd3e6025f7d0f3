"""Builds the sources that the settings ask for, and how their objects are read."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from select_service.edge.discovery.dns import DnsReplicas
from select_service.edge.discovery.followers import (
    Discovery,
    Follower,
    ReplicaFollower,
    WorkerFollower,
)
from select_service.edge.discovery.kubernetes import KubernetesApi, Watched
from select_service.edge.discovery.objects import (
    BadAnnotation,
    EndpointSlice,
    Pod,
    replicas_of_slice,
    workers_of_pod,
    workers_of_slice,
)
from select_service.edge.discovery.source import BACKOFF_S
from select_service.edge.discovery.workers_file import WorkersFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from select_service.config import Settings
    from select_service.edge.discovery.source import Source
    from select_service.edge.driver import Driver
    from select_service.types import WorkerSpec

__all__ = ["create_discovery", "watched_replicas", "watched_workers"]

_log = logging.getLogger("select_service")
_PODS = "/api/v1/namespaces/{namespace}/pods"
_SLICES = "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"

Workers: TypeAlias = "dict[int, WorkerSpec]"
K = TypeVar("K", Pod, EndpointSlice)


def create_discovery(
    settings: Settings, service: Driver, clock: Callable[[], float] | None = None
) -> Discovery:
    """Build the configured sources; none is contacted before `start`.

    Args:
        settings: name the sources.
        service: follows them.
        clock: replaces the service's clock.
    """
    turn = service.turn if clock is None else service.turn._replace(clock=clock)
    followers: list[Follower] = []
    api = KubernetesApi(
        *(settings.kubernetes_api, settings.kubernetes_credentials),
        settings.kubernetes_namespace,
        objects_max=settings.discovery_objects_max,
    )

    def follow_workers(source: Source[Workers], grace_s: float) -> None:
        most = settings.discovery_workers_max
        verbs = service.upsert_worker, service.delete_worker
        followers.append(WorkerFollower(source, turn, *verbs, grace_s=grace_s, workers_max=most))

    if settings.workers_file is not None:
        # A file is edited on purpose: workers removed from it leave at once.
        file = WorkersFile(
            *(settings.workers_file, settings.workers_file_poll_s),
            bytes_max=settings.workers_file_bytes_max,
        )
        follow_workers(file, 0.0)
    if settings.kubernetes_workers is not None:
        found = watched_workers(
            api, settings.kubernetes_workers, slices=settings.kubernetes_workers_from != "pods"
        )
        follow_workers(found, settings.discovery_grace_s)
    for source in _replica_sources(settings, api):
        if settings.replica_sync_port is None:
            _log.error("replicas are not looked for by %s: no --replica-sync-port", source.name)
            continue
        plane, grace_s = service.replica_plane, settings.discovery_grace_s
        followers.append(ReplicaFollower(source, plane, turn.clock, grace_s=grace_s))
    return Discovery(service.readiness, followers)


def _replica_sources(settings: Settings, api: KubernetesApi) -> Iterable[Source[frozenset[str]]]:
    own = [address for address in os.environ.get("POD_IP", "").split(",") if address]
    if settings.replica_sync_dns is not None:
        yield DnsReplicas(settings.replica_sync_dns, settings.discovery_poll_s, own)
    if settings.kubernetes_replicas is not None:
        yield watched_replicas(api, settings.kubernetes_replicas, own)


def watched_workers(
    api: KubernetesApi, selector: str, *, slices: bool, backoff_s: float = BACKOFF_S
) -> Source[Workers]:
    """Return pods or EndpointSlices as a source of workers."""
    if slices:
        return Watched(
            *("kubernetes", api, EndpointSlice, _SLICES, selector),
            lambda source, found: _workers(source, found, workers_of_slice),
            backoff_s,
        )
    return Watched(
        *("kubernetes", api, Pod, _PODS, selector),
        lambda source, found: _workers(source, found, workers_of_pod),
        backoff_s,
    )


def watched_replicas(
    api: KubernetesApi, selector: str, own: list[str], backoff_s: float = BACKOFF_S
) -> Source[frozenset[str]]:
    """Return EndpointSlices as a source of replica endpoints."""
    return Watched(
        *("kubernetes_replicas", api, EndpointSlice, _SLICES, selector),
        lambda _, found: frozenset(e for piece in found for e in replicas_of_slice(piece, own)),
        backoff_s,
    )


def _workers(
    source: Source[Workers], found: Iterable[K], read: Callable[[K], Iterable[WorkerSpec]]
) -> Workers:
    """Read objects as workers; invalid ones are rejected, the others stand."""
    workers: Workers = {}
    rejected: dict[str, str] = {}
    for one in found:
        try:
            for spec in read(one):
                # Dual stack names every worker twice; the first slice by name wins.
                workers.setdefault(spec.worker_id, spec)
        except BadAnnotation as error:
            rejected[f"{one.metadata.namespace}/{one.metadata.name}"] = str(error)
    source.reject(rejected)
    return workers
