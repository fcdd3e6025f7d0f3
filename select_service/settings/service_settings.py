"""All settings of the process, and the parts of them that each component gets.

The fields are the rows of `table`. A component's field has the name of its setting, or that name
without the component's prefix; the few exceptions are spelt out here.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from indexer.limits import (
    EgressSettings,
    RecoveryLimits,
    SnapshotLimits,
    StreamLimits,
)
from select_service.settings.environment import RouterSettings
from select_service.settings.table import ObservabilitySettings
from select_service.types import (
    BodyLimits,
    CoreLimits,
    DumpLimits,
    ReplicaLimits,
    RouterConfig,
    StateLimits,
    TrustSettings,
)
from select_service.types.admission import AdmissionSettings
from select_service.types.doctor import DoctorLimits
from select_service.types.router_config import PickerLimits
from select_service.types.shadow import ShadowSettings

Component = TypeVar("Component", bound=msgspec.Struct)


class Settings(ObservabilitySettings, frozen=True, kw_only=True):
    """All settings of the process: the last section, which inherits from all others."""

    router: RouterSettings = RouterSettings(RouterConfig(), None, ())

    @property
    def is_guarded(self) -> bool:
        """Whether there are tokens, certificates or keys."""
        credentials = (
            self.token_file,
            self.tls_cert,
            self.peer_token_file,
            self.peer_ca,
            self.curve_key,
            self.curve_worker_key,
        )
        return any(one is not None for one in credentials)

    @property
    def router_config(self) -> RouterConfig:
        """Weights and switches, from the environment and from flags."""
        return msgspec.structs.replace(self.router.config, **self._named(RouterConfig))

    @property
    def core_limits(self) -> CoreLimits:
        """Bounds of the core."""
        # The edge ends every pull; this covers one that would wait its turn forever.
        pull_timeout_s = 2 * self.replica_pull_timeout_s + self.replica_pull_backoff_max_s
        return self._of(CoreLimits, replica_pull_timeout_s=pull_timeout_s)

    @property
    def admission(self) -> AdmissionSettings:
        """Which requests are admitted."""
        return self._of(
            AdmissionSettings,
            mode=self.admission_control,
            overload_status=self.overload_status_code,
            max_inflight=self.max_inflight_default,
            max_queued=self.max_queued_default,
            cache_hit_threshold=self.global_cache_hit_threshold,
            policy=self.admission_policy,
            policy_config=dict(self.admission_config),
        )

    @property
    def egress(self) -> EgressSettings:
        """Where this process may connect."""
        return self._of(EgressSettings, "connect_", loopback=not self.connect_no_loopback)

    @property
    def doctor_limits(self) -> DoctorLimits:
        """How often the doctor examines, and how closely."""
        return self._of(DoctorLimits, "doctor_")

    @property
    def picker_limits(self) -> PickerLimits:
        """How much gateways may hold at the endpoint picker."""
        return self._of(PickerLimits, "epp_")

    @property
    def trust(self) -> TrustSettings:
        """When an index counts for less."""
        return self._of(
            TrustSettings,
            "trust_",
            weigh_freshness=not self.no_freshness_weighting,
            lag_grace_s=self.freshness_grace_s,
            lag_half_s=self.freshness_half_s,
            estimate_after_s=self.kv_estimate_after_s,
        )

    @property
    def shadow(self) -> ShadowSettings | None:
        """The shadow weights; None: there are none."""
        if not self.shadow_weights:
            return None
        return self._of(ShadowSettings, "shadow_", weights=dict(self.shadow_weights))

    @property
    def recovery_limits(self) -> RecoveryLimits:
        """Budgets of start-up recovery."""
        return self._of(RecoveryLimits, "recovery_")

    @property
    def snapshot_limits(self) -> SnapshotLimits | None:
        """Budgets of the index snapshot; None: there is none."""
        if not self.index_snapshot_interval_s:
            return None
        unclaimed_s = self.recovery_unclaimed_s
        return self._of(SnapshotLimits, "index_snapshot_", unclaimed_s=unclaimed_s)

    @property
    def stream_limits(self) -> StreamLimits:
        """Budgets of the KV-event streams."""
        return self._of(
            StreamLimits,
            "kv_",
            replay_deadline_s=self.replay_timeout_s,
            poll_after_s=self.kv_poll_interval_s,
            recall_wait_s=self.index_snapshot_proof_s,
        )

    @property
    def replica_limits(self) -> ReplicaLimits:
        """Bounds of the replica plane."""
        return self._of(ReplicaLimits, "replica_")

    @property
    def state_limits(self) -> StateLimits:
        """How long to wait for the state directory's disk, and how many answers may."""
        return self._of(StateLimits, "state_")

    @property
    def body_limits(self) -> BodyLimits:
        """How much a body may contain."""
        return self._of(BodyLimits, "body_", depth_max=self.json_depth_max)

    @property
    def dump_limits(self) -> DumpLimits:
        """Bounds of GET /dump."""
        return DumpLimits(at_once_max=self.dumps_max, timeout_s=self.dump_timeout_s)

    def _of(self, kind: type[Component], prefix: str = "", **otherwise: Any) -> Component:
        """Build a component's settings from ours by name; `otherwise` has those of other names.

        A field without a setting keeps its default: operators cannot change it.
        """
        return kind(**self._named(kind, prefix) | otherwise)

    def _named(self, kind: type[msgspec.Struct], prefix: str = "") -> dict[str, Any]:
        """Return our values for the fields of a component's settings that have our names."""
        return {
            name: getattr(self, setting)
            for name in kind.__struct_fields__
            for setting in (name, prefix + name)
            if setting in self.__struct_fields__
        }
