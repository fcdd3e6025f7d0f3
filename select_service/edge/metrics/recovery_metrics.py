"""Metrics of recovery, readiness and discovery, read from counters at scrape time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client.metrics_core import Metric
from typing_extensions import override

from select_service.edge.metrics.families import Collector, counter, gauge

if TYPE_CHECKING:
    from collections.abc import Iterator

    from select_service.edge.driver.driver import Driver

_RECOVERY: Final = ("running", "recovered", "failed")
_GATES: Final = ("index_recovery", "index_snapshot", "replica_ledgers", "state", "discovery")


class RecoveryMetrics(Collector):
    """Families without a recovery or a source stay empty."""

    def __init__(self, service: Driver) -> None:
        self._service = service

    @override
    def collect(self) -> Iterator[Metric]:
        yield from self._recovery()
        yield from self._readiness()
        yield from self._discovery()

    def _recovery(self) -> Iterator[Metric]:
        state = gauge("index_recovery", "1 for the state start-up recovery is in.", ("state",))
        attempts = counter(
            "index_recovery_attempts", "Fetches of a peer's dump that have ended.", ("outcome",)
        )
        amounts = {
            name: counter(f"index_recovery_{name}", text)
            for name, text in (
                ("bytes", "Bytes of dumps read, from all peers."),
                ("blocks", "Blocks read out of dumps."),
                ("skipped", "Events of dumps that made no sense."),
                ("conflicts", "Scopes left out for their block size."),
            )
        }
        recovery = self._service.recovery
        if recovery is not None:
            for name in _RECOVERY:
                state.add_metric([name], recovery.outcome == name)
            attempts.add_metric(["recovered"], recovery.outcome == "recovered")
            for kind, count in sorted(recovery.failures.items()):
                attempts.add_metric([kind], count)
            for name, family in amounts.items():
                family.add_metric((), getattr(recovery, name))
        yield from (state, attempts, *amounts.values())
        recovered = self._service.core.recovered
        yield gauge(
            "index_recovered_ranks",
            "Recovered ranks whose time to be claimed still runs.",
            value=len(recovered),
        )
        yield counter(
            "index_recovered_ranks_dropped",
            "Recovered ranks that no worker has claimed.",
            value=recovered.dropped,
        )

    def _readiness(self) -> Iterator[Metric]:
        readiness = self._service.readiness
        missing = readiness.missing()
        waiting = gauge("waiting_for", "1 while /ready waits for it.", ("name",))
        given_up = gauge("ready_given_up", "1 if it was not there in time.", ("name",))
        for name in _GATES:
            waiting.add_metric([name], name in missing)
            given_up.add_metric([name], name in readiness.given_up)
        waiting.add_metric(["leaving"], "leaving" in missing)
        yield from (waiting, given_up)

    def _discovery(self) -> Iterator[Metric]:
        named = gauge("discovery_workers", "Ready workers or replicas of a source.", ("source",))
        missed = gauge(
            "discovery_missed",
            "Workers that take no new work (not ready, leaving, no longer named), and replicas no "
            "longer named, in their grace period.",
            ("source",),
        )
        age = gauge(
            "discovery_age_seconds",
            "Seconds since a source was listed, or last said what is new or that nothing is.",
            ("source",),
        )
        left_out = gauge(
            "discovery_rejected",
            "Workers or replicas that a source names and that were left out.",
            ("source", "reason"),
        )
        updates = counter("discovery_updates", "Successful polls of a source.", ("source",))
        failures = counter("discovery_failures", "Failed polls of a source.", ("source", "kind"))
        discovery = self._service.discovery
        for follower in () if discovery is None else discovery.followers:
            source = follower.source
            named.add_metric([source.name], follower.named)
            missed.add_metric([source.name], follower.missed)
            age.add_metric([source.name], source.age_s)
            updates.add_metric([source.name], source.updates)
            shared = sum(len(pods) - 1 for pods in source.shared.values())
            for reason, count in (
                ("conflict", follower.conflicts),
                ("refused", follower.refused),
                ("limit", follower.left_out),
                ("malformed", len(source.rejected) - shared),
                ("worker_id_shared", shared),
            ):
                left_out.add_metric([source.name, reason], count)
            for kind, count in sorted(source.failures.items()):
                failures.add_metric([source.name, kind], count)
        yield from (named, missed, age, left_out, updates, failures)
