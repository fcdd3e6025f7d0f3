"""Metrics of replication; families that need the connections of `edge/replication` may be empty.

Series by peer are bounded by `--replica-peers-max`. Series by publisher are sums: router ids come
and go with processes, and labels must not.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

from indexer.edge.sockets import Link
from select_service.metric_rows import MetricRow, table, total, value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from select_service.edge.driver.driver import Driver
    from select_service.edge.replication.plane import ReplicaConnections
    from select_service.metric_rows import Collector
    from select_service.types import ReplicaStatus

_PUBLISHER_STATES: Final = ("synced", "behind", "leaving", "gone", "foreign")


class _Peers(NamedTuple):
    plane: ReplicaConnections
    publishers: Sequence[ReplicaStatus]


def _links(peers: _Peers) -> dict[str, int]:
    states = Counter(state for _, state in peers.plane.subscriptions.states())
    return {state.value: states[state] for state in Link}


def _ages(peers: _Peers) -> dict[str, float]:
    # The reference's replicas publish only when something happens.
    terse = {one.peer for one in peers.publishers if one.state == "foreign"}
    links = peers.plane.subscriptions.links()
    return {link.endpoint: link.quiet_s for link in links if link.endpoint not in terse}


def _publishers(peers: _Peers) -> dict[str, int]:
    states = Counter(one.state for one in peers.publishers)
    return {state: states[state] for state in _PUBLISHER_STATES}


_PEERS: Final[tuple[MetricRow[_Peers], ...]] = (
    value("replica_peers", "Replicas listened to.", _links, "state"),
    value(
        "replica_heard_age_seconds",
        "Since a replica's last message, or since it is listened to; of those with heartbeats.",
        _ages,
        "peer",
    ),
    value("replica_publishers", "Publishers known.", _publishers, "state"),
    value(
        "replica_claims",
        "Reservations that other publishers own.",
        lambda peers: sum(one.claims for one in peers.publishers),
    ),
    value(
        "replica_claims_unbooked",
        "Reservations that other publishers own, not booked here.",
        lambda peers: sum(one.unbooked for one in peers.publishers),
    ),
    value(
        "replica_statements_missing",
        "Statements not received yet.",
        lambda peers: sum(one.missing for one in peers.publishers),
    ),
)


def _refused(driver: Driver) -> dict[str, int]:
    counts, claims = driver.core.replicas.counters, driver.core.lifecycle.announcer.claims
    plane = driver.replicas
    garbled, foreign = (0, 0) if plane is None else (plane.garbled, plane.foreign_refused)
    return {
        "repeated": counts.repeated,
        "dropped": counts.dropped,
        "ignored": counts.ignored,
        "claims": counts.claims_refused,
        "publishers": counts.publishers_refused,
        "leases": claims.copies.refused,
        "early": claims.early.lost + driver.core.replicas.message_applier.dynamo_peers.early.lost,
        "closed": claims.closings.lost,
        "our_name": counts.namesakes,
        "impostor": counts.impostors,
        "foreign": foreign,
        "garbled": garbled + counts.garbled,
    }


_REPLICATION: Final[tuple[MetricRow[Driver], ...]] = (
    total(
        "replica_reservations",
        "Reservations of replicas, here.",
        lambda driver: {
            "booked": driver.core.replicas.counters.booked,
            "freed": driver.core.replicas.counters.freed,
            "orphan_expired": driver.core.replicas.counters.orphans_expired,
        },
        "event",
    ),
    total(
        "replica_leases",
        "What replicas, or their end, did to leases here.",
        lambda driver: {
            "renewed": driver.core.replicas.counters.leases_renewed,
            "closed": driver.core.replicas.counters.leases_closed,
            "adopted": driver.core.replicas.counters.leases_adopted,
            "missed": driver.core.replicas.counters.leases_missed,
        },
        "event",
    ),
    total("replica_refused", "News of replicas not taken in.", _refused, "reason"),
    total(
        "replica_corrected",
        "What was known otherwise than its owner's snapshot says.",
        lambda driver: {
            "claim": driver.core.replicas.counters.claims_corrected,
            "number": driver.core.replicas.counters.numbers_corrected,
        },
        "what",
    ),
    total(
        "replica_load_reports",
        "Load reports of ranks that replicas received and that count here.",
        lambda driver: driver.core.admission_controller.reports.from_replicas,
    ),
    value(
        "lease_copies",
        "Leases known through replicas.",
        lambda driver: len(driver.core.lifecycle.announcer.claims.copies),
    ),
    value(
        "replica_ended",
        "Ends of reservations remembered.",
        lambda driver: len(driver.core.lifecycle.announcer.claims.tombstones),
    ),
    total(
        "replica_gaps",
        "Times a replica's statements were missing.",
        lambda driver: sum(one.gaps for one in driver.core.replicas.publishers.views.values()),
    ),
    total(
        "replica_digests_differed",
        "Times a replica owned something else than was known of it.",
        lambda driver: driver.core.replicas.counters.digests_differed,
    ),
    total(
        "replica_connections_renewed",
        "Connections to replicas made anew because nothing came over them.",
        lambda driver: 0 if driver.replicas is None else driver.replicas.subscriptions.renewed,
    ),
)

_MESSAGES: Final[tuple[MetricRow[ReplicaConnections], ...]] = (
    total(
        "replica_events",
        "Messages to replicas.",
        lambda plane: {"sent": plane.publisher.sent, "dropped": plane.publisher.dropped},
        "outcome",
    ),
    total(
        "replica_messages",
        "Messages of replicas.",
        lambda plane: {
            "heard": plane.received,
            "malformed": plane.malformed,
            "fault": plane.faults + plane.subscriptions.faults,
        },
        "outcome",
    ),
    total(
        "replica_pulls",
        "Fetches of a replica's snapshot that have ended.",
        lambda plane: plane.pulls.outcomes,
        "outcome",
    ),
    value("replica_pulls_running", "Snapshots being fetched.", lambda plane: plane.pulls.running),
    total(
        "replica_snapshots",
        "Snapshots given to replicas.",
        lambda plane: plane.snapshots,
        "outcome",
    ),
)


def replica_tables(driver: Driver) -> tuple[Collector, ...]:
    """Return peers and publishers, what was taken in of them, messages."""

    def peers() -> _Peers | None:
        plane = driver.replicas
        return None if plane is None else _Peers(plane, driver.replica_status())

    return (
        table(_PEERS, peers),
        table(_REPLICATION, lambda: driver),
        table(_MESSAGES, lambda: driver.replicas),
    )
