"""The replica plane and its verbs: begun with the driver, told of peers, asked about them.

`edge/replicas/` has the sockets and is loaded with the first plane; the core decides what is said.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from indexer.errors import IndexerError
from select_service.core.effects import NOTHING
from select_service.edge.readiness import REPLICA_LEDGERS
from select_service.errors import ReplicaSyncDisabled, ServiceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from indexer.edge.addresses import Addresses
    from select_service.edge.driving.carrying import Carrier
    from select_service.edge.driving.turn import Turn
    from select_service.edge.readiness import Readiness
    from select_service.edge.replicas.plane import Replicas
    from select_service.edge.security.credentials import Credentials
    from select_service.types import ReplicaLimits, ReplicaStatus

__all__ = ["Replicating"]

_log = logging.getLogger("select_service")

HEARTBEATS_AWAITED: Final = 3
"""Of a replica that has not been heard yet: time to connect, and for one that gets lost."""


class Replicating:
    """What this process says to others of its kind, and hears from them."""

    def __init__(
        self, turn: Turn, carrier: Carrier, port: int | None, limits: ReplicaLimits
    ) -> None:
        """Say nothing yet.

        Args:
            turn: whose core it is.
            carrier: publishes by way of the plane, while there is one.
            port: where bookings are published; None: nowhere, and there is no plane.
            limits: bounds of the plane.
        """
        self._core, self._clock, self._carry_out = turn
        self._carrier = carrier
        self._port = port
        self._limits = limits
        self._asked_since: float | None = None

    async def open(
        self,
        addresses: Addresses,
        credentials: Credentials | None,
        http_port: int,
        advertise_url: str | None,
    ) -> None:
        """Publish and listen from now on, if a port says where.

        Args:
            addresses: where connections may lead.
            credentials: keys, and what is shown to those who are asked for a snapshot.
            http_port: where replicas find ours, on the host they listen to.
            advertise_url: or there.

        Raises:
            indexer.errors.EndpointRefused: the port cannot be bound.
        """
        if self._port is None:
            return
        from select_service.edge.replicas.plane import Replicas  # for who has any

        self._core.replica_announce(http_port, advertise_url)
        plane = self._carrier.replicas = Replicas(
            *(self._port, self._core, self._carry_out, self._limits),
            *(self._clock, addresses),
            keys=None if credentials is None else credentials.replica_keys,
            passport=None if credentials is None else credentials.passport,
        )
        await plane.pulls.warm_up()
        for endpoint in self._core.peer_endpoints.endpoints:
            try:
                plane.register(endpoint)
            except (IndexerError, ServiceError) as error:
                _log.warning("replica peer %s of an earlier life: %s", endpoint, error)

    def hold(self, readiness: Readiness, are_peers_known: Callable[[], bool]) -> None:
        """Have /ready wait until what replicas know is known here, where there is a plane.

        Args:
            readiness: waits.
            are_peers_known: whether all are known by now that there are.
        """
        if self._port is not None:
            readiness.wait_for(
                REPLICA_LEDGERS, lambda: are_peers_known() and self.ledgers_applied()
            )

    def ledgers_applied(self) -> bool:
        """Whether what the replicas know is known here, as far as they are there to tell.

        Those that stay silent for three heartbeats are gone, or speak the reference's plane only
        and will never tell; nobody waits for them any longer.
        """
        plane = self._carrier.replicas
        if plane is None:
            return False  # not started
        if self._asked_since is None:
            self._asked_since = self._clock()
        status = self.status()
        if any(one.state == "behind" for one in status):
            return False
        heard = {one.peer for one in status}
        patience_s = HEARTBEATS_AWAITED * self._core.limits.replica_heartbeat_s
        return heard.issuperset(plane.peers()) or self._clock() - self._asked_since >= patience_s

    def leave(self) -> None:
        """Let replicas hear at once that we go, so that what is ours is theirs when we are gone."""
        if self._carrier.replicas is not None:
            self._carrier.replicas.leave()

    async def close(self) -> None:
        """Say and hear nothing any more. Idempotent."""
        plane = self._carrier.replicas
        if plane is not None:
            await plane.close()
            self._carrier.replicas = None

    def plane(self) -> Replicas:
        """Return the replica plane: who is listened to, and the snapshot for others.

        Raises:
            ReplicaSyncDisabled: without `--replica-sync-port`.
        """
        if self._carrier.replicas is None:
            raise ReplicaSyncDisabled
        return self._carrier.replicas

    def register_peer(self, endpoint: str) -> bool:
        """POST /replica_sync/register_peer; False when it is listened to already."""
        is_new = self.plane().register(endpoint)
        self._core.peer_endpoints.add(endpoint)
        self._carry_out(NOTHING)
        return is_new

    def deregister_peer(self, endpoint: str) -> None:
        """POST /replica_sync/deregister_peer."""
        self.plane().deregister(endpoint)
        self._core.peer_endpoints.remove(endpoint)
        self._carry_out(NOTHING)

    def status(self) -> list[ReplicaStatus]:
        """What is known of every other publisher."""
        return self._core.replica_status(self._clock())
