"""The replica plane on the wire: a PUB socket that tells peers what was booked here (contract 6).

Encodes and sends, never blocks, decides nothing. What is due is in `Effects.published`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from indexer.edge.sockets import open_publisher
from select_service.core.replica_events import TOPIC

if TYPE_CHECKING:
    from select_service.core.replica_events import ReplicaEnvelope

_encode = msgspec.msgpack.Encoder().encode


class ReplicaPublisher:
    """Bound on every interface; a slow or absent subscriber loses messages, never our time."""

    def __init__(self, port: int) -> None:
        """Bind.

        Raises:
            indexer.errors.EndpointRefused: the port cannot be bound.
        """
        self._socket = open_publisher(f"tcp://*:{port}")
        self.sent = 0
        self.dropped = 0  # the socket's queue was full

    def publish(self, envelope: ReplicaEnvelope) -> None:
        """Send one event to whoever listens."""
        if self._socket.send((TOPIC, _encode(envelope))):
            self.sent += 1
        else:
            self.dropped += 1

    def close(self) -> None:
        """Close without lingering."""
        self._socket.close()
