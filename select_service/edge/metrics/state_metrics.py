"""Metrics of the state directory, read from counters at scrape time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.metrics_core import Metric
from typing_extensions import override

from select_service.edge.metrics.families import Collector, counter, gauge

if TYPE_CHECKING:
    from collections.abc import Iterator

    from select_service.edge.driver.driver import Driver

__all__ = ["StateMetrics"]


class StateMetrics(Collector):
    """Families without a state directory stay empty."""

    def __init__(self, service: Driver) -> None:
        self._service = service

    @override
    def collect(self) -> Iterator[Metric]:
        pending = gauge("state_pending_rows", "Changes that are not on disk yet.")
        writable = gauge("state_writable", "1 while the disk takes what is written.")
        commits = counter("state_commits", "Transactions on disk.")
        seconds = counter("state_commit_seconds", "Time the writer took for transactions.")
        rows = counter("state_rows_written", "Records written to disk.")
        failures = counter("state_commit_failures", "Commits the disk refused; tried again.")
        released = counter(
            "state_bookings_released", "Bookings taken back because a commit failed."
        )
        waits = counter(
            "state_window_waits", "Answers that relaxed durability made wait after all."
        )
        waiting = gauge("state_waiting", "Answers that wait for the disk.")
        stalls = counter("state_stalls", "Commits the disk has had for longer than it may.")
        away = counter("state_turned_away", "Changes refused because too many answers wait.")
        restored = gauge("state_restored", "Records brought back at the start.", ("kind",))
        dropped = gauge(
            "state_dropped", "Records dropped at the start, without a place any more.", ("kind",)
        )
        damage = gauge("state_damage", "Faults found in the state directory at the start.")
        lost = gauge("state_rows_lost", "Records lost to damage, as far as is known.")
        keeper = self._service.keeper
        if keeper is not None:
            journal, status = keeper.journal, keeper.status()
            pending.add_metric((), status.pending)
            writable.add_metric((), int(status.writable))
            commits.add_metric((), journal.commits)
            seconds.add_metric((), journal.commit_seconds)
            rows.add_metric((), journal.rows_written)
            failures.add_metric((), journal.failures)
            released.add_metric((), keeper.released)
            waits.add_metric((), journal.window_waits)
            waiting.add_metric((), journal.waiting)
            stalls.add_metric((), journal.stalls)
            away.add_metric((), journal.turned_away)
            for kind, count in status.restored.items():
                restored.add_metric([kind], count)
            for kind, count in status.dropped.items():
                dropped.add_metric([kind], count)
            damage.add_metric((), len(status.damage))
            lost.add_metric((), status.rows_lost)
        yield from (pending, writable, commits, seconds, rows, failures)
        yield from (released, waits, waiting, stalls, away)
        yield from (restored, dropped, damage, lost)
