"""The replica plane's operations and lifecycle: opening it, registering peers, reporting on them.

`edge/replication/` has the sockets and is loaded with the first plane; the core decides what is
sent.
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
    from select_service.edge.driver.core_calls import CallContext
    from select_service.edge.driver.effects_executor import EffectsExecutor
    from select_service.edge.readiness import ReadinessGate
    from select_service.edge.replication.plane import ReplicaConnections
    from select_service.edge.security.credentials import Credentials
    from select_service.types import ReplicaLimits, ReplicaStatus

_log = logging.getLogger("select_service")

HEARTBEATS_AWAITED: Final = 3
"""Grace for a replica not heard yet, in heartbeats: time to connect, and for one that gets lost."""


class ReplicaSync:
    """What this process exchanges with other replicas."""

    def __init__(
        self,
        turn: CallContext,
        effects_executor: EffectsExecutor,
        port: int | None,
        limits: ReplicaLimits,
    ) -> None:
        """Publish nothing yet.

        Args:
            turn: of the core to replicate.
            effects_executor: publishes through the plane, while there is one.
            port: where bookings are published; None: nowhere, and there is no plane.
            limits: bounds of the plane.
        """
        self._core, self._clock, self._carry_out = turn
        self._effects_executor = effects_executor
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
        """Start to publish and listen, if there is a port.

        Args:
            addresses: where connections may lead.
            credentials: keys, and what is presented when fetching a snapshot.
            http_port: where replicas fetch our snapshot, on the host they listen to.
            advertise_url: where they fetch it instead, if given.

        Raises:
            indexer.errors.EndpointRefused: the port cannot be bound.
        """
        if self._port is None:
            return
        from select_service.edge.replication.plane import ReplicaConnections  # only with replicas

        self._core.replica_operations.announce(http_port, advertise_url)
        plane = self._effects_executor.replicas = ReplicaConnections(
            self._port,
            self._core,
            self._carry_out,
            self._limits,
            self._clock,
            addresses,
            keys=None if credentials is None else credentials.replica_keys,
            passport=None if credentials is None else credentials.passport,
        )
        await plane.pulls.warm_up()
        for endpoint in self._core.peer_endpoints.endpoints:
            try:
                plane.register(endpoint)
            except (IndexerError, ServiceError) as error:
                _log.warning("replica peer %s of an earlier life: %s", endpoint, error)

    def hold(self, readiness: ReadinessGate, are_peers_known: Callable[[], bool]) -> None:
        """Make /ready wait until the replicas' ledgers are applied here, if there is a plane.

        Args:
            readiness: waits.
            are_peers_known: whether all peers have been discovered by now.
        """
        if self._port is not None:
            readiness.wait_for(
                REPLICA_LEDGERS, lambda: are_peers_known() and self.ledgers_applied()
            )

    def ledgers_applied(self) -> bool:
        """Whether this process has applied the ledgers of all replicas that are alive.

        Peers silent for three heartbeats are gone, or speak only the reference's protocol, which
        has no ledgers to offer; nothing waits for them any longer.
        """
        plane = self._effects_executor.replicas
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
        """Tell replicas at once that we leave, so that they inherit our bookings."""
        if self._effects_executor.replicas is not None:
            self._effects_executor.replicas.leave()

    async def close(self) -> None:
        """Close the plane. Idempotent."""
        plane = self._effects_executor.replicas
        if plane is not None:
            await plane.close()
            self._effects_executor.replicas = None

    def plane(self) -> ReplicaConnections:
        """Return the replica plane.

        Raises:
            ReplicaSyncDisabled: there is no `--replica-sync-port`.
        """
        if self._effects_executor.replicas is None:
            raise ReplicaSyncDisabled
        return self._effects_executor.replicas

    def register_peer(self, endpoint: str) -> bool:
        """POST /replica_sync/register_peer; False if already registered."""
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
        """Return what is known of every other publisher."""
        return self._core.replica_operations.status(self._clock())
