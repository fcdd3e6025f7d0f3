"""Checks from the caller's machine whether the ports of workers can be reached."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from select_service.core.diagnostics.causes import UNREACHABLE_FROM_HERE
from select_service.core.fleet.replay_endpoints import replay_endpoints
from select_service.types.doctor import Finding, Subject

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from select_service.doctor.query import ReachableWorker

ENDPOINTS_MAX: Final = 4096
"""Ports tried; those of further workers are not."""

TRIED_AT_ONCE: Final = 64

_NO_HOST: Final = ".invalid"
"""Names in it never resolve (RFC 6761): workers without such a port say so by one, as the engines
of `select-service demo` do."""


def probe(workers: Iterable[ReachableWorker], timeout_s: float) -> list[Finding]:
    """Connect to every port in the workers' records; those that do not answer become findings."""
    targets: dict[tuple[str, int], Subject] = {}
    for worker in workers:
        if worker.lifecycle == "draining":
            continue  # it may be gone
        for endpoint in _endpoints(worker):
            address = _address(endpoint)
            if address is not None and len(targets) < ENDPOINTS_MAX:
                targets.setdefault(address, _subject(worker, endpoint))

    def why_not(address: tuple[str, int]) -> str | None:
        try:
            socket.create_connection(address, timeout_s).close()
        except OSError as error:
            return error.strerror or str(error) or type(error).__name__
        return None

    with ThreadPoolExecutor(TRIED_AT_ONCE) as threads:
        reasons = list(threads.map(why_not, targets))
    cause = UNREACHABLE_FROM_HERE
    return [
        Finding(
            cause.code,
            cause.severity,
            subject,
            f"cannot connect to {subject.endpoint}: {reason}",
            cause.why,
            cause.remedy,
            0.0,
        )
        for subject, reason in zip(targets.values(), reasons, strict=True)
        if reason is not None
    ]


def _endpoints(worker: ReachableWorker) -> Iterator[str]:
    if worker.kv_events not in (None, "engine"):  # its publishers are not listened to
        if worker.endpoint is not None:
            yield worker.endpoint
        return
    events = {int(rank): at for rank, at in worker.kv_events_endpoints.items()}
    if not events and worker.kv_events_endpoint is not None:
        events = {worker.data_parallel_start_rank or 0: worker.kv_events_endpoint}
    by_rank = {int(rank): at for rank, at in worker.replay_endpoints.items()}
    replays = replay_endpoints(events, worker.replay_endpoint, by_rank)
    asked = replays.values() or [worker.replay_endpoint]  # before its events are named
    for endpoint in (worker.endpoint, *events.values(), *asked):
        if endpoint is not None:
            yield endpoint


def _address(endpoint: str) -> tuple[str, int] | None:
    """Return host and port; None if the endpoint is opaque, as a worker's may be, or nowhere."""
    try:
        parts = urlsplit(endpoint)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        return None
    if parts.scheme not in {"tcp", "http", "https"} or not parts.hostname or port is None:
        return None
    if parts.hostname.endswith(_NO_HOST):
        return None
    return parts.hostname, port


def _subject(worker: ReachableWorker, endpoint: str) -> Subject:
    return Subject(
        model_name=worker.model_name,
        tenant_id=worker.tenant_id,
        worker_id=worker.worker_id,
        endpoint=endpoint,
    )
