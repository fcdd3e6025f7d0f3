"""The verbs of the replica plane: take in what replicas say, and let waiting requests in.

`core/replication/` implements the plane; the load it removes from the ledger may be capacity for a
request that waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from select_service.core.effects import NOTHING, Effects

if TYPE_CHECKING:
    from collections.abc import Iterator

    from select_service.core.effects import Pull
    from select_service.core.operations.waiting_requests import WaitingRequests
    from select_service.core.replication.messages import (
        Heartbeat,
        ReplicaMessage,
        SnapshotHead,
        SnapshotPart,
    )
    from select_service.core.replication.plane import Replicas
    from select_service.types import ReplicaStatus


class ReplicaOperations:
    """Exchanges messages with other replicas."""

    def __init__(self, replicas: Replicas, waiting_requests: WaitingRequests) -> None:
        self._replicas = replicas
        self._waiting_requests = waiting_requests

    def announce(self, http_port: int, url: str | None = None) -> None:
        """Set where our snapshot can be fetched; heartbeats carry it."""
        self._replicas.http_port, self._replicas.url = http_port, url

    def receive(
        self, peer: str, message: ReplicaMessage, now: float, *, checked: bool = False
    ) -> Effects:
        """Apply one decoded message from this peer endpoint.

        `checked`: the message had a checksum, and it was correct.
        """
        self._replicas.message_applier.apply(peer, message, now, checked=checked)
        return self._relieved(now, NOTHING)

    def tick(self, now: float) -> tuple[bool, Effects]:
        """Do a bounded turn: outgoing messages, heartbeats, lost replicas, conflicts to resolve.

        Call it every 100 ms or so.

        Returns:
            (more, effects): `more` when another turn is due at once.
        """
        effects = Effects()
        more = self._replicas.tick(now, effects)
        return more, self._relieved(now, effects)

    def leave(self) -> None:
        """Announce, from the next turn on, that this process will end."""
        self._replicas.leave()

    def last_word(self) -> Heartbeat:
        """Return the message to publish last, after everything `tick` still publishes."""
        return self._replicas.last_word()

    def snapshot(self, now: float) -> Iterator[SnapshotPart]:
        """Yield our snapshot from head to end; the state may change between two parts."""
        return self._replicas.snapshots.give(now)

    def snapshot_begin(self, pull: Pull, head: SnapshotHead, now: float) -> bool:
        """Begin a pulled snapshot; False if it is not from the replica asked: read no further."""
        return self._replicas.snapshots.begin(pull.router_id, head, now)

    def snapshot_part(self, router_id: int, part: SnapshotPart, now: float) -> Effects:
        """Apply one part of a snapshot; apply a few between two turns of the event loop."""
        self._replicas.snapshots.part(router_id, part, now)
        return self._relieved(now, NOTHING)

    def snapshot_end(self, router_id: int, now: float, *, complete: bool) -> Effects:
        """End a pull: it is complete, or it failed at any point after `Effects.pulls` asked."""
        self._replicas.snapshots.end(router_id, now, complete=complete)
        return self._relieved(now, NOTHING)

    def status(self, now: float) -> list[ReplicaStatus]:
        """Return every known publisher, by router id."""
        return self._replicas.status(now)

    def _relieved(self, now: float, effects: Effects) -> Effects:
        """Let in the requests that waited for load that replicas have freed."""
        for touched in (
            self._replicas.resolver.touched,
            self._replicas.message_applier.reports.touched,
        ):
            while touched:
                partition, _ = touched.popitem()
                effects = self._waiting_requests.relieve(partition, now, effects)
        return effects
