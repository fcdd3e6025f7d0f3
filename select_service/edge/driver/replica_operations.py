"""The driver's operations on replicas: the plane's opening and end, its peers, what is known of it.

`edge/replication/` has the sockets and is loaded with the first plane; the core decides what is
sent.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from indexer.errors import IndexerError
from select_service.core.effects import NOTHING
from select_service.edge.driver.core_calls import CoreCalls
from select_service.errors import ReplicaSyncDisabled, ServiceError

if TYPE_CHECKING:
    from indexer.edge.addresses import Addresses
    from select_service.edge.driver.driver_options import EdgeLimits
    from select_service.edge.driver.effects_executor import EffectsExecutor
    from select_service.edge.replication.plane import ReplicaConnections
    from select_service.edge.security.credentials import Credentials
    from select_service.types import ReplicaStatus

_log = logging.getLogger("select_service")

HEARTBEATS_AWAITED: Final = 3
"""Grace for a replica without a message yet, in heartbeats: it connects, and one may get lost."""


class ReplicaOperations(CoreCalls):
    """What this process exchanges with other replicas."""

    addresses: Addresses
    credentials: Credentials | None
    _limits: EdgeLimits
    _effects_executor: EffectsExecutor
    _replica_sync_port: int | None  # where bookings are published; None: there is no plane
    _ledgers_asked_since: float | None = None

    @property
    def replicas(self) -> ReplicaConnections | None:
        """The replica plane, while there is one."""
        return self._effects_executor.replicas

    async def _open_replication(self, http_port: int, advertise_url: str | None) -> None:
        """Start to publish and listen, if there is a port.

        Args:
            http_port: where replicas fetch our snapshot, on the host they listen to.
            advertise_url: where they fetch it instead, if given.

        Raises:
            indexer.errors.EndpointRefused: the port cannot be bound.
        """
        if self._replica_sync_port is None:
            return
        from select_service.edge.replication.plane import ReplicaConnections  # only with replicas

        self.core.replica_operations.announce(http_port, advertise_url)
        credentials = self.credentials
        plane = self._effects_executor.replicas = ReplicaConnections(
            self._replica_sync_port,
            self.core,
            self._carry_out,
            self._limits.replicas,
            self._clock,
            self.addresses,
            keys=None if credentials is None else credentials.replica_keys,
            passport=None if credentials is None else credentials.passport,
        )
        await plane.pulls.warm_up()
        for endpoint in self.core.peer_endpoints.endpoints:
            try:
                plane.register(endpoint)
            except (IndexerError, ServiceError) as error:
                _log.warning("replica peer %s of an earlier life: %s", endpoint, error)

    def ledgers_applied(self) -> bool:
        """Whether this process has applied the ledgers of all replicas that are alive.

        Peers silent for three heartbeats are gone, or speak only the reference's protocol, which
        has no ledgers to offer; nothing waits for them any longer.
        """
        plane = self.replicas
        if plane is None:
            return False  # not started
        if self._ledgers_asked_since is None:
            self._ledgers_asked_since = self._clock()
        status = self.replica_status()
        if any(one.state == "behind" for one in status):
            return False
        known = {one.peer for one in status}
        patience_s = HEARTBEATS_AWAITED * self.core.limits.replica_heartbeat_s
        waited_s = self._clock() - self._ledgers_asked_since
        return known.issuperset(plane.peers()) or waited_s >= patience_s

    async def _close_replication(self) -> None:
        """Close the plane. Idempotent."""
        plane = self.replicas
        if plane is not None:
            await plane.close()
            self._effects_executor.replicas = None

    def replica_plane(self) -> ReplicaConnections:
        """Return the replica plane.

        Raises:
            ReplicaSyncDisabled: there is no `--replica-sync-port`.
        """
        plane = self.replicas
        if plane is None:
            raise ReplicaSyncDisabled
        return plane

    def register_peer(self, endpoint: str) -> bool:
        """POST /replica_sync/register_peer; False if already registered."""
        is_new = self.replica_plane().register(endpoint)
        self.core.peer_endpoints.add(endpoint)
        self._carry_out(NOTHING)
        return is_new

    def deregister_peer(self, endpoint: str) -> None:
        """POST /replica_sync/deregister_peer."""
        self.replica_plane().deregister(endpoint)
        self.core.peer_endpoints.remove(endpoint)
        self._carry_out(NOTHING)

    def replica_status(self) -> list[ReplicaStatus]:
        """Return what is known of every other publisher."""
        return self.core.replica_operations.status(self._clock())
