"""Everything the process is told at its start, and what each room of it is handed.

The fields are those of `defaults.py`; a setting and the limit it becomes may have other names.
"""

from __future__ import annotations

import msgspec

from indexer.config import (
    ReachSettings,
    RecoveryLimits,
    SnapshotLimits,
    StreamLimits,
)
from select_service.admission_types import AdmissionSettings
from select_service.config.defaults import Defaults
from select_service.doctor_types import DoctorLimits
from select_service.shadow_types import ShadowSettings
from select_service.types import (
    BodyLimits,
    CoreLimits,
    DumpLimits,
    ReplicaLimits,
    RouterConfig,
    TrustSettings,
)

__all__ = ["Settings"]


class Settings(Defaults, frozen=True, kw_only=True):
    """Everything the process is told at its start; the defaults are those of the flags."""

    @property
    def is_guarded(self) -> bool:
        """Whether there are tokens, certificates or keys."""
        asked_for = (
            *(self.token_file, self.tls_cert, self.peer_token_file, self.peer_ca),
            *(self.curve_key, self.curve_worker_key),
        )
        return any(one is not None for one in asked_for)

    @property
    def router_config(self) -> RouterConfig:
        """Weights and switches: the environment's, and the flags'."""
        return msgspec.structs.replace(
            self.router.config,
            policy=self.policy,
            decode_load_scale=self.decode_load_scale,
            delay_scale=self.delay_scale,
            eviction_scale=self.eviction_scale,
            expects_booked=self.expects_booked,
            context_load_scale=self.context_load_scale,
            pace_scale=self.pace_scale,
            overtaking_s=self.overtaking_s,
            overtaking_share=self.overtaking_share,
            kv_transfer_cost_per_block=self.kv_transfer_cost_per_block,
        )

    @property
    def core_limits(self) -> CoreLimits:
        """Bounds of the core."""
        return CoreLimits(
            reservation_ttl_s=self.reservation_ttl_s,
            reservation_ttl_max_s=self.reservation_ttl_max_s,
            freed_ids_max=self.freed_ids_max,
            leases_max=self.leases_max,
            lease_copies_max=self.lease_copies_max,
            ended_leases_max=self.ended_leases_max,
            lease_reopen_s=self.lease_reopen_s,
            lease_ttl_min_s=self.lease_ttl_min_s,
            lease_ttl_max_s=self.lease_ttl_max_s,
            lease_name_length_max=self.lease_name_length_max,
            batch_operations_max=self.batch_operations_max,
            wave_samples_max=self.wave_samples_max,
            session_ttl_s=self.session_ttl_s,
            sessions_max=self.sessions_max,
            data_parallel_size_max=self.data_parallel_size_max,
            workers_max=self.workers_max,
            worker_bytes_max=self.worker_bytes_max,
            scopes_max=self.scopes_max,
            scope_linger_s=self.scope_linger_s,
            reservations_max=self.reservations_max,
            blocks_per_request_max=self.blocks_per_request_max,
            id_length_max=self.id_length_max,
            name_length_max=self.name_length_max,
            queue_recheck_s=self.queue_recheck_s,
            recovery_unclaimed_s=self.recovery_unclaimed_s,
            decision_ring=self.decision_ring,
            decision_ring_bytes=self.decision_ring_bytes,
            replica_heartbeat_s=self.replica_heartbeat_s,
            replica_output_interval_s=self.replica_output_interval_s,
            replica_timeout_s=self.replica_timeout_s,
            replica_pull_retry_s=self.replica_pull_retry_s,
            replica_gap_grace_s=self.replica_gap_grace_s,
            replica_claims_max=self.replica_claims_max,
            replica_ended_max=self.replica_ended_max,
            replica_missing_max=self.replica_missing_max,
            replica_orphan_ttl_s=self.replica_orphan_ttl_s,
            replica_ended_s=self.replica_ended_s,
            replica_publishers_max=self.replica_publishers_max,
            # the edge ends every pull; this is for one that waits its turn for ever
            replica_pull_timeout_s=2 * self.replica_pull_timeout_s
            + self.replica_pull_backoff_max_s,
        )

    @property
    def admission(self) -> AdmissionSettings:
        """Who is let in at all."""
        return AdmissionSettings(
            mode=self.admission_control,
            active_decode_blocks_threshold=self.active_decode_blocks_threshold,
            active_prefill_tokens_threshold=self.active_prefill_tokens_threshold,
            active_prefill_tokens_threshold_frac=self.active_prefill_tokens_threshold_frac,
            overload_status=self.overload_status_code,
            max_inflight=self.max_inflight_default,
            max_queued=self.max_queued_default,
            queue_deadline_s=self.queue_deadline_s,
            cache_hit_threshold=self.global_cache_hit_threshold,
            cache_hit_scope=self.cache_hit_scope,
            cache_hit_basis=self.cache_hit_basis,
            cache_hit_attempts_max=self.cache_hit_attempts_max,
            policy=self.admission_policy,
            policy_config=dict(self.admission_config),
            slo_class_max=self.slo_class_max,
            slo_target_ttft_s=self.slo_target_ttft_s,
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            return_horizon_s=self.return_horizon_s,
            return_slots_max=self.return_slots_max,
            tenant_labels_max=self.tenant_labels_max,
            load_report_stale_s=self.load_report_stale_s,
            load_report_bytes_max=self.load_report_bytes_max,
        )

    @property
    def reach(self) -> ReachSettings:
        """Where this process may connect to."""
        return ReachSettings(
            schemes=self.connect_schemes,
            allow=self.connect_allow,
            deny=self.connect_deny,
            loopback=not self.connect_no_loopback,
            lookup_timeout_s=self.connect_lookup_timeout_s,
            lookup_cache_s=self.connect_lookup_cache_s,
            lookups_max=self.connect_lookups_max,
        )

    @property
    def doctor_limits(self) -> DoctorLimits:
        """How often the doctor looks, and how closely."""
        return DoctorLimits(
            interval_s=self.doctor_interval_s,
            samples_max=self.doctor_samples_max,
            findings_max=self.doctor_findings_max,
        )

    @property
    def trust(self) -> TrustSettings:
        """When what an index says counts for less."""
        return TrustSettings(
            samples=self.trust_samples,
            error_max=self.trust_error_max,
            error_clear=self.trust_error_clear,
            reread_s=self.trust_reread_s,
            reread_max_s=self.trust_reread_max_s,
            rereads_max=self.trust_rereads_max,
            weigh_freshness=not self.no_freshness_weighting,
            lag_grace_s=self.freshness_grace_s,
            lag_half_s=self.freshness_half_s,
        )

    @property
    def shadow(self) -> ShadowSettings | None:
        """Weights that look on; None: there are none."""
        if not self.shadow_weights:
            return None
        return ShadowSettings(
            weights=dict(self.shadow_weights),
            sample=self.shadow_sample,
            cost_max=self.shadow_cost_max,
        )

    @property
    def recovery_limits(self) -> RecoveryLimits:
        """Budgets of start-up recovery."""
        return RecoveryLimits(
            attempts_max=self.recovery_attempts_max,
            backoff_s=self.recovery_backoff_s,
            silence_s=self.recovery_silence_s,
            timeout_s=self.recovery_timeout_s,
            bytes_max=self.recovery_bytes_max,
        )

    @property
    def snapshot_limits(self) -> SnapshotLimits | None:
        """Budgets of the index snapshot; None: there is none."""
        if not self.index_snapshot_interval_s:
            return None
        return SnapshotLimits(
            interval_s=self.index_snapshot_interval_s,
            bytes_max=self.index_snapshot_bytes_max,
            hold_s=self.index_snapshot_hold_s,
            shutdown_s=self.index_snapshot_shutdown_s,
            unclaimed_s=self.recovery_unclaimed_s,
        )

    @property
    def stream_limits(self) -> StreamLimits:
        """Budgets of the KV-event streams."""
        return StreamLimits(
            poll_after_s=self.kv_poll_interval_s,
            replay_deadline_s=self.replay_timeout_s,
            replay_silence_s=self.replay_silence_s,
            replay_attempts_max=self.replay_attempts_max,
            replay_backoff_s=self.replay_backoff_s,
            replay_backoff_max_s=self.replay_backoff_max_s,
            replay_replies_max=self.replay_replies_max,
            replay_bytes_max=self.replay_bytes_max,
            replay_useless_max=self.replay_useless_max,
            polls_max=self.kv_polls_max,
            recall_wait_s=self.index_snapshot_proof_s,
            orphan_blocks_max=self.kv_orphan_blocks_max,
            source_blocks_max=self.kv_source_blocks_max,
            index_bytes_max=self.index_bytes_max,
            blocks_per_turn=self.kv_blocks_per_turn,
            messages_per_turn=self.kv_messages_per_turn,
            backlog_batches_max=self.kv_backlog_batches_max,
            backlog_bytes_max=self.kv_backlog_bytes_max,
            message_bytes_max=self.kv_message_bytes_max,
            receive_messages_max=self.kv_receive_messages_max,
        )

    @property
    def replica_limits(self) -> ReplicaLimits:
        """Bounds of the replica plane."""
        return ReplicaLimits(
            peers_max=self.replica_peers_max,
            message_bytes_max=self.replica_message_bytes_max,
            receive_messages_max=self.replica_receive_messages_max,
            send_messages_max=self.replica_send_messages_max,
            pulls_max=self.replica_pulls_max,
            pull_timeout_s=self.replica_pull_timeout_s,
            pull_bytes_max=self.replica_pull_bytes_max,
            pull_backoff_s=self.replica_pull_backoff_s,
            pull_backoff_max_s=self.replica_pull_backoff_max_s,
            snapshots_max=self.replica_snapshots_max,
        )

    @property
    def body_limits(self) -> BodyLimits:
        """How much a body may hold."""
        return BodyLimits(
            depth_max=self.json_depth_max,
            parts_max=self.body_parts_max,
            numbers_max=self.body_numbers_max,
            short_bytes_max=self.body_short_bytes_max,
            unknown_bytes_max=self.body_unknown_bytes_max,
            media_bytes_max=self.body_media_bytes_max,
        )

    @property
    def dump_limits(self) -> DumpLimits:
        """Bounds of GET /dump."""
        return DumpLimits(at_once_max=self.dumps_max, timeout_s=self.dump_timeout_s)
