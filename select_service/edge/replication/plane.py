"""The replica plane of one process: peers to listen to, messages to publish, snapshots to fetch.

The core decides all of it; here its decisions meet sockets and clocks. `sync.py` and `pull.py`
below do the I/O, `driver.py` above carries out the core's effects.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from msgspec import UNSET

from indexer.core.endpoint import check_endpoint
from indexer.errors import EndpointRefused
from select_service.core.replication.checksum import (
    GarbledReplicaMessage,
    is_checked,
    with_checksum,
)
from select_service.core.replication.dynamo_events import TOPIC, ReplicaEnvelope
from select_service.core.replication.message_codec import (
    MalformedReplicaMessage,
    decode_message,
    encode_message,
    encode_part,
)
from select_service.core.replication.messages import (
    CACHED_TOKENS_TOPIC,
    LOADS_TOPIC,
    OWN_TOPIC,
    SESSIONS_TOPIC,
)
from select_service.edge.cooperative import TimeSlices, ended
from select_service.edge.dump_stream import StreamCut, StreamLimit
from select_service.edge.replication.pull import LENGTH_BYTES, SnapshotPulls
from select_service.edge.replication.sync import ReplicaPublisher, Subscriptions
from select_service.errors import PeerNotFound, PeerRefused, TooManyPeers, TooManySnapshots

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from indexer.edge.addresses import Addresses
    from indexer.edge.curve import ReplicaKeys
    from select_service.core.effects import Effects
    from select_service.core.replication.messages import ReplicaMessage
    from select_service.core.service import SelectionCore
    from select_service.edge.dump_stream import StreamSlot
    from select_service.edge.security.credentials import ClientCredentials
    from select_service.types import ReplicaLimits

_log = logging.getLogger("select_service")

TICK_S: Final = 0.1
"""How late the core may notice that something is due."""

LAST_TURNS_MAX: Final = 1000
"""Turns left for publishing before the end; a replica that misses some notices the silence."""

LAST_WORD_S: Final = 0.1
"""And the time for the last messages to leave this machine."""

ENDPOINT_CHARS_MAX: Final = 4096
"""Of a replica's endpoint: no host name exceeds 253 characters, no path this many."""

_SHOWN_CHARS: Final = 64  # of an endpoint that is longer

PIECE_BYTES: Final = 64 * 1024
"""Bytes of a snapshot sent at once."""

GARBLED_LOG_S: Final = 60.0
"""Minimum interval between log lines about garbled messages; every one is counted."""

FRAMES: Final = 2  # topic and payload; anything else is not a message of this plane


class ReplicaConnections:
    """The plane from open to close; bound to the event loop it is used on.

    Attributes:
        peers_refused: peers beyond `--replica-peers-max`.
        received: messages of peers handled.
        malformed: unreadable messages of peers, dropped.
        garbled: messages of peers with a wrong checksum, dropped.
        foreign_refused: the reference's own, dropped if keys are required: it has none.
        faults: turns of housekeeping that raised, which is a bug.
        snapshots: snapshots sent, by outcome.
    """

    def __init__(
        self,
        port: int,
        core: SelectionCore,
        carry_out: Callable[[Effects], None],
        limits: ReplicaLimits,
        clock: Callable[[], float],
        addresses: Addresses,
        *,
        keys: ReplicaKeys | None = None,
        passport: ClientCredentials | None = None,
    ) -> None:
        """Bind, and listen to none yet.

        Args:
            port: of the PUB socket, on every interface.
            core: decides.
            carry_out: carries out effects; it calls our own `carry_out`.
            limits: bounds of everything peers may cost.
            clock: monotonic seconds.
            addresses: where connections may lead.
            keys: encrypt what is published and require it of peers; None: no encryption.
            passport: authenticates us to the sources of snapshots, and them to us.

        Raises:
            EndpointRefused: the port cannot be bound.
        """
        self._core = core
        self._carry_out = carry_out
        self._limits = limits
        self._clock = clock
        self._keys = keys
        self.publisher = ReplicaPublisher(port, limits.send_messages_max, keys)
        self.subscriptions = Subscriptions(
            (TOPIC, OWN_TOPIC, LOADS_TOPIC, CACHED_TOKENS_TOPIC, SESSIONS_TOPIC),
            self._receive,
            limits,
            clock,
            addresses,
            keys,
            beats_on=OWN_TOPIC,
            silence_s=lambda: core.limits.replica_timeout_s,
        )
        self.pulls = SnapshotPulls(
            core.replica_operations,
            carry_out,
            limits,
            clock,
            _log.warning,
            addresses,
            passport=passport,
        )
        self._ticker = asyncio.get_running_loop().create_task(self._tick())
        self._is_leaving = False
        self._giving = StreamLimit()  # snapshots being sent
        self.peers_refused = 0
        self.received = 0
        self.malformed = 0
        self.garbled = 0
        self._garbled_logged_at: float | None = None
        self._garbled_logged = 0
        self.foreign_refused = 0
        self.faults = 0
        self.snapshots = {"complete": 0, "cut_off": 0, "timeout": 0, "refused": 0}

    async def close(self) -> None:
        """Stop timers, close sockets."""
        await ended(self._ticker)
        if self._is_leaving:
            await self._say_the_last()
        await self.pulls.close()
        self.subscriptions.close()
        self.publisher.close()

    def leave(self) -> None:
        """Notify replicas at once that we are leaving; `close` publishes that we have left."""
        self._is_leaving = True
        self._core.replica_operations.leave()
        self._turn()

    async def _say_the_last(self) -> None:
        """Publish what is still pending, then the final message."""
        for _ in range(LAST_TURNS_MAX):
            if not self._turn():
                break
            await asyncio.sleep(0)
        self._publish(self._core.replica_operations.last_word())
        await asyncio.sleep(LAST_WORD_S)

    # -- peers -------------------------------------------------------------------------------------

    def peers(self) -> list[str]:
        """Peer endpoints, sorted."""
        return list(self.subscriptions)

    def register(self, endpoint: str) -> bool:
        """Listen to a replica; False if it is already listened to.

        Raises:
            indexer.errors.InvalidEndpoint: not a well-formed endpoint.
            PeerRefused: ZMQ will not connect there, or the endpoint is too long.
            TooManyPeers: more than `--replica-peers-max`.
        """
        check_endpoint(endpoint)
        if len(endpoint) > ENDPOINT_CHARS_MAX:
            reason = f"it is longer than {ENDPOINT_CHARS_MAX} characters"
            raise PeerRefused(endpoint[:_SHOWN_CHARS], reason)
        if endpoint in self.subscriptions:
            return False
        if len(self.subscriptions) >= self._limits.peers_max:
            self.peers_refused += 1
            raise TooManyPeers(self._limits.peers_max)
        try:
            self.subscriptions.add(endpoint)
        except EndpointRefused as error:
            raise PeerRefused(endpoint, error.reason) from error
        return True

    def deregister(self, endpoint: str) -> None:
        """Stop listening to a replica; what it owns expires as if it were gone.

        Raises:
            indexer.errors.InvalidEndpoint: not a well-formed endpoint.
            PeerNotFound: it was not listened to.
        """
        check_endpoint(endpoint)
        if not self.subscriptions.remove(endpoint):
            raise PeerNotFound

    # -- messages ----------------------------------------------------------------------------------

    def carry_out(self, effects: Effects) -> None:
        """Publish messages and start pulls, without waiting."""
        for message in effects.published:
            self._publish(message)
        for pull in effects.pulls:
            self.pulls.ask(pull)

    def _publish(self, message: ReplicaMessage) -> None:
        topic, payload = encode_message(message)
        self.publisher.publish(topic, with_checksum(payload))

    def _receive(self, peer: str, frames: Sequence[bytes]) -> None:
        if len(frames) != FRAMES:
            self.malformed += 1
            return
        try:
            checked = is_checked(frames[1])
            message = decode_message(*frames)
        except GarbledReplicaMessage:
            self._note_garbled(peer)
            return
        except MalformedReplicaMessage:
            self.malformed += 1
            return
        if self._keys is not None and _is_foreign(message):
            self.foreign_refused += 1
            return
        self.received += 1
        now = self._clock()
        self._carry_out(self._core.replica_operations.receive(peer, message, now, checked=checked))

    def _note_garbled(self, peer: str) -> None:
        """Count a garbled message; its missing number has it fetched again like any lost one."""
        self.garbled += 1
        now, logged_at = self._clock(), self._garbled_logged_at
        if logged_at is None or now - logged_at >= GARBLED_LOG_S:
            new = self.garbled - self._garbled_logged
            self._garbled_logged_at, self._garbled_logged = now, self.garbled
            _log.warning(
                "a message of replica %s came garbled and was dropped (%d since the last line):"
                " its checksum is that of other bytes",
                peer,
                new,
            )

    async def _tick(self) -> None:
        while True:
            more = self._turn()
            self.subscriptions.renew_silent()
            await asyncio.sleep(0 if more else TICK_S)

    def _turn(self) -> bool:
        """Let the core do what is due; True if more is."""
        more = False
        try:
            more, effects = self._core.replica_operations.tick(self._clock())
            self._carry_out(effects)
        except Exception:  # noqa: BLE001 - a bug must not end the heartbeats
            self.faults += 1
            _log.exception("replica housekeeping failed")
        return more

    # -- snapshots ---------------------------------------------------------------------------------

    def snapshot(self) -> AsyncIterator[bytes]:
        """Begin to send a snapshot of what others need to know of this process.

        Raises:
            TooManySnapshots: `--replica-snapshots-max` are already under way.
        """
        if self._giving.taken >= self._limits.snapshots_max:
            self.snapshots["refused"] += 1
            raise TooManySnapshots
        return self._pieces(self._giving.take())

    async def _pieces(self, place: StreamSlot) -> AsyncIterator[bytes]:
        """Yield frames in pieces, yielding to the loop every few hundred microseconds.

        Ends after the time limit of our own pulls: no replica like us would still be reading.
        """
        outcome, ends_at = "cut_off", self._clock() + self._limits.pull_timeout_s
        try:
            piece, slices = bytearray(), TimeSlices()
            for part in self._core.replica_operations.snapshot(self._clock()):
                frame = with_checksum(encode_part(part))
                piece += len(frame).to_bytes(LENGTH_BYTES, "big") + frame
                if len(piece) >= PIECE_BYTES:
                    if self._clock() >= ends_at:
                        outcome = "timeout"
                        raise StreamCut
                    yield bytes(piece)
                    piece.clear()
                await slices.yield_if_due()
            yield bytes(piece)
            outcome = "complete"
        finally:
            place.leave()
            self.snapshots[outcome] += 1


def _is_foreign(message: ReplicaMessage) -> bool:
    """Whether it is a statement without a sequence number, which all of ours have."""
    return isinstance(message, ReplicaEnvelope) and message.select_service is UNSET
