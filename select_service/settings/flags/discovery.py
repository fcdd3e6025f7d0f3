"""Where workers and replicas are found."""

from __future__ import annotations

from typing import Final

from select_service.settings.flags import values
from select_service.settings.flags.flag import Flag

DISCOVERY: Final = (
    Flag(
        "--workers-file",
        str,
        "PATH",
        "JSON list of workers (bodies of POST /workers) that is followed as it changes",
        watch="discovery_workers",
    ),
    Flag(
        "--workers-file-poll-s",
        values.seconds(zero=False),
        "S",
        "how often it is looked at",
        watch="discovery_updates_total",
    ),
    Flag(
        "--workers-file-bytes-max",
        values.whole(1, values.BYTES_MAX),
        "N",
        "longest file of workers; of a longer one nothing is taken, what was known stays",
        watch='discovery_failures_total{kind="too_large"}',
    ),
    Flag(
        "--kubernetes-workers",
        str,
        "SELECTOR",
        "register Kubernetes pods with these labels as workers, by their annotations",
        watch="discovery_workers",
    ),
    Flag(
        "--kubernetes-workers-from",
        values.choice("pods", "endpointslices"),
        "pods|endpointslices",
        "what the selector above selects",
    ),
    Flag(
        "--kubernetes-replicas",
        str,
        "SELECTOR",
        "listen to the replicas in EndpointSlices with these labels, on their port replica-sync",
        watch="replica_peers",
    ),
    Flag(
        "--kubernetes-namespace",
        str,
        "NAME",
        "where to look for both; without it the namespace of the service account",
    ),
    Flag(
        "--kubernetes-api",
        values.http_url,
        "URL",
        "the API server; without it KUBERNETES_SERVICE_HOST and _PORT say where",
    ),
    Flag(
        "--kubernetes-credentials",
        str,
        "DIR",
        "where token, ca.crt and namespace of the service account are mounted",
    ),
    Flag(
        "--replica-sync-dns",
        values.host_port,
        "HOST:PORT",
        "listen to a replica on each address of this name, a headless Service",
        watch="replica_peers",
    ),
    Flag(
        "--discovery-poll-s",
        values.seconds(zero=False),
        "S",
        "how often that name is resolved",
        watch="discovery_updates_total",
    ),
    Flag(
        "--discovery-grace-s",
        values.seconds(zero=True),
        "S",
        "the state of workers that a source no longer names, and replicas, are kept this long",
        watch="discovery_missed",
    ),
    Flag(
        "--discovery-engine-grace-s",
        values.seconds(zero=True),
        "S",
        "and the state of workers this long while the connection of their KV events is unbroken: "
        "the engine is the same",
        watch="discovery_missed",
    ),
    Flag(
        "--discovery-stale-s",
        values.seconds(zero=False),
        "S",
        "a source that could not be read for so long is a finding",
        watch="discovery_age_seconds",
    ),
    Flag(
        "--discovery-workers-max",
        values.whole(1, values.COUNT_MAX),
        "N",
        "workers taken from one source, the rest is left out",
        watch="discovery_rejected",
    ),
    Flag(
        "--discovery-objects-max",
        values.whole(1, values.COUNT_MAX),
        "N",
        "Kubernetes objects a selector may select; beyond, what was known stays",
        watch='discovery_failures_total{kind="too_large"}',
    ),
)
