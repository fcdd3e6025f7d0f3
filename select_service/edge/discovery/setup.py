"""Builds the sources that the settings ask for, and how their objects are read."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

from select_service.edge.discovery.dns import DnsReplicas
from select_service.edge.discovery.followers import (
    Discovery,
    Follower,
    ReplicaFollower,
    WorkerCallbacks,
    WorkerFollower,
)
from select_service.edge.discovery.kubernetes import Watched
from select_service.edge.discovery.objects import (
    BadAnnotation,
    DiscoveredPod,
    EndpointSlice,
    Pod,
    WorkerIdClaims,
    replicas_of_slices,
    workers_of_pod,
    workers_of_slice,
)
from select_service.edge.discovery.source import BACKOFF_S
from select_service.edge.discovery.workers_file import WorkersFile
from select_service.kubernetes_api import KubernetesApi

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from select_service.edge.discovery.source import DiscoverySource
    from select_service.edge.driver.core_calls import CallContext
    from select_service.edge.driver.driver import Driver
    from select_service.settings import Settings
    from select_service.types import WorkerSpec

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

    def follow_workers(
        source: DiscoverySource[Workers], grace_s: float, *, lets_end: bool = False
    ) -> None:
        made = worker_follower(
            source, service, settings, turn=turn, grace_s=grace_s, lets_end=lets_end
        )
        followers.append(made)

    api = KubernetesApi(
        settings.kubernetes_api,
        settings.kubernetes_credentials,
        settings.kubernetes_namespace,
        objects_max=settings.discovery_objects_max,
        proxy_from_environment=settings.proxy_from_environment,
    )

    if settings.workers_file is not None:
        # A file is edited on purpose: workers removed from it leave as soon as they have nothing
        # to do and nothing of theirs could be lost by mistake.
        file = WorkersFile(
            settings.workers_file,
            settings.workers_file_poll_s,
            bytes_max=settings.workers_file_bytes_max,
        )
        follow_workers(file, 0.0, lets_end=True)
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


def worker_follower(
    source: DiscoverySource[Workers],
    service: Driver,
    settings: Settings,
    *,
    turn: CallContext | None = None,
    grace_s: float,
    lets_end: bool = False,
) -> WorkerFollower:
    """Return what makes a service agree with a source of workers.

    Args:
        source: names workers.
        service: registers them.
        settings: the limits.
        turn: replaces the service's.
        grace_s: how long the state of one that is no longer named stays.
        lets_end: whether one that is no longer named may have requests to end.
    """
    return WorkerFollower(
        source,
        service.turn if turn is None else turn,
        WorkerCallbacks(service.upsert_worker, service.delete_worker, service.hold_worker_back),
        link_of=service.sources.link,
        grace_s=grace_s,
        engine_grace_s=settings.discovery_engine_grace_s,
        lets_end=lets_end,
        workers_max=settings.discovery_workers_max,
    )


def _replica_sources(
    settings: Settings, api: KubernetesApi
) -> Iterable[DiscoverySource[frozenset[str]]]:
    own = [address for address in os.environ.get("POD_IP", "").split(",") if address]
    if settings.replica_sync_dns is not None:
        yield DnsReplicas(settings.replica_sync_dns, settings.discovery_poll_s, own)
    if settings.kubernetes_replicas is not None:
        yield watched_replicas(api, settings.kubernetes_replicas, own)


def watched_workers(
    api: KubernetesApi, selector: str, *, slices: bool, backoff_s: float = BACKOFF_S
) -> DiscoverySource[Workers]:
    """Return pods or EndpointSlices as a source of workers."""
    if slices:
        of_slices = _Reader(workers_of_slice)
        return Watched(
            "kubernetes", api, EndpointSlice, _SLICES, selector, of_slices.read, backoff_s
        )
    of_pods = _Reader(workers_of_pod)
    return Watched("kubernetes", api, Pod, _PODS, selector, of_pods.read, backoff_s)


def watched_replicas(
    api: KubernetesApi, selector: str, own: list[str], backoff_s: float = BACKOFF_S
) -> DiscoverySource[frozenset[str]]:
    """Return EndpointSlices as a source of replica endpoints."""
    return Watched(
        "kubernetes_replicas",
        api,
        EndpointSlice,
        _SLICES,
        selector,
        lambda _, found: replicas_of_slices(found, own),
        backoff_s,
    )


class _Reader(Generic[K]):
    """Reads objects as workers; an object is interpreted once, as all others stay the same."""

    def __init__(self, interpret: Callable[[K], Iterable[DiscoveredPod]]) -> None:
        self._interpret: Callable[[K], Iterable[DiscoveredPod]] = interpret
        self._claims = WorkerIdClaims()
        self._known: dict[
            str, tuple[K, list[DiscoveredPod], str]
        ] = {}  # by name; found, or what is wrong

    def read(self, source: DiscoverySource[Workers], objects: Iterable[K]) -> Workers:
        """Return the workers that may be chosen; report the others to the source.

        Invalid objects are rejected, the others stand.
        """
        before, self._known = self._known, {}
        found: list[DiscoveredPod] = []
        rejected: dict[str, str] = {}
        for one in objects:
            name = f"{one.metadata.namespace}/{one.metadata.name}"
            known = before.get(name)
            if known is None or known[0] is not one:
                known = self._interpreted(one)
            self._known[name] = known
            found += known[1]
            if known[2]:
                rejected[name] = known[2]
        settled = self._claims.settle(found)
        source.unready = {one.worker_id: one.unready for one in settled if one.unready is not None}
        source.shared = self._claims.shared
        source.reject(rejected | self._claims.refused)
        return {one.worker_id: one.spec for one in settled if one.spec is not None}

    def _interpreted(self, one: K) -> tuple[K, list[DiscoveredPod], str]:
        try:
            return one, list(self._interpret(one)), ""
        except BadAnnotation as error:
            return one, [], str(error)
