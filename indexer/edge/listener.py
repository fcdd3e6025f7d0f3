"""Feeds every stream from its sockets: a bounded slice of work per turn of the event loop.

One subscriber per stream, one dealer per replay (`replays.py`), and no thread or task for either:
sockets wake the loop through their file descriptors, and one callback serves the ready ones in
turn. `core/stream` interprets the messages.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from indexer.edge.addresses import Addresses
from indexer.edge.endpoint_follower import EndpointFollower
from indexer.edge.replays import Replays
from indexer.edge.schedule import Schedule
from indexer.edge.sockets import Sockets
from indexer.edge.stream_sockets import StreamSockets
from indexer.errors import EndpointRefused
from indexer.types import SOCKET_BYTES_FACTOR, StreamLimits

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from indexer.core.registry import StreamRegistry
    from indexer.core.stream import EventStream
    from indexer.edge.addresses import Answer
    from indexer.edge.curve import KeyPair
    from indexer.types import LinkState


LOAD_TOPIC: Final = b"kv_metrics"
"""Messages of this topic are load reports, not events."""
VAIN_LOOKS_MAX: Final = 3
"""Consecutive empty reads after which the loop watches a socket again; being woken costs more."""


class Listeners:
    """All event sockets of the process; lives on the event loop it is used from.

    Attributes:
        faults: Messages whose handling raised, which is a bug; the batch is lost, the stream
            continues.
    """

    def __init__(
        self,
        registry: StreamRegistry,
        *,
        clock: Callable[[], float] = time.monotonic,
        limits: StreamLimits | None = None,
        on_load: Callable[[EventStream, Sequence[bytes]], None] | None = None,
        keys: KeyPair | None = None,
        worker_key: str | None = None,
        addresses: Addresses | None = None,
        on_refused: Callable[[EventStream, EndpointRefused], None] | None = None,
        on_message: Callable[[EventStream, Sequence[bytes], bool], None] | None = None,
    ) -> None:
        """Open nothing yet.

        Args:
            registry: owner of the streams.
            clock: monotonic seconds.
            limits: budgets; default: the registry's.
            on_load: called with workers' load reports.
            keys: our identity towards workers that ask for one; None: a new one on every start.
            worker_key: CURVE key of all workers whose records have none; None: unencrypted.
            addresses: where sockets may connect to.
            on_refused: called with a stream whose endpoint's name resolves to a forbidden address.
            on_message: called with every event message before it is processed, and whether it is a
                reply to a replay request.
        """
        self._clock = clock
        self._on_load = on_load
        self._on_refused = on_refused
        self._on_message = on_message
        self._addresses = addresses or Addresses(clock=clock)
        self._owns_addresses = addresses is None
        self._limits = limits or registry.limits
        self._worker_key = worker_key
        self._sockets = Sockets(self._limits, keys, received=SOCKET_BYTES_FACTOR)
        self._replays = Replays(self._sockets, self._addresses, self._queue)
        self._feeds: dict[int, StreamSockets] = {}  # by identity of the stream
        self._ready: deque[StreamSockets] = deque()
        self._turn_handle: asyncio.Handle | None = None
        self._turned_at = float("-inf")
        self._put_off: list[StreamSockets] = []  # until the pause is over
        self._pause_handle: asyncio.Handle | None = None
        self._schedule = Schedule()  # by identity of the stream
        self._round: deque[int] = deque()  # streams still to be visited in this tick
        self._tick_handle: asyncio.Handle | None = None
        self._tick_due = self._clock()
        self._late_s = 0.0  # how late this tick is
        self.faults = 0

    def __len__(self) -> int:
        return len(self._feeds)

    def link(self, stream: EventStream) -> LinkState | None:
        """Return the state of the stream's connection; None if it is not listened to (yet)."""
        feed = self._feeds.get(id(stream))
        return None if feed is None else feed.link(self._clock())

    @property
    def handshakes_failed(self) -> Mapping[str, int]:
        """Failed handshakes with publishers, by cause."""
        return self._sockets.handshakes_failed

    # -- verbs -------------------------------------------------------------------------------------

    def start(
        self,
        stream: EventStream,
        endpoint: str,
        replay_endpoint: str | None,
        *,
        is_held: bool = False,
        server_key: str | None = None,
    ) -> None:
        """Follow a stream's endpoint from now on.

        Args:
            stream: where the messages go.
            endpoint: of its publisher.
            replay_endpoint: where to ask for replays, if anywhere.
            is_held: subscribe, but let messages wait until `release`.
            server_key: the CURVE key of both endpoints; None: the key of all workers, if there is
                one.

        Raises:
            EndpointRefused: libzmq will not connect to one of the two, or it is not allowed.
        """
        assert id(stream) not in self._feeds
        if replay_endpoint is not None:
            replay_place = self._addresses.place(replay_endpoint)
            if replay_place is not None:
                self._sockets.try_connect(replay_place)
        place = self._addresses.place(endpoint)
        key = server_key or self._worker_key
        subscriber = self._sockets.subscribe(place, server_key=key)
        feed = StreamSockets(stream, subscriber, replay_endpoint, self._clock(), key)
        feed.is_held = is_held
        self._feeds[id(stream)] = feed
        if self._addresses.is_named(endpoint):
            feed.follower = EndpointFollower(
                self._addresses,
                endpoint,
                feed.subscriber,
                place,
                moved=lambda: self._queue(feed),
                refused=lambda error: self._refuse(feed, error),
            )
        if replay_endpoint is not None and self._addresses.is_named(replay_endpoint):
            self._addresses.find(
                replay_endpoint, lambda found: self._judge_replay(feed, found), tries=False
            )
        loop = asyncio.get_running_loop()
        self._watch_socket(feed)
        loop.add_reader(feed.subscriber.news_fd, self._on_connection_events, feed)
        self._schedule.always(id(stream))  # until a visit shows when it is due
        self._queue(feed)  # descriptors only report changes, and one may be over already
        self._on_connection_events(feed)
        if self._tick_handle is None:
            self._tick_due = self._clock()
            self._tick()

    def use_keys(self, keys: KeyPair) -> None:
        """Use a new identity from the next connection on; no event is missed."""
        self._sockets.use_keys(keys)
        for feed in self._feeds.values():
            feed.subscriber.use_keys(keys)

    def hold(self, stream: EventStream) -> None:
        """Let a stream's messages wait in their socket until `release`; the stream stands still."""
        feed = self._feeds.get(id(stream))
        if feed is not None:
            feed.is_held = True

    def release(self, stream: EventStream) -> None:
        """Let a held stream continue. Idempotent."""
        feed = self._feeds.get(id(stream))
        if feed is not None and feed.is_held:
            feed.is_held = False
            self._sync_replay(feed)
            self._watch_socket(feed)
            self._replays.watch(feed)
            self._schedule.always(id(stream))
            self._queue(feed)

    def look_at(self, stream: EventStream) -> None:
        """Visit a stream at the next tick: something other than a message made it want a replay."""
        if id(stream) in self._feeds:
            self._schedule.always(id(stream))

    def look_at_all(self) -> None:
        """Visit every stream: the limits have changed, and with them the due times."""
        for number in self._feeds:
            self._schedule.always(number)

    def stop(self, stream: EventStream) -> None:
        """Close a stream's sockets; unread messages are lost. Idempotent."""
        feed = self._feeds.pop(id(stream), None)
        if feed is not None:
            self._schedule.forget(id(stream))
            self._replays.close(feed)
            if feed.follower is not None:
                feed.follower.close()
                feed.follower = None  # breaks the reference cycle
            loop = asyncio.get_running_loop()
            loop.remove_reader(feed.subscriber.fd)
            loop.remove_reader(feed.subscriber.news_fd)
            feed.subscriber.close()

    async def close(self) -> None:
        """Close everything. Idempotent."""
        for feed in list(self._feeds.values()):
            self.stop(feed.stream)
        for handle in (self._turn_handle, self._pause_handle, self._tick_handle):
            if handle is not None:
                handle.cancel()
        self._turn_handle = self._pause_handle = self._tick_handle = None
        self._ready.clear()
        self._put_off.clear()
        self._round.clear()
        if self._owns_addresses:
            self._addresses.close()
        self._sockets.close()

    # -- sockets -----------------------------------------------------------------------------------

    def _watch_socket(self, feed: StreamSockets) -> None:
        """Have the loop report when messages arrive."""
        if not feed.is_watched:
            feed.is_watched = True
            loop = asyncio.get_running_loop()
            loop.add_reader(feed.subscriber.fd, self._on_readable, feed)

    def _on_readable(self, feed: StreamSockets) -> None:
        """Read now or, shortly after a read of any socket, let more messages accumulate."""
        is_soon = self._clock() < self._turned_at + self._limits.pause_s
        if is_soon or feed.is_held:
            # the descriptor stays readable until the socket is read: the loop would spin
            feed.is_watched = False
            asyncio.get_running_loop().remove_reader(feed.subscriber.fd)
        if not is_soon:
            self._queue(feed)
        elif not feed.is_held:
            self._look_later(feed)

    def _look_later(self, feed: StreamSockets) -> None:
        self._put_off.append(feed)
        if self._pause_handle is None:
            loop = asyncio.get_running_loop()
            self._pause_handle = loop.call_later(self._limits.pause_s, self._end_pause)

    def _end_pause(self) -> None:
        """Read all deferred sockets: one wake-up for the messages of several."""
        self._pause_handle = None
        feeds, self._put_off = self._put_off, []
        for feed in feeds:
            if not feed.is_queued:
                feed.is_queued = True
                self._ready.append(feed)
        if self._turn_handle is None:
            self._turn()

    def _on_empty(self, feed: StreamSockets) -> None:
        """The sockets are empty: look again shortly or, if that was in vain, let the loop watch."""
        feed.is_queued = False
        if feed.is_watched or feed.is_held:
            return
        if feed.vain_looks < VAIN_LOOKS_MAX:
            feed.vain_looks += 1
            self._look_later(feed)
        else:
            self._watch_socket(feed)

    # -- turns -------------------------------------------------------------------------------------

    def _queue(self, feed: StreamSockets) -> None:
        if not feed.is_queued:
            feed.is_queued = True
            self._ready.append(feed)
            if self._turn_handle is None:
                self._turn_handle = asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        """Serve ready feeds, each a little, until the turn's time is up."""
        end = self._clock() + self._limits.turn_s
        while self._ready:
            feed = self._ready.popleft()
            if self._feeds.get(id(feed.stream)) is not feed:
                continue  # stopped while it waited
            try:
                is_idle = not self._serve(feed, end)
                if is_idle:
                    self._on_empty(feed)
            except Exception as error:  # noqa: BLE001 - out of descriptors, say: the others go on
                self._report(error)
                feed.is_queued = False
                feed.is_faulty = True  # until the next tick, or the loop would spin
                self._schedule.always(id(feed.stream))
            else:
                if not is_idle:
                    self._ready.append(feed)
            if self._clock() >= end:
                break
        self._turn_handle = None
        self._turned_at = self._clock()
        if self._ready:
            self._turn_handle = asyncio.get_running_loop().call_soon(self._turn)

    def _serve(self, feed: StreamSockets, end: float) -> bool:
        """Read and work; False if both sockets are empty and nothing is pending."""
        if feed.is_held:
            return False
        stream = feed.stream
        for _ in range(self._limits.messages_per_turn):
            now = self._clock()
            try:
                is_idle = self._step(feed, now)
            except Exception as error:  # noqa: BLE001 - a bug must not end the listener
                self._report(error)
                stream.on_fault()
                is_idle = False
            if not self._sync_replay(feed) and is_idle:
                return False
            if now >= end:
                break
        return True

    def _step(self, feed: StreamSockets, now: float) -> bool:
        """Do one piece of work; True if there was none."""
        stream = feed.stream
        if stream.is_busy:
            stream.resume(now)
            return False
        reply = None if feed.dealer is None else feed.dealer.receive()
        if reply is not None:
            feed.mute_replay_place = None
            if self._on_message is not None:
                self._on_message(stream, reply, True)  # noqa: FBT003 - a reply
            stream.on_replay(reply, now)
        is_copying = feed.dealer is not None and feed.dealer.is_copying
        # live messages are read alongside replies: a long replay must not fill the other queue
        if feed.inbox or self._read(feed):
            if feed.inbox:
                stream.take(feed.inbox, now)
                stream.resume(now)
            return False
        if is_copying:
            stream.on_arriving(now)
            return False
        if reply is None and feed.dealer is not None and feed.dealer.is_given_up:
            return not stream.on_broken_replay(now)
        return reply is None

    def _read(self, feed: StreamSockets) -> bool:
        """Read some live messages; False if there were none. Load reports bypass the stream."""
        messages = feed.subscriber.receive_some(self._limits.messages_per_turn, LOAD_TOPIC)
        if not messages:
            return feed.subscriber.is_copying
        feed.vain_looks = 0
        if not feed.is_connected:
            self._on_connection_events(feed)  # a new connection brought them: tell the stream first
        if self._on_load is not None and messages[-1][0] == LOAD_TOPIC:
            feed.load_reports += 1
            self._on_load(feed.stream, messages.pop())
        if self._on_message is not None:
            for one in messages:
                self._on_message(feed.stream, one, False)  # noqa: FBT003 - live
        feed.inbox.extend(messages)
        return True

    def _tick(self) -> None:
        """Let the streams that are due notice silence, as many as time allows."""
        now = self._clock()
        end = now + self._limits.turn_s
        if not self._round:
            self._late_s = max(now - self._tick_due, 0.0)
            self._round.extend(self._schedule.take(now))
        while self._round:
            number = self._round.popleft()
            feed = self._feeds.get(number)
            if feed is None:
                self._schedule.forget(number)
            else:
                try:
                    self._visit(feed, now, end)
                    self._schedule_visit(number, feed, now)
                except Exception as error:  # noqa: BLE001 - nor must one end the ticks
                    self._report(error)
                    feed.stream.on_fault()
                    self._schedule.always(number)
                now = self._clock()
                if now >= end:
                    break
        loop = asyncio.get_running_loop()
        if self._round:
            self._tick_handle = loop.call_soon(self._tick)
        else:
            # A fixed interval, not the time of the next due stream: the clock may be injected, and
            # may jump; a tick with nothing due takes a microsecond.
            self._tick_due = now + self._limits.tick_s
            self._tick_handle = loop.call_later(self._limits.tick_s, self._tick)

    def _visit(self, feed: StreamSockets, now: float, end: float) -> None:
        if feed.is_held:
            return
        if feed.dealer is not None:
            # neither our own lateness nor messages waiting for their turn count as silence
            feed.stream.on_absence(self._late_s)
            if self._serve(feed, end):
                self._queue(feed)
        if feed.reconnect_at is not None and now >= feed.reconnect_at:
            self._connect_again(feed, now)
        feed.stream.on_timer(now, may_poll=len(self._replays) < self._limits.polls_max)
        self._sync_replay(feed)
        if feed.stream.is_busy or feed.is_faulty:
            feed.is_faulty = False
            self._queue(feed)

    def _schedule_visit(self, number: int, feed: StreamSockets, now: float) -> None:
        """Schedule the next visit of a stream: at the next tick, or when it is due."""
        if feed.request is not None and not feed.is_held:
            return  # visited at every tick while a replay runs
        self._schedule.rest(number)
        if not feed.is_held:  # a held stream is scheduled again when it is released
            due = feed.stream.due(now)
            if feed.reconnect_at is not None:
                due = min(due, feed.reconnect_at)
            self._schedule.at(number, due)

    # -- connections -------------------------------------------------------------------------------

    def _on_connection_events(self, feed: StreamSockets) -> None:
        """Follow a connection; reconnect where libzmq does not."""
        now = self._clock()
        for link in feed.subscriber.news():
            feed.follow(link, now)
            if feed.reconnect_at is not None:
                self._schedule.at(id(feed.stream), feed.reconnect_at)
            elif feed.is_connected:
                self._schedule.always(id(feed.stream))  # it may want a replay earlier than before
        self._sync_replay(feed)

    def _connect_again(self, feed: StreamSockets, now: float) -> None:
        feed.connect_again(now)
        self._queue(feed)  # connecting may have consumed the descriptor's notification

    def _refuse(self, feed: StreamSockets, error: EndpointRefused) -> None:
        if self._on_refused is not None and self._feeds.get(id(feed.stream)) is feed:
            self._on_refused(feed.stream, error)

    def _judge_replay(self, feed: StreamSockets, answer: Answer) -> None:
        """Handle a replay endpoint's lookup; one that does not resolve counts as mute."""
        if isinstance(answer, EndpointRefused):
            self._refuse(feed, answer)

    # -- replays -----------------------------------------------------------------------------------

    def _sync_replay(self, feed: StreamSockets) -> bool:
        """Start or stop a replay if the stream requests another one; return whether it does."""
        if feed.stream.request is feed.request:
            return False
        self._schedule.always(id(feed.stream))  # until a visit finds that no replay runs
        self._replays.sync(feed)
        return True

    def _report(self, error: Exception) -> None:
        self.faults += 1
        asyncio.get_running_loop().call_exception_handler(
            {"message": "handling an event message failed", "exception": error}
        )
