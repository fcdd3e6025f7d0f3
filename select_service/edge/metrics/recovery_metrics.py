"""Metrics of recovery, readiness and discovery; without a recovery or a source they are empty."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from select_service.metric_rows import MetricRow, MetricTable, table, total, value

if TYPE_CHECKING:
    from indexer.edge.recovery import Recovery
    from select_service.edge.discovery.followers import Follower
    from select_service.edge.driver.driver import Driver
    from select_service.edge.metrics.scope_series import Sources
    from select_service.metric_rows import Collector

_OUTCOMES: Final = ("running", "recovered", "failed")
_GATES: Final = (
    "index_recovery",
    "index_snapshot",
    "replica_ledgers",
    "state",
    "discovery",
    "past_events",
)

_RECOVERY: Final[tuple[MetricRow[Recovery], ...]] = (
    value(
        "index_recovery",
        "1 for the state start-up recovery is in.",
        lambda one: {name: one.outcome == name for name in _OUTCOMES},
        "state",
    ),
    total(
        "index_recovery_attempts",
        "Fetches of a peer's dump that have ended.",
        lambda one: {
            "recovered": int(one.outcome == "recovered"),
            **one.failures,
        },
        "outcome",
    ),
    total("index_recovery_bytes", "Bytes of dumps read, from all peers.", lambda one: one.bytes),
    total("index_recovery_blocks", "Blocks read out of dumps.", lambda one: one.blocks),
    total("index_recovery_skipped", "Events of dumps that made no sense.", lambda one: one.skipped),
    total(
        "index_recovery_conflicts",
        "Scopes left out for their block size.",
        lambda one: one.conflicts,
    ),
)


def _waiting_for(driver: Driver) -> dict[str, bool]:
    missing = driver.readiness.missing()
    return {name: name in missing for name in (*_GATES, "leaving")}


_READINESS: Final[tuple[MetricRow[Driver], ...]] = (
    value(
        "index_recovered_ranks",
        "Recovered ranks whose time to be claimed still runs.",
        lambda driver: len(driver.core.recovered),
    ),
    total(
        "index_recovered_ranks_dropped",
        "Recovered ranks that no worker has claimed.",
        lambda driver: driver.core.recovered.dropped,
    ),
    value("waiting_for", "1 while /ready waits for it.", _waiting_for, "name"),
    value(
        "ready_given_up",
        "1 if it was not there in time.",
        lambda driver: {name: name in driver.readiness.given_up for name in _GATES},
        "name",
    ),
)


def _rejected(follower: Follower) -> dict[str, int]:
    source = follower.source
    shared = sum(len(pods) - 1 for pods in source.shared.values())
    return {
        "conflict": follower.conflicts,
        "refused": follower.refused,
        "limit": follower.left_out,
        "malformed": len(source.rejected) - shared,
        "worker_id_shared": shared,
    }


_SOURCES: Final[tuple[MetricRow[Follower], ...]] = (
    value(
        "discovery_workers",
        "Ready workers or replicas of a source.",
        lambda follower: follower.named,
    ),
    value(
        "discovery_missed",
        "Workers that take no new work (not ready, leaving, no longer named), and replicas no "
        "longer named, in their grace period.",
        lambda follower: follower.missed,
    ),
    value(
        "discovery_age_seconds",
        "Seconds since a source was listed, or last said what is new or that nothing is.",
        lambda follower: follower.source.age_s,
    ),
    value(
        "discovery_rejected",
        "Workers or replicas that a source names and that were left out.",
        _rejected,
        "reason",
    ),
    total(
        "discovery_updates",
        "Successful polls of a source.",
        lambda follower: follower.source.updates,
    ),
    total(
        "discovery_failures",
        "Failed polls of a source.",
        lambda follower: follower.source.failures,
        "kind",
    ),
)


def recovery_tables(driver: Driver) -> tuple[Collector, ...]:
    """Return what a start waits for, and the sources of workers and replicas."""

    def sources() -> Sources[Follower]:
        discovery = driver.discovery
        for follower in () if discovery is None else discovery.followers:
            yield (follower.source.name,), (follower,)

    return (
        table(_RECOVERY, lambda: driver.recovery),
        table(_READINESS, lambda: driver),
        MetricTable(_SOURCES, sources, ("source",)),
    )
