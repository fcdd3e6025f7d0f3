"""What is wrong with a replica's endpoint, or with asking for its part."""

from __future__ import annotations

from select_service.errors.refusal import ServiceError


class ReplicaSyncDisabled(ServiceError):
    """The process runs without `--replica-sync-port`."""

    status = 409
    code = "replica_sync_disabled"

    def __init__(self) -> None:
        super().__init__("replica sync is disabled")


class PeerRefused(ServiceError):
    """A replica's endpoint that ZMQ will not connect to, or must not."""

    status = 400
    code = "replica_peer_refused"

    def __init__(self, endpoint: str, reason: str) -> None:
        super().__init__(
            f"failed to register replica peer `{endpoint}`",
            field="endpoint",
            details={"reason": reason},
        )


class InvalidReplicaPeer(ServiceError):
    """An endpoint of `--replica-sync-peers` that cannot be one; the process does not start."""

    status = 400
    code = "invalid_replica_peer"

    def __init__(self, endpoint: str, why: str) -> None:
        super().__init__(f"invalid replica peer endpoint `{endpoint}`: {why}")


class TooManyPeers(ServiceError):
    """As many replicas as `--replica-peers-max` allows."""

    status = 409
    code = "too_many_replica_peers"

    def __init__(self, peers_max: int) -> None:
        super().__init__(f"no more than {peers_max} replica peers")


class PeerNotFound(ServiceError):
    """A replica's endpoint that is not registered."""

    status = 404
    code = "replica_peer_not_found"

    def __init__(self) -> None:
        super().__init__("peer not found")


class TooManySnapshots(ServiceError):
    """As many snapshots in progress as `--replica-snapshots-max` allows."""

    status = 503
    code = "too_many_snapshots"

    def __init__(self) -> None:
        super().__init__("too many snapshots under way, ask again")
