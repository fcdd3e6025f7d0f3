"""Where workers and replicas are found."""

from typing import Annotated, Final

from select_service.settings.table.replication import ReplicationSettings
from select_service.settings.value_types import (
    KubernetesKind,
    choice,
    count,
    host_port,
    http_url,
    seconds,
    size,
    text,
)
from select_service.types.doctor import DoctorLimits

_DOCTOR: Final = DoctorLimits()


class DiscoverySettings(ReplicationSettings, frozen=True, kw_only=True):
    """Where workers and replicas are found."""

    workers_file: Annotated[
        str | None,
        text("PATH").watched("discovery_workers"),
        "JSON list of workers (bodies of POST /workers) that is followed as it changes",
    ] = None
    workers_file_poll_s: Annotated[
        float, seconds().watched("discovery_updates_total"), "how often that file is checked"
    ] = 1.0
    workers_file_bytes_max: Annotated[
        int,
        size().watched('discovery_failures_total{kind="too_large"}'),
        "longest file of workers; a longer one is ignored, and what was known stays",
    ] = 16 << 20  # some 40,000 workers
    kubernetes_workers: Annotated[
        str | None,
        text("SELECTOR").watched("discovery_workers"),
        "register Kubernetes pods with these labels as workers, by their annotations",
    ] = None
    kubernetes_workers_from: Annotated[
        KubernetesKind,
        choice("pods", "endpointslices"),
        "what the selector of --kubernetes-workers selects",
    ] = "pods"
    kubernetes_replicas: Annotated[
        str | None,
        text("SELECTOR").watched("replica_peers"),
        "listen to the replicas in EndpointSlices with these labels, on their port replica-sync",
    ] = None
    kubernetes_namespace: Annotated[
        str | None,
        text("NAME"),
        "where to look for both; without it the namespace of the service account",
    ] = None
    kubernetes_api: Annotated[
        str | None,
        http_url(),
        "the API server; without it KUBERNETES_SERVICE_HOST and _PORT say where",
    ] = None
    kubernetes_credentials: Annotated[
        str, text("DIR"), "where token, ca.crt and namespace of the service account are mounted"
    ] = "/var/run/secrets/kubernetes.io/serviceaccount"
    replica_sync_dns: Annotated[
        str | None,
        host_port().watched("replica_peers"),
        "listen to a replica on each address of this name, a headless Service",
    ] = None
    discovery_poll_s: Annotated[
        float, seconds().watched("discovery_updates_total"), "how often that name is resolved"
    ] = 5.0
    discovery_grace_s: Annotated[
        float,
        seconds(zero=True).watched("discovery_missed"),
        "the state of workers that a source no longer names, and replicas, are kept this long",
    ] = 10.0
    discovery_engine_grace_s: Annotated[
        float,
        seconds(zero=True).watched("discovery_missed"),
        "the state of such workers is kept this long while the connection of their KV events is "
        "unbroken, which shows that the engine is the same",
    ] = 300.0
    discovery_stale_s: Annotated[
        float,
        seconds().watched("discovery_age_seconds"),
        "a source that could not be read for this long is a finding of the doctor",
    ] = _DOCTOR.discovery_stale_s
    discovery_workers_max: Annotated[
        int,
        count().watched("discovery_rejected"),
        "workers taken from one source; the rest is left out",
    ] = 10_000
    discovery_objects_max: Annotated[
        int,
        count().watched('discovery_failures_total{kind="too_large"}'),
        "Kubernetes objects a selector may select; beyond, what was known stays",
    ] = 100_000
