"""Metrics of the index snapshot, read from counters at scrape time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.metrics_core import Metric
from typing_extensions import override

from select_service.edge.metrics.families import Collector, counter, gauge

if TYPE_CHECKING:
    from collections.abc import Iterator

    from select_service.edge.driver.driver import Driver
    from select_service.edge.state.warm_start import WarmStart

__all__ = ["SnapshotMetrics"]


class SnapshotMetrics(Collector):
    """Families without a state directory stay empty."""

    def __init__(self, service: Driver) -> None:
        self._service = service

    @override
    def collect(self) -> Iterator[Metric]:
        warm = self._service.warm_start
        yield from self._written(warm)
        yield from self._recalled(warm)

    def _written(self, warm: WarmStart | None) -> Iterator[Metric]:
        at = gauge(
            "index_snapshot_written_timestamp_seconds", "When the last index snapshot was written."
        )
        families = [
            (gauge(f"index_snapshot_{name}", text), name)
            for name, text in (
                ("seconds", "Seconds that the last index snapshot took."),
                ("bytes", "Bytes of the last index snapshot."),
                ("blocks", "Blocks in the last index snapshot, per rank and tier."),
                ("ranks", "Ranks in the last index snapshot."),
            )
        ]
        left_out = gauge(
            "index_snapshot_left_out", "Ranks left out of the last index snapshot.", ("reason",)
        )
        writes = counter("index_snapshot_writes", "Index snapshots written.")
        failures = counter(
            "index_snapshot_failures",
            "Index snapshots that were not written; the old one stays.",
            ("kind",),
        )
        if warm is not None:
            snapshots = warm.snapshots
            if snapshots.written_at is not None:
                at.add_metric((), snapshots.written_at)
            for family, name in families:
                family.add_metric((), getattr(snapshots, name))
            for reason, count in sorted(snapshots.left_out.items()):
                left_out.add_metric([reason], count)
            writes.add_metric((), snapshots.writes)
            for kind, count in sorted(snapshots.failures.items()):
                failures.add_metric([kind], count)
        yield from (at, *(family for family, _ in families), left_out, writes, failures)

    def _recalled(self, warm: WarmStart | None) -> Iterator[Metric]:
        damage = gauge("index_snapshot_damage", "Faults of the one found at the start.", ("kind",))
        seconds = gauge("index_snapshot_load_seconds", "Time spent on loading it.")
        unproven = gauge(
            "index_snapshot_unproven_ranks",
            "Ranks whose blocks wait for their engine's proof, unseen.",
        )
        recalled = counter(
            "index_snapshot_recalled_ranks",
            "Ranks of an earlier life: credited, or why not.",
            ("outcome",),
        )
        if warm is not None:
            for kind, count in sorted(warm.snapshots.damage.items()):
                damage.add_metric([kind], count)
            seconds.add_metric((), warm.load_seconds)
            unproven.add_metric((), warm.unproven)
            outcomes = dict(warm.snapshots.rejected)
            for outcome, count in self._service.core.registry.recalls().items():
                outcomes[outcome] = outcomes.get(outcome, 0) + count
            for outcome, count in sorted(outcomes.items()):
                recalled.add_metric([outcome], count)
        yield from (damage, seconds, unproven, recalled)
