"""Builds a driver from settings, with the optional parts (state, tracing, recording, security).

Each optional part is imported only if configured, so that other starts do not pay for it. `app.py`
puts the HTTP applications before the driver; `embedded.py` builds its driver without settings.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from select_service.core.pricing.policy import PolicyBook, PolicyError, read_policy
from select_service.edge.driver.driver import Driver
from select_service.edge.driver.driver_options import DriverOptions, EdgeLimits
from select_service.settings import Durability

if TYPE_CHECKING:
    from select_service.edge.discovery.followers import Discovery
    from select_service.edge.security.security_files import SecurityFiles
    from select_service.edge.state.keeper import Keeper
    from select_service.edge.state.recording_file import Recording
    from select_service.edge.tracing.spans import Tracing
    from select_service.settings import PolicyFile, Settings

_log = logging.getLogger("select_service")


def create_driver(settings: Settings) -> Driver:
    """Build the service from settings; only a recording file is opened before its `start`.

    Raises:
        SecurityFileUnusable: tokens or certificates cannot be used.
        indexer.errors.KeyFileUnusable: keys cannot be used.
        RecordingUnusable: the recording file cannot be opened.
    """
    security = create_security(settings)
    router = settings.router
    service = Driver(
        settings.router_config,
        limits=settings.core_limits,
        edge_limits=EdgeLimits(
            streams=settings.stream_limits,
            replicas=settings.replica_limits,
            dumps=settings.dump_limits,
            doctor=settings.doctor_limits,
            snapshot=settings.snapshot_limits,
            recovery=settings.recovery_limits,
            ready_timeout_s=settings.ready_timeout_s,
            ready_past_events_s=settings.ready_past_events_s,
        ),
        policies=_policies(router.policy, router.config.queue_threshold),
        options=DriverOptions(
            keeper=_keeper(settings),
            security=security,
            tracing=_tracing(settings),
            recording=_recording(settings),
        ),
        admission=settings.admission,
        trust=settings.trust,
        shadow=settings.shadow,
        on_event_loss=settings.on_event_loss,
        replica_sync_port=settings.replica_sync_port,
        indexer_peers=settings.indexer_peers,
        egress=settings.egress,
    )
    service.discovery = _discovery(settings, service)
    return service


def create_security(settings: Settings) -> SecurityFiles | None:
    """Read tokens, certificates and keys; None if none are configured.

    Raises:
        SecurityFileUnusable, indexer.errors.KeyFileUnusable: one of them cannot be used.
    """
    if not settings.is_guarded:
        return None
    from select_service.edge.security.security_files import SecurityFiles  # loads OpenSSL

    return SecurityFiles(settings)


def _tracing(settings: Settings) -> Tracing | None:
    if settings.tracing == "none":
        return None
    from select_service.edge.tracing.spans import (  # only if tracing is on
        TracingUnavailableError,
        create_tracing,
    )

    try:
        return create_tracing(settings)
    except TracingUnavailableError as error:  # better to serve without traces than not at all
        _log.error("nothing is traced: %s", error)
        return None


def _keeper(settings: Settings) -> Keeper | None:
    if settings.state_dir is None:
        return None
    from select_service.edge.state.keeper import Keeper  # loads SQLite

    strict = settings.durability is Durability.STRICT
    directory = Path(settings.state_dir)
    window_s, limits = settings.durability_window_s, settings.state_limits
    return Keeper(directory, strict=strict, interval_s=window_s, limits=limits)


def _recording(settings: Settings) -> Recording | None:
    if settings.record is None:
        return None
    from select_service.edge.state.recording_file import (  # only if recording
        SWITCH_S,
        Recording,
        RecordSettings,
    )

    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))
    bounds = RecordSettings(
        path=Path(settings.record),
        bytes_max=settings.record_bytes_max,
        files_max=settings.record_files_max,
        queue_bytes_max=settings.record_queue_bytes_max,
        flush_s=settings.record_flush_s,
    )
    recording = Recording(bounds, settings.router_config)
    recording.open()
    return recording


def _discovery(settings: Settings, service: Driver) -> Discovery | None:
    asked_for = (
        settings.workers_file,
        settings.kubernetes_workers,
        settings.kubernetes_replicas,
        settings.replica_sync_dns,
    )
    if all(source is None for source in asked_for):
        return None
    from select_service.edge.discovery.setup import create_discovery

    return create_discovery(settings, service)


def _policies(file: PolicyFile | None, queue_threshold: float) -> PolicyBook | PolicyError | None:
    if file is None:
        return None
    if file.text is None:
        return PolicyError(file.error)
    try:
        return read_policy(file.text, file.path, queue_threshold)
    except PolicyError as error:
        _log.error("%s", error)
        return error
