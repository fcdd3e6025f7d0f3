"""Workers and replicas, what outlives the process, and what it says of itself."""

from typing import Annotated, Final

from indexer.limits import SnapshotLimits, StreamLimits
from select_service.settings.row import HITS
from select_service.settings.table.index import ReplicationSettings
from select_service.settings.value_types import (
    SAMPLERS,
    Durability,
    KubernetesKind,
    LogFormat,
    TracesTo,
    choice,
    count,
    host_port,
    http_url,
    member,
    number,
    seconds,
    size,
    switch,
    text,
    whole,
)
from select_service.types import CoreLimits, StateLimits
from select_service.types.doctor import DoctorLimits

_DOCTOR: Final = DoctorLimits()
_STREAMS: Final = StreamLimits()
_SNAPSHOTS: Final = SnapshotLimits()
_STATE: Final = StateLimits()
_CORE: Final = CoreLimits()


class DiscoverySettings(ReplicationSettings, frozen=True, kw_only=True):
    """Where workers and replicas are found."""

    workers_file: Annotated[
        str | None,
        text("PATH").static("discovery_workers"),
        "JSON list of workers (bodies of POST /workers) that is followed as it changes",
    ] = None
    workers_file_poll_s: Annotated[
        float, seconds().static("discovery_updates_total"), "how often that file is checked"
    ] = 1.0
    workers_file_bytes_max: Annotated[
        int,
        size().static('discovery_failures_total{kind="too_large"}'),
        "longest file of workers; a longer one is ignored, and what was known stays",
    ] = 16 << 20  # some 40,000 workers
    kubernetes_workers: Annotated[
        str | None,
        text("SELECTOR").static("discovery_workers"),
        "register Kubernetes pods with these labels as workers, by their annotations",
    ] = None
    kubernetes_workers_from: Annotated[
        KubernetesKind,
        choice("pods", "endpointslices"),
        "what the selector of --kubernetes-workers selects",
    ] = "pods"
    kubernetes_replicas: Annotated[
        str | None,
        text("SELECTOR").static("replica_peers"),
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
        host_port().static("replica_peers"),
        "listen to a replica on each address of this name, a headless Service",
    ] = None
    discovery_poll_s: Annotated[
        float, seconds().static("discovery_updates_total"), "how often that name is resolved"
    ] = 5.0
    discovery_grace_s: Annotated[
        float,
        seconds(zero=True).static("discovery_missed"),
        "the state of workers that a source no longer names, and replicas, are kept this long",
    ] = 10.0
    discovery_engine_grace_s: Annotated[
        float,
        seconds(zero=True).static("discovery_missed"),
        "the state of such workers is kept this long while the connection of their KV events is "
        "unbroken, which shows that the engine is the same",
    ] = 300.0
    discovery_stale_s: Annotated[
        float,
        seconds().static("discovery_age_seconds"),
        "a source that could not be read for this long is a finding of the doctor",
    ] = _DOCTOR.discovery_stale_s
    discovery_workers_max: Annotated[
        int,
        count().static("discovery_rejected"),
        "workers taken from one source; the rest is left out",
    ] = 10_000
    discovery_objects_max: Annotated[
        int,
        count().static('discovery_failures_total{kind="too_large"}'),
        "Kubernetes objects a selector may select; beyond, what was known stays",
    ] = 100_000


class DurabilitySettings(DiscoverySettings, frozen=True, kw_only=True):
    """What outlives the process: state, snapshots of the index, the recording."""

    state_dir: Annotated[
        str | None,
        text("DIR").common(),
        "keep workers, reservations, leases and the index here and bring them back; one "
        "process per directory",
    ] = None
    durability: Annotated[
        Durability,
        member(Durability),
        "with --state-dir: acknowledge a change once it is on disk, or at once",
    ] = Durability.STRICT
    durability_window_s: Annotated[
        float,
        seconds().static("state_window_waits_total"),
        "with relaxed durability: a crash loses at most the changes of this long; while the "
        "disk is further behind, answers wait",
    ] = 0.05
    state_stall_s: Annotated[
        float,
        seconds().static("state_stalls_total"),
        "a disk that has not finished a commit for this long counts as refusing, until it has",
    ] = _STATE.stall_s
    state_waiting_max: Annotated[
        int,
        count().static("state_waiting"),
        "answers that wait for the disk, also those of clients that are gone; beyond, "
        "changes are refused",
    ] = _STATE.waiting_max
    index_snapshot_interval_s: Annotated[
        float,
        seconds(zero=True).static("index_snapshot_written_timestamp_seconds"),
        "with --state-dir: write the index there this often and at the end; 0 = neither "
        "write nor read it",
    ] = _SNAPSHOTS.interval_s
    index_snapshot_bytes_max: Annotated[
        int,
        size().static('index_snapshot_left_out{reason="no_room"}'),
        "longest index snapshot; ranks beyond are left out",
    ] = _SNAPSHOTS.bytes_max
    index_snapshot_hold_s: Annotated[
        float,
        seconds().static('index_snapshot_left_out{reason="slow"}'),
        "longest time that a rank's events wait while its snapshot is taken; beyond, left out",
    ] = _SNAPSHOTS.hold_s
    index_snapshot_proof_s: Annotated[
        float,
        seconds().static('index_snapshot_recalled_ranks_total{outcome="unheard"}'),
        "a rank without a replay endpoint may stay silent this long after a restart, then "
        "its blocks of the snapshot are dropped",
    ] = _STREAMS.recall_wait_s
    index_snapshot_shutdown_s: Annotated[
        float,
        seconds().static("index_snapshot_written_timestamp_seconds"),
        "longest wait for the last index snapshot when the process ends",
    ] = _SNAPSHOTS.shutdown_s
    record: Annotated[
        str | None,
        text("FILE").static("recording_notes_total"),
        "write requests (hashes only), KV events, lifecycle calls and decisions here, for "
        "`select-sim replay`",
    ] = None
    record_bytes_max: Annotated[
        int,
        size(1 << 16).static("recording_files_total"),
        "with --record: compressed bytes of a file before the next one begins",
    ] = 64 << 20  # of a file: some hundred thousand decisions
    record_files_max: Annotated[
        int,
        whole(1, 100000).static("recording_files_total"),
        "with --record: files kept; the oldest is deleted",
    ] = 8
    record_queue_bytes_max: Annotated[
        int,
        size(1 << 16).static('recording_notes_total{outcome="queue"}'),
        "with --record: bytes that wait for the writer, roughly; more is left out of the recording",
    ] = 16 << 20  # a second of ten thousand decisions
    record_flush_s: Annotated[
        float,
        seconds().static("recording_queue_bytes"),
        "with --record: a crash loses at most this much time",
    ] = 1.0


class ObservabilitySettings(DurabilitySettings, frozen=True, kw_only=True):
    """What the service says of itself: decisions, findings, metrics, console, logs, traces."""

    decision_ring: Annotated[
        int, whole(0, 8192).static("decision_records"), "decisions kept for /decisions; 0 = none"
    ] = _CORE.decision_ring
    decision_ring_bytes: Annotated[
        int, size(0).static("decision_bytes"), "memory they may take together; 0 = none are kept"
    ] = _CORE.decision_ring_bytes
    doctor_interval_s: Annotated[
        float,
        seconds(zero=True).static("doctor_examinations_total"),
        "how often to check whether something is wired wrong; 0: only when asked",
    ] = _DOCTOR.interval_s
    doctor_samples_max: Annotated[
        int,
        count(0).static("doctor_examinations_total"),
        "prompts looked at between two examinations, the first ones; 0: none",
    ] = _DOCTOR.samples_max
    doctor_findings_max: Annotated[
        int,
        count().static(HITS),
        "findings listed by /ready?verbose=true, some of each kind; the metric counts all",
    ] = _DOCTOR.findings_max
    doctor_probe_workers: Annotated[
        bool,
        switch(),
        "send each new worker a few short prompts of made-up tokens, and say what its events show "
        "otherwise than expected; no other request ever goes from here to an engine's model",
    ] = _DOCTOR.probe_workers
    metrics_rank_series_max: Annotated[
        int,
        count(0).static("ranks_unlisted"),
        "ranks with series of their own in /metrics; the rest is only counted",
    ] = 512  # some 25 ms per scrape, in slices
    metrics_scope_series_max: Annotated[
        int,
        count(0).static("scopes_unlisted"),
        "scopes with series of their own in /metrics; the rest is summed up under `other`",
    ] = 64  # of some 30 series each
    console_clients_max: Annotated[
        int,
        count().static("console_clients"),
        "pages of the console that are kept up to date at a time",
    ] = 16  # each costs a socket and a few seconds of unread messages
    console_grafana_url: Annotated[
        str | None, http_url(), "your Grafana dashboard, linked from the console; off: no link"
    ] = None
    log_level: Annotated[
        str, choice("debug", "info", "warning", "error"), "least important record to log"
    ] = "info"
    log_format: Annotated[LogFormat, choice("json", "text"), "form of the log on stderr"] = "text"
    tracing: Annotated[
        TracesTo,
        choice("none", "otlp").static(env="OTEL_TRACES_EXPORTER"),
        "trace requests and export them by OTLP over HTTP; takes the extra otel",
    ] = "none"
    trace_sampler: Annotated[
        str,
        choice(*SAMPLERS, metavar="NAME").static(
            "traced_requests_total", env="OTEL_TRACES_SAMPLER"
        ),
        "which requests are traced, by OpenTelemetry's names",
    ] = "parentbased_traceidratio"
    trace_sample_ratio: Annotated[
        float,
        number(0.0, 1.0, metavar="SHARE").static(
            "traced_requests_total", env="OTEL_TRACES_SAMPLER_ARG", limit=False
        ),
        "share of requests without a parent span that are traced, where the sampler uses a ratio",
    ] = 1.0
    trace_queue_spans_max: Annotated[
        int,
        count().static('trace_spans_total{outcome="dropped"}', env="OTEL_BSP_MAX_QUEUE_SIZE"),
        "spans that wait to be exported; more are dropped",
    ] = 2048  # the defaults of OpenTelemetry's SDK
    trace_batch_spans_max: Annotated[
        int,
        count().static("trace_queue_spans", env="OTEL_BSP_MAX_EXPORT_BATCH_SIZE"),
        "spans exported at once",
    ] = 512
    trace_interval_ms: Annotated[
        int,
        count(metavar="MS").static("trace_queue_spans", env="OTEL_BSP_SCHEDULE_DELAY"),
        "how long spans wait to be exported together",
    ] = 5000
    trace_shutdown_s: Annotated[
        float,
        seconds(zero=True).static('trace_spans_total{outcome="dropped"}'),
        "how long exporting the last spans may take when the process ends",
    ] = 2.0
    no_console: Annotated[
        bool, switch(), "serve no console at /console, and no page of the API at /docs"
    ] = False
    access_log: Annotated[bool, switch(), "log every request"] = False
