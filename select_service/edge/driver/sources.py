"""The workers' event sources: opened, held and closed as the core asks.

`effects_executor.py` passes on which; `indexer/edge/listener.py` has the sockets. What an earlier
run or a peer knew of a stream comes first: until it is in place, the stream is not opened, or is
held.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from indexer.edge.descriptors import descriptors_left
from indexer.edge.listener import Listeners
from indexer.errors import EndpointRefused, NoDescriptorLeft
from indexer.types import StreamLimits
from select_service.edge.logs import LogThrottle

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from indexer.core.stream import EventStream
    from indexer.edge.addresses import Addresses
    from indexer.types import LinkState
    from select_service.core.effects import Effects, Listen
    from select_service.edge.driver.core_calls import CallContext
    from select_service.edge.driver.startup_recovery import StartupRecovery
    from select_service.edge.load_topic import LoadTopic
    from select_service.edge.security.credentials import Credentials
    from select_service.edge.state.recording_file import Recording

_log = logging.getLogger("select_service")

RETRY_S: Final = 1.0
"""How long workers that found no descriptor wait before the next check."""

DESCRIPTORS_OF_SOURCE: Final = 4
"""What libzmq opens per event source: a connection, and descriptors that signal data and connection
events. Measured."""


class EventSources:
    """The listeners of one driver, while it runs.

    Attributes:
        listeners: has the sockets; None before `open` and after `close`.
        without_descriptor: times a source was refused for lack of a descriptor.
    """

    def __init__(
        self,
        turn: CallContext,
        recovering: StartupRecovery,
        addresses: Addresses,
        load_topic: LoadTopic,
        *,
        limits: StreamLimits | None = None,
        credentials: Credentials | None = None,
        recording: Recording | None = None,
    ) -> None:
        """Listen to none yet.

        Args:
            turn: to report a refused source to the core.
            recovering: must finish first.
            addresses: where connections may lead.
            load_topic: receives workers' load reports.
            limits: bounds of the listeners.
            credentials: keys towards workers.
            recording: of every message.
        """
        self._core, self._clock, self._carry_out = turn
        self._recovering = recovering
        self._addresses = addresses
        self._load_topic = load_topic
        self._limits = limits or StreamLimits()
        self._credentials = credentials
        self._recording = recording
        self._held: list[Listen] = []  # until recovery is over
        self._refusals = LogThrottle(_log.warning, turn.clock)
        self._poor: dict[int, None] = {}  # workers waiting for a descriptor, in order of arrival
        self._again: asyncio.Handle | None = None
        self.listeners: Listeners | None = None
        self.without_descriptor = 0

    def open(self) -> Listeners:
        """Create the listeners, with no sources yet."""
        credentials = self._credentials
        self.listeners = Listeners(
            self._core.registry,
            clock=self._clock,
            limits=self._limits,
            on_load=self._load_topic.receive,
            keys=None if credentials is None else credentials.keys,
            worker_key=None if credentials is None else credentials.worker_key,
            addresses=self._addresses,
            on_refused=self._refuse,
            on_message=None if self._recording is None else self._record,
        )
        if credentials is not None:
            credentials.when_other_keys.append(self.listeners.use_keys)
        return self.listeners

    async def close(self) -> None:
        """Close every socket. Idempotent."""
        self._poor.clear()
        if self._again is not None:
            self._again.cancel()
            self._again = None
        if self.listeners is not None:
            await self.listeners.close()
            self.listeners = None

    def follow(self, effects: Effects) -> None:
        """Stop, start and reread sources as the core asks."""
        listeners = self.listeners
        if listeners is None:
            return
        for stream in effects.unlisten:
            listeners.stop(stream)
        for listen in effects.listen:
            self._listen(listeners, listen)
        for stream in effects.reread:
            listeners.look_at(stream)

    def let_in(self) -> None:
        """Open the sources that were held until recovery ended."""
        held, self._held = self._held, []
        if self.listeners is not None:
            for listen in held:
                self._listen(self.listeners, listen)

    def look_again(self) -> None:
        """Apply changed limits to every stream."""
        if self.listeners is not None:
            self.listeners.look_at_all()

    def link(self, stream: EventStream) -> LinkState | None:
        """Return the state of the connection to a source; None: there is none."""
        return None if self.listeners is None else self.listeners.link(stream)

    @property
    def handshakes_failed(self) -> Mapping[str, int]:
        """Failed handshakes with workers, by kind of failure."""
        return {} if self.listeners is None else self.listeners.handshakes_failed

    def _listen(self, listeners: Listeners, listen: Listen) -> None:
        if listen.stream.closed:  # the source of a sibling rank was just refused
            return
        if self._recovering.is_running:
            self._held.append(listen)
            return
        warm = self._recovering.warm_start
        is_known = warm is not None and warm.knows(listen.stream)
        try:
            listeners.start(
                listen.stream,
                listen.endpoint,
                listen.replay_endpoint,
                is_held=is_known,
                server_key=listen.curve_key,
            )
        except EndpointRefused as error:
            self._refuse(listen.stream, error)
            return
        if warm is not None and is_known:
            warm.give_back(listen)

    def _refuse(self, stream: EventStream, error: EndpointRefused) -> None:
        """Take a worker out of service because its event source cannot be connected to."""
        worker_id = stream.rank.worker_id
        if isinstance(error, NoDescriptorLeft):
            self.without_descriptor += 1
            if worker_id not in self._poor:
                self._poor[worker_id] = None
                _log.warning("event source refused for now: %s (worker %d)", error, worker_id)
            self._try_later()
        else:
            self._refusals.log("", f"event source refused: {error} (worker {worker_id})")
        self._carry_out(self._core.workers.refuse_source(stream.rank, str(error), self._clock()))

    def _try_later(self) -> None:
        if self._again is None:
            self._again = asyncio.get_running_loop().call_later(RETRY_S, self._try_again)

    def _try_again(self) -> None:
        """Retry the first worker for which there are descriptors; if it succeeds, the next at once.

        Workers whose retry would visibly fail are skipped: once in service, a worker gets waiting
        requests before anybody listens to its events. A worker that needs many descriptors does not
        block those that need few.
        """
        self._again = None
        catalog, left = self._core.catalog, descriptors_left(self._limits.descriptors_kept // 2)
        for worker_id in list(self._poor):
            worker = catalog.find(worker_id)
            if worker is None or len(worker.ranks) * DESCRIPTORS_OF_SOURCE <= left:
                break
        else:
            if self._poor:
                self._try_later()
            return
        del self._poor[worker_id]  # if refused again it joins the end of the queue
        try:
            self._carry_out(self._core.workers.retry_source(worker_id, self._clock()))
        finally:
            if self._poor and self._again is None:
                self._again = asyncio.get_running_loop().call_soon(self._try_again)

    def _record(
        self,
        stream: EventStream,
        frames: Sequence[bytes],
        is_replay: bool,  # noqa: FBT001 - as the listener calls it
    ) -> None:
        assert self._recording is not None
        index = self._core.registry.index(stream.scope)
        is_eagle = index is not None and index.is_eagle
        self._recording.event(stream, frames, is_replay=is_replay, is_eagle=is_eagle)


def state_of(stream: EventStream) -> str:
    """Return the state of an event stream in one word, for /metrics and the console."""
    if stream.is_replaying:
        return "replaying"
    if stream.kv_state == "uncertain":
        return "uncertain"
    return "silent" if stream.last_event_at is None else "current"
