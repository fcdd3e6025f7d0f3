"""What /metrics says of recovery, readiness and discovery, read from counters at scrape time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Iterator

    from select_service.edge.driver import Driver

_RECOVERY: Final = ("running", "recovered", "failed")
_GATES: Final = ("index_recovery", "index_snapshot", "replica_ledgers", "state", "discovery")


class RecoveryMetrics(Collector):
    """Families without a recovery or a source stay empty."""

    def __init__(self, service: Driver, prefix: str) -> None:
        self._service = service
        self._prefix = prefix

    @override
    def collect(self) -> Iterator[Metric]:
        yield from self._recovery()
        yield from self._readiness()
        yield from self._discovery()

    def _recovery(self) -> Iterator[Metric]:
        state = self._gauge("index_recovery", "1 for the state start-up recovery is in.", "state")
        attempts = self._counter(
            "index_recovery_attempts", "Fetches of a peer's dump that have ended.", "outcome"
        )
        amounts = {
            name: self._counter(f"index_recovery_{name}", text)
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
        unclaimed = self._gauge(
            "index_recovered_ranks", "Recovered ranks whose time to be claimed still runs."
        )
        unclaimed.add_metric((), len(recovered))
        yield unclaimed
        dropped = self._counter(
            "index_recovered_ranks_dropped", "Recovered ranks that no worker has claimed."
        )
        dropped.add_metric((), recovered.dropped)
        yield dropped

    def _readiness(self) -> Iterator[Metric]:
        readiness = self._service.readiness
        missing = readiness.missing()
        waiting = self._gauge("waiting_for", "1 while /ready waits for it.", "name")
        given_up = self._gauge("ready_given_up", "1 if it was not there in time.", "name")
        for name in _GATES:
            waiting.add_metric([name], name in missing)
            given_up.add_metric([name], name in readiness.given_up)
        waiting.add_metric(["leaving"], "leaving" in missing)
        yield from (waiting, given_up)

    def _discovery(self) -> Iterator[Metric]:
        named = self._gauge("discovery_workers", "Workers or replicas a source names.", "source")
        missed = self._gauge("discovery_missed", "Named no longer, and in their grace.", "source")
        left_out = self._gauge(
            "discovery_rejected", "Of what a source names, left out.", "source", "reason"
        )
        updates = self._counter("discovery_updates", "Good looks at a source.", "source")
        failures = self._counter(
            "discovery_failures", "Looks at a source that failed.", "source", "kind"
        )
        discovery = self._service.discovery
        for follower in () if discovery is None else discovery.followers:
            source = follower.source
            named.add_metric([source.name], follower.named)
            missed.add_metric([source.name], follower.missed)
            updates.add_metric([source.name], source.updates)
            for reason, count in (
                ("conflict", follower.conflicts),
                ("refused", follower.refused),
                ("limit", follower.left_out),
                ("malformed", len(source.rejected)),
            ):
                left_out.add_metric([source.name, reason], count)
            for kind, count in sorted(source.failures.items()):
                failures.add_metric([source.name, kind], count)
        yield from (named, missed, left_out, updates, failures)

    def _gauge(self, name: str, text: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(self._prefix + name, text, labels=labels)

    def _counter(self, name: str, text: str, *labels: str) -> CounterMetricFamily:
        return CounterMetricFamily(self._prefix + name, text, labels=labels)
