"""Everything the process is told at its start.

The defaults here are the defaults of the flags: `flags.py` reads them from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal

from indexer.config import EventLossPolicy, StreamLimits
from select_service.config.environment import RouterSettings
from select_service.types import CoreLimits, RouterConfig

__all__ = ["FieldValidation", "LogFormat", "Settings"]

LogFormat = Literal["json", "text"]
_CORE: Final = CoreLimits()
_STREAMS: Final = StreamLimits()
_UNSET: Final = RouterSettings(RouterConfig(), None, ())


class FieldValidation(Enum):
    """What happens to a top-level field nobody knows (D2)."""

    STRICT = "strict"  # 422
    WARN = "warn"  # accepted, with a Warning header
    IGNORE = "ignore"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything the process is told at its start; the defaults are those of the flags."""

    host: str = "0.0.0.0"  # noqa: S104 - the contract's default; the README says how to narrow it
    port: int = 8092
    threads: int = 4
    field_validation: FieldValidation = FieldValidation.WARN
    on_event_loss: EventLossPolicy = EventLossPolicy.KEEP
    replica_sync_port: int | None = None
    reservation_ttl_s: float = _CORE.reservation_ttl_s
    freed_ids_max: int = _CORE.freed_ids_max
    data_parallel_size_max: int = _CORE.data_parallel_size_max
    queue_recheck_s: float = _CORE.queue_recheck_s
    kv_poll_interval_s: float = _STREAMS.poll_after_s
    replay_timeout_s: float = _STREAMS.replay_deadline_s
    replay_silence_s: float = _STREAMS.replay_silence_s
    replay_attempts_max: int = _STREAMS.replay_attempts_max
    replay_backoff_s: float = _STREAMS.replay_backoff_s
    replay_backoff_max_s: float = _STREAMS.replay_backoff_max_s
    replay_replies_max: int = _STREAMS.replay_replies_max
    replay_bytes_max: int = _STREAMS.replay_bytes_max
    replay_useless_max: int = _STREAMS.replay_useless_max
    kv_polls_max: int = _STREAMS.polls_max
    kv_orphan_blocks_max: int = _STREAMS.orphan_blocks_max
    kv_backlog_batches_max: int = _STREAMS.backlog_batches_max
    kv_backlog_bytes_max: int = _STREAMS.backlog_bytes_max
    kv_message_bytes_max: int = _STREAMS.message_bytes_max
    kv_receive_messages_max: int = _STREAMS.receive_messages_max
    max_body_bytes: int = 8 * 1024 * 1024
    head_bytes_max: int = 64 * 1024  # what common proxies allow at most, several times over
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    keep_alive_timeout_s: int = 75
    connections_max: int = 8192
    listen_backlog: int = 2048
    shutdown_timeout_s: int = 5
    metrics_rank_series_max: int = 512  # some 16 ms of event loop per scrape
    metrics_scope_series_max: int = 64  # of some 30 series each
    log_format: LogFormat = "text"
    log_level: str = "info"
    access_log: bool = False
    router: RouterSettings = _UNSET

    @property
    def core_limits(self) -> CoreLimits:
        """Bounds of the core."""
        return CoreLimits(
            reservation_ttl_s=self.reservation_ttl_s,
            freed_ids_max=self.freed_ids_max,
            data_parallel_size_max=self.data_parallel_size_max,
            queue_recheck_s=self.queue_recheck_s,
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
            orphan_blocks_max=self.kv_orphan_blocks_max,
            backlog_batches_max=self.kv_backlog_batches_max,
            backlog_bytes_max=self.kv_backlog_bytes_max,
            message_bytes_max=self.kv_message_bytes_max,
            receive_messages_max=self.kv_receive_messages_max,
        )
