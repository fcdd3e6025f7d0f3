"""The verbs of the replica plane: what others say is taken in, and who waited for it is let in.

`replicas/` understands the plane; what it changes in the ledger may be capacity for somebody.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from select_service.core.effects import NOTHING, Effects

if TYPE_CHECKING:
    from collections.abc import Iterator

    from select_service.core.effects import Pull
    from select_service.core.replicas.messages import (
        Heartbeat,
        ReplicaMessage,
        SnapshotHead,
        SnapshotPart,
    )
    from select_service.core.replicas.plane import Replicas
    from select_service.core.verbs.waiting_room import WaitingRoom
    from select_service.types import ReplicaStatus


class Replicating:
    """Speaks with other replicas."""

    def __init__(self, replicas: Replicas, room: WaitingRoom) -> None:
        self._replicas = replicas
        self._room = room

    def announce(self, http_port: int, url: str | None = None) -> None:
        """Tell where our snapshot can be had; heartbeats carry it."""
        self._replicas.http_port, self._replicas.url = http_port, url

    def heard(
        self, peer: str, message: ReplicaMessage, now: float, *, checked: bool = False
    ) -> Effects:
        """Take in one decoded message that came from this peer endpoint.

        `checked`: it had a checksum, and that was right.
        """
        self._replicas.hearing.heard(peer, message, now, checked=checked)
        return self._relieved(now, NOTHING)

    def tick(self, now: float) -> tuple[bool, Effects]:
        """Do a bounded turn: what is to be said, heartbeats, who is gone, what must be resolved.

        Call it every 100 ms or so.

        Returns:
            (more, effects): `more` when another turn is due at once.
        """
        effects = Effects()
        more = self._replicas.tick(now, effects)
        return more, self._relieved(now, effects)

    def leave(self) -> None:
        """Tell, from the next turn on, that this process will end."""
        self._replicas.leave()

    def last_word(self) -> Heartbeat:
        """Return what is to be published last of all, behind what `tick` still has to say."""
        return self._replicas.last_word()

    def snapshot(self, now: float) -> Iterator[SnapshotPart]:
        """Yield what we know, from head to end; anything may happen between two parts."""
        return self._replicas.snapshots.give(now)

    def snapshot_begin(self, pull: Pull, head: SnapshotHead, now: float) -> bool:
        """A pulled snapshot arrives; False when it is not who was asked: read no further."""
        return self._replicas.snapshots.begin(pull.router_id, head, now)

    def snapshot_part(self, router_id: int, part: SnapshotPart, now: float) -> Effects:
        """Take in one part; a few at a time between two turns of the loop."""
        self._replicas.snapshots.part(router_id, part, now)
        return self._relieved(now, NOTHING)

    def snapshot_end(self, router_id: int, now: float, *, complete: bool) -> Effects:
        """It is all there; or the pull failed at any point after `Effects.pulls` asked for it."""
        self._replicas.snapshots.end(router_id, now, complete=complete)
        return self._relieved(now, NOTHING)

    def status(self, now: float) -> list[ReplicaStatus]:
        """Return every publisher heard of, by router id."""
        return self._replicas.status(now)

    def _relieved(self, now: float, effects: Effects) -> Effects:
        """Admit who waited for what replicas have freed."""
        touched = self._replicas.resolver.touched
        while touched:
            partition, _ = touched.popitem()
            effects = self._room.relieve(partition, now, effects)
        return effects
