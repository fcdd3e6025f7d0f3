"""Metrics of the replica plane, read from its counters at scrape time.

Series by peer are bounded by `--replica-peers-max`. Series by publisher are sums: router ids come
and go with processes, and labels must not.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from prometheus_client.metrics_core import Metric
from typing_extensions import override

from indexer.edge.sockets import Link
from select_service.edge.metrics.families import Collector, counter, counters, gauge

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from select_service.edge.driver.driver import Driver
    from select_service.edge.replication.plane import Replicas
    from select_service.types import ReplicaStatus

_PUBLISHER_STATES: Final = ("synced", "behind", "leaving", "gone", "foreign")


class ReplicaMetrics(Collector):
    """Peers, publishers, messages, pulls and snapshots; families without a plane stay empty."""

    def __init__(self, service: Driver) -> None:
        self._service = service

    @override
    def collect(self) -> Iterator[Metric]:
        plane = self._service.replicas
        status = [] if plane is None else self._service.replica_status()
        yield from self._peers(plane, status)
        yield from self._publishers(plane, status)
        yield from self._reservations()
        yield counters(
            "replica_events",
            "Messages to replicas.",
            "outcome",
            {} if plane is None else _published(plane),
        )
        yield counters(
            "replica_messages",
            "Messages of replicas.",
            "outcome",
            {} if plane is None else _received(plane),
        )
        yield counters(
            "replica_pulls",
            "Fetches of a replica's snapshot that have ended.",
            "outcome",
            {} if plane is None else plane.pulls.outcomes,
        )
        running = gauge("replica_pulls_running", "Snapshots being fetched.")
        if plane is not None:
            running.add_metric((), plane.pulls.running)
        yield running
        yield counters(
            "replica_snapshots",
            "Snapshots given to replicas.",
            "outcome",
            {} if plane is None else plane.snapshots,
        )

    def _peers(self, plane: Replicas | None, status: Sequence[ReplicaStatus]) -> Iterator[Metric]:
        peers = gauge("replica_peers", "Replicas listened to.", ("state",))
        age = gauge(
            "replica_heard_age_seconds",
            "Since a replica was last heard, or is listened to; of those with heartbeats.",
            ("peer",),
        )
        if plane is not None:
            states = Counter(state for _, state in plane.subscriptions.states())
            for state in Link:
                peers.add_metric([state.value], states[state])
            # The reference's replicas publish only when something happens.
            terse = {one.peer for one in status if one.state == "foreign"}
            for link in sorted(plane.subscriptions.links(), key=lambda link: link.endpoint):
                if link.endpoint not in terse:
                    age.add_metric([link.endpoint], link.quiet_s)
        yield from (peers, age)

    def _publishers(
        self, plane: Replicas | None, status: Sequence[ReplicaStatus]
    ) -> Iterator[Metric]:
        publishers = gauge("replica_publishers", "Publishers heard of.", ("state",))
        claims = gauge("replica_claims", "Reservations that other publishers own.")
        unbooked = gauge(
            "replica_claims_unbooked", "Reservations that other publishers own, not booked here."
        )
        missing = gauge("replica_statements_missing", "Statements not heard yet.")
        if plane is not None:
            states = Counter(one.state for one in status)
            for state in _PUBLISHER_STATES:
                publishers.add_metric([state], states[state])
            claims.add_metric((), sum(one.claims for one in status))
            unbooked.add_metric((), sum(one.unbooked for one in status))
            missing.add_metric((), sum(one.missing for one in status))
        yield from (publishers, claims, unbooked, missing)

    def _reservations(self) -> Iterator[Metric]:
        replicas, told = self._service.core.replicas, self._service.core.desk.announcer.claims
        counts, plane = replicas.counters, self._service.replicas
        garbled, foreign = (0, 0) if plane is None else (plane.garbled, plane.foreign_refused)
        yield counters(
            "replica_reservations",
            "Reservations of replicas, here.",
            "event",
            {
                "booked": counts.booked,
                "freed": counts.freed,
                "orphan_expired": counts.orphans_expired,
            },
        )
        yield counters(
            "replica_leases",
            "What replicas, or their end, did to leases here.",
            "event",
            {
                "renewed": counts.leases_renewed,
                "closed": counts.leases_closed,
                "adopted": counts.leases_adopted,
                "missed": counts.leases_missed,
            },
        )
        yield counters(
            "replica_refused",
            "News of replicas not taken in.",
            "reason",
            {
                "repeated": counts.repeated,
                "dropped": counts.dropped,
                "ignored": counts.ignored,
                "claims": counts.claims_refused,
                "publishers": counts.publishers_refused,
                "leases": told.copies.refused,
                "early": told.early_lost + replicas.hearing.foreigners.early.lost,
                "closed": told.closings.lost,
                "our_name": counts.namesakes,
                "impostor": counts.impostors,
                "foreign": foreign,
                "garbled": garbled + counts.garbled,
            },
        )
        yield counters(
            "replica_corrected",
            "What was known otherwise than its owner's snapshot says.",
            "what",
            {"claim": counts.claims_corrected, "number": counts.numbers_corrected},
        )
        yield gauge("lease_copies", "Leases known through replicas.", value=len(told.copies))
        yield gauge("replica_ended", "Ends of reservations remembered.", value=len(told.ends))
        renewed = 0 if plane is None else plane.subscriptions.renewed
        gaps = sum(view.gaps for view in replicas.publishers.views.values())
        for name, text, count in (
            ("replica_gaps", "Times a replica's statements were missing.", gaps),
            (
                "replica_digests_differed",
                "Times a replica owned something else than was known of it.",
                counts.digests_differed,
            ),
            (
                "replica_connections_renewed",
                "Connections to replicas made anew because nothing came over them.",
                renewed,
            ),
        ):
            yield counter(name, text, value=count)


def _published(plane: Replicas) -> dict[str, int]:
    return {"sent": plane.publisher.sent, "dropped": plane.publisher.dropped}


def _received(plane: Replicas) -> dict[str, int]:
    faults = plane.faults + plane.subscriptions.faults
    return {"heard": plane.heard, "malformed": plane.malformed, "fault": faults}
