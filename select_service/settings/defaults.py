"""All settings with their defaults, as the process gets them at its start.

The flags take their defaults from here. `settings.py` derives what each part of the service gets.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, Final, Literal

from msgspec import Struct

from indexer.settings import (
    EgressSettings,
    EventLossPolicy,
    RecoveryLimits,
    SnapshotLimits,
    StreamLimits,
)
from select_service.settings.environment import RouterSettings
from select_service.types import (
    BodyLimits,
    CacheBasis,
    CacheScope,
    CoreLimits,
    DumpLimits,
    ReplicaLimits,
    RouterConfig,
    StateLimits,
    TrustSettings,
)
from select_service.types.admission import AdmissionSettings, Mode, StaleReports
from select_service.types.doctor import DoctorLimits
from select_service.types.policy import Policy
from select_service.types.shadow import ShadowSettings, Weight

__all__ = ["SAMPLERS", "Defaults", "Durability", "FieldValidation", "LogFormat"]

LogFormat = Literal["json", "text"]
TracesTo = Literal["none", "otlp"]
KubernetesKind = Literal["pods", "endpointslices"]
SAMPLERS: Final = (
    "always_on",
    "always_off",
    "traceidratio",
    "parentbased_always_on",
    "parentbased_always_off",
    "parentbased_traceidratio",
)
"""The samplers, by OpenTelemetry's names."""

_CORE: Final = CoreLimits()
_ADMISSION: Final = AdmissionSettings()
_STREAMS: Final = StreamLimits()
_SNAPSHOTS: Final = SnapshotLimits()
_REPLICAS: Final = ReplicaLimits()
_STATE: Final = StateLimits()
_RECOVERY: Final = RecoveryLimits()
_REACH: Final = EgressSettings()
_BODIES: Final = BodyLimits()
_DUMPS: Final = DumpLimits()
_DOCTOR: Final = DoctorLimits()
_TRUST: Final = TrustSettings()
_SHADOW: Final = ShadowSettings()
_UNSET: Final = RouterSettings(RouterConfig(), None, ())


class Durability(Enum):
    """When a change may be acknowledged."""

    STRICT = "strict"  # once it is on disk
    RELAXED = "relaxed"  # at once; on disk within --durability-window-s


class FieldValidation(Enum):
    """What happens to an unknown top-level field."""

    STRICT = "strict"  # 422
    WARN = "warn"  # accepted, with a Warning header
    IGNORE = "ignore"


class Defaults(Struct, frozen=True, kw_only=True):
    """The fields of `Settings`."""

    # The contract's default; an open process warns of it, and the README says how to restrict it.
    host: str = "0.0.0.0"  # noqa: S104  # nosec B104
    port: int | None = 8092  # None: no TCP
    uds: str | None = None
    uds_mode: str = "0660"  # connecting takes write permission on the file
    side_port: int | None = None  # entrance for replicas, probes and Prometheus only
    side_host: str | None = None  # None: that of `host`, or every address if that is loopback
    token_file: str | None = None
    token_file_bytes_max: int = 4 << 20  # some 20,000 records
    token_chars_max: int = 512  # ours have 47; an identity provider's may be longer
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    peer_token_file: str | None = None
    peer_ca: str | None = None
    curve_key: str | None = None
    curve_replica_keys: str | None = None
    curve_worker_key: str | None = None
    threads: int = 4
    field_validation: FieldValidation = FieldValidation.WARN
    on_event_loss: EventLossPolicy = EventLossPolicy.KEEP
    replica_sync_port: int | None = None
    replica_sync_peers: tuple[str, ...] = ()
    advertise_url: str | None = None
    replica_heartbeat_s: float = _CORE.replica_heartbeat_s
    replica_output_interval_s: float = _CORE.replica_output_interval_s
    replica_timeout_s: float = _CORE.replica_timeout_s
    replica_pull_retry_s: float = _CORE.replica_pull_retry_s
    replica_gap_grace_s: float = _CORE.replica_gap_grace_s
    replica_claims_max: int = _CORE.replica_claims_max
    replica_ended_max: int = _CORE.replica_ended_max
    replica_missing_max: int = _CORE.replica_missing_max
    replica_orphan_ttl_s: float = _CORE.replica_orphan_ttl_s
    replica_ended_s: float = _CORE.replica_ended_s
    replica_publishers_max: int = _CORE.replica_publishers_max
    replica_peers_max: int = _REPLICAS.peers_max
    replica_message_bytes_max: int = _REPLICAS.message_bytes_max
    replica_receive_messages_max: int = _REPLICAS.receive_messages_max
    replica_send_messages_max: int = _REPLICAS.send_messages_max
    replica_pulls_max: int = _REPLICAS.pulls_max
    replica_pull_timeout_s: float = _REPLICAS.pull_timeout_s
    replica_pull_bytes_max: int = _REPLICAS.pull_bytes_max
    replica_pull_backoff_s: float = _REPLICAS.pull_backoff_s
    replica_pull_backoff_max_s: float = _REPLICAS.pull_backoff_max_s
    replica_snapshots_max: int = _REPLICAS.snapshots_max
    dumps_max: int = _DUMPS.at_once_max
    dump_timeout_s: float = _DUMPS.timeout_s
    indexer_peers: tuple[str, ...] = ()
    recovery_attempts_max: int = _RECOVERY.attempts_max
    recovery_backoff_s: float = _RECOVERY.backoff_s
    recovery_silence_s: float = _RECOVERY.silence_s
    recovery_timeout_s: float = _RECOVERY.timeout_s
    recovery_bytes_max: int = _RECOVERY.bytes_max
    recovery_hold_s: float = 10.0  # start-up probes are more patient than that
    recovery_unclaimed_s: float = _CORE.recovery_unclaimed_s
    ready_timeout_s: float = 120.0
    workers_file: str | None = None
    workers_file_poll_s: float = 1.0
    workers_file_bytes_max: int = 16 << 20  # some 40,000 workers
    kubernetes_workers: str | None = None
    kubernetes_workers_from: KubernetesKind = "pods"
    kubernetes_replicas: str | None = None
    kubernetes_namespace: str | None = None
    kubernetes_api: str | None = None
    kubernetes_credentials: str = "/var/run/secrets/kubernetes.io/serviceaccount"
    replica_sync_dns: str | None = None
    discovery_poll_s: float = 5.0
    discovery_grace_s: float = 10.0
    discovery_engine_grace_s: float = 300.0
    discovery_stale_s: float = _DOCTOR.discovery_stale_s
    discovery_workers_max: int = 10_000
    discovery_objects_max: int = 100_000
    state_dir: str | None = None
    durability: Durability = Durability.STRICT
    durability_window_s: float = 0.05
    state_stall_s: float = _STATE.stall_s
    state_waiting_max: int = _STATE.waiting_max
    index_snapshot_interval_s: float = _SNAPSHOTS.interval_s
    index_snapshot_bytes_max: int = _SNAPSHOTS.bytes_max
    index_snapshot_hold_s: float = _SNAPSHOTS.hold_s
    index_snapshot_proof_s: float = _STREAMS.recall_wait_s
    index_snapshot_shutdown_s: float = _SNAPSHOTS.shutdown_s
    record: str | None = None
    record_bytes_max: int = 64 << 20  # of a file: some hundred thousand decisions
    record_files_max: int = 8
    record_queue_bytes_max: int = 16 << 20  # a second of ten thousand decisions
    record_flush_s: float = 1.0
    reservation_ttl_s: float = _CORE.reservation_ttl_s
    reservation_ttl_max_s: float = _CORE.reservation_ttl_max_s
    freed_ids_max: int = _CORE.freed_ids_max
    tenant_share: float = _CORE.tenant_share
    leases_max: int = _CORE.leases_max
    lease_copies_max: int = _CORE.lease_copies_max
    ended_leases_max: int = _CORE.ended_leases_max
    lease_reopen_s: float = _CORE.lease_reopen_s
    lease_ttl_min_s: float = _CORE.lease_ttl_min_s
    lease_ttl_max_s: float = _CORE.lease_ttl_max_s
    lease_name_length_max: int = _CORE.lease_name_length_max
    batch_operations_max: int = _CORE.batch_operations_max
    wave_samples_max: int = _CORE.wave_samples_max
    session_ttl_s: float = _CORE.session_ttl_s
    sessions_max: int = _CORE.sessions_max
    data_parallel_size_max: int = _CORE.data_parallel_size_max
    workers_max: int = _CORE.workers_max
    worker_bytes_max: int = _CORE.worker_bytes_max
    scopes_max: int = _CORE.scopes_max
    unserved_scopes_max: int = _CORE.unserved_scopes_max
    event_sources_max: int = _CORE.event_sources_max
    scope_linger_s: float = _CORE.scope_linger_s
    reservations_max: int = _CORE.reservations_max
    blocks_per_request_max: int = _CORE.blocks_per_request_max
    id_length_max: int = _CORE.id_length_max
    name_length_max: int = _CORE.name_length_max
    queue_recheck_s: float = _CORE.queue_recheck_s
    decision_ring: int = _CORE.decision_ring
    decision_ring_bytes: int = _CORE.decision_ring_bytes
    kv_poll_interval_s: float = _STREAMS.poll_after_s
    replay_timeout_s: float = _STREAMS.replay_deadline_s
    replay_silence_s: float = _STREAMS.replay_silence_s
    replay_attempts_max: int = _STREAMS.replay_attempts_max
    replay_backoff_s: float = _STREAMS.replay_backoff_s
    replay_backoff_max_s: float = _STREAMS.replay_backoff_max_s
    replay_replies_max: int = _STREAMS.replay_replies_max
    replay_bytes_max: int = _STREAMS.replay_bytes_max
    kv_rebuild_bytes_max: int = _STREAMS.rebuild_bytes_max
    replay_useless_max: int = _STREAMS.replay_useless_max
    kv_polls_max: int = _STREAMS.polls_max
    kv_orphan_blocks_max: int = _STREAMS.orphan_blocks_max
    kv_source_blocks_max: int = _STREAMS.source_blocks_max
    index_bytes_max: int = _STREAMS.index_bytes_max
    kv_blocks_per_turn: int = _STREAMS.blocks_per_turn
    kv_messages_per_turn: int = _STREAMS.messages_per_turn
    kv_backlog_batches_max: int = _STREAMS.backlog_batches_max
    kv_backlog_bytes_max: int = _STREAMS.backlog_bytes_max
    kv_message_bytes_max: int = _STREAMS.message_bytes_max
    kv_receive_messages_max: int = _STREAMS.receive_messages_max
    admission_control: Mode = _ADMISSION.mode
    active_decode_blocks_threshold: float | None = None
    active_prefill_tokens_threshold: int | None = None
    active_prefill_tokens_threshold_frac: float | None = None
    overload_status_code: int = _ADMISSION.overload_status
    max_inflight_default: int | None = None
    max_queued_default: int = _ADMISSION.max_queued
    queue_deadline_s: float | None = None
    global_cache_hit_threshold: float = _ADMISSION.cache_hit_threshold
    cache_hit_scope: CacheScope = _ADMISSION.cache_hit_scope
    cache_hit_basis: CacheBasis = _ADMISSION.cache_hit_basis
    cache_hit_attempts_max: int = _ADMISSION.cache_hit_attempts_max
    admission_policy: str = _ADMISSION.policy
    admission_config: Mapping[str, Any] = {}
    slo_class_max: str | None = None
    slo_target_ttft_s: float = _ADMISSION.slo_target_ttft_s
    prefill_tokens_per_s: float = _ADMISSION.prefill_tokens_per_s
    return_horizon_s: float = _ADMISSION.return_horizon_s
    return_slots_max: int = _ADMISSION.return_slots_max
    tenant_labels_max: int = _ADMISSION.tenant_labels_max
    load_report_stale_s: float = _ADMISSION.load_report_stale_s
    load_report_stale_as: StaleReports = _ADMISSION.load_report_stale_as
    load_report_bytes_max: int = _ADMISSION.load_report_bytes_max
    doctor_interval_s: float = _DOCTOR.interval_s
    doctor_samples_max: int = _DOCTOR.samples_max
    doctor_findings_max: int = _DOCTOR.findings_max
    trust_samples: int = _TRUST.samples
    trust_error_max: float = _TRUST.error_max
    trust_error_clear: float = _TRUST.error_clear
    trust_reread_s: float = _TRUST.reread_s
    trust_reread_max_s: float = _TRUST.reread_max_s
    trust_rereads_max: int = _TRUST.rereads_max
    no_freshness_weighting: bool = not _TRUST.weigh_freshness
    freshness_grace_s: float = _TRUST.lag_grace_s
    freshness_half_s: float = _TRUST.lag_half_s
    shadow_weights: Mapping[str, Weight] = {}
    shadow_sample: float = _SHADOW.sample
    shadow_cost_max: float = _SHADOW.cost_max
    max_body_bytes: int = 8 * 1024 * 1024
    head_bytes_max: int = 64 * 1024  # several times what common proxies allow
    header_lines_max: int = 128  # each costs forty times its bytes; proxies allow some 100
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    keep_alive_timeout_s: int = 75
    connections_max: int = 8192
    connections_per_address_max: int = 4096  # half: a gateway is one address
    descriptors_kept: int = _STREAMS.descriptors_kept
    unread_bytes_max: int = 256 << 20  # a /metrics of 512 ranks and 64 scopes takes half a megabyte
    tls_handshakes_max: int = 8192  # 60 KB each
    json_depth_max: int = _BODIES.depth_max
    body_parts_max: int = _BODIES.parts_max
    body_numbers_max: int = _BODIES.numbers_max
    body_short_bytes_max: int = _BODIES.short_bytes_max
    body_unknown_bytes_max: int = _BODIES.unknown_bytes_max
    body_media_bytes_max: int = _BODIES.media_bytes_max
    listen_backlog: int = 2048
    leave_notice_s: float = 0.0
    leave_grace_s: float = 0.0
    shutdown_timeout_s: int = 5
    metrics_rank_series_max: int = 512  # some 25 ms per scrape, in slices
    metrics_scope_series_max: int = 64  # of some 30 series each
    connect_schemes: tuple[str, ...] = _REACH.schemes
    connect_allow: tuple[str, ...] = _REACH.allow
    connect_deny: tuple[str, ...] = _REACH.deny
    connect_no_loopback: bool = not _REACH.loopback
    connect_lookup_timeout_s: float = _REACH.lookup_timeout_s
    connect_lookup_cache_s: float = _REACH.lookup_cache_s
    connect_lookups_max: int = _REACH.lookups_max
    config: str | None = None
    no_console: bool = False
    console_clients_max: int = 16  # each costs a socket and a few seconds of unread messages
    log_format: LogFormat = "text"
    log_level: str = "info"
    access_log: bool = False
    tracing: TracesTo = "none"
    trace_sampler: str = "parentbased_traceidratio"
    trace_sample_ratio: float = 1.0
    trace_queue_spans_max: int = 2048  # the defaults of OpenTelemetry's SDK
    trace_batch_spans_max: int = 512
    trace_interval_ms: int = 5000
    trace_shutdown_s: float = 2.0
    policy: Policy = _UNSET.config.policy
    decode_load_scale: float | None = None
    delay_scale: float | None = None
    eviction_scale: float | None = None
    expects_booked: bool | None = None
    context_load_scale: float | None = None
    pace_scale: float | None = None
    overtaking_s: float | None = None
    overtaking_share: float | None = None
    kv_transfer_cost_per_block: float = _UNSET.config.kv_transfer_cost_per_block
    router: RouterSettings = _UNSET
