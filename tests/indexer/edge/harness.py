"""Registry, listeners and engines on real sockets, all on one loop, and what they publish."""

from __future__ import annotations

import asyncio
import functools
import inspect
from typing import TYPE_CHECKING, Any

import zmq
from msgspec.structs import replace

from indexer.core.hashing import block_hashes
from indexer.core.registry import StreamRegistry
from indexer.edge.listener import Listeners
from indexer.types import Scope, StreamLimits, WorkerRank
from tests import wait
from tests.indexer.core.streams import tokens
from tests.indexer.edge.fake_engine import FakeEngine, serve_until
from tests.indexer.encoding import encode_batch, stored
from tests.live.ports import HOST

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from indexer.core.stream import EventStream
    from indexer.edge.addresses import Addresses

SCOPE = Scope("m", "t")
LIMITS = StreamLimits(
    tick_s=0.02, poll_after_s=0.0, replay_silence_s=1_000.0, replay_deadline_s=10_000.0
)
IMPATIENT = replace(LIMITS, replay_silence_s=0.1)  # for endpoints that never answer


def batch(number: int, ts: float = 0.0) -> bytes:
    return encode_batch([stored([number + 1], tokens(number))], ts=ts + number)


class Harness:
    """Registry, listeners and engines on the test's loop."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], limits: StreamLimits) -> None:
        self.context = context
        self.registry = StreamRegistry(limits=replace(limits))  # a reload changes them in place
        self.index = self.registry.open_index(SCOPE, 16)
        self.listeners = Listeners(self.registry)
        self._unused: list[Listeners] = []
        self._addresses: list[Addresses] = []
        self.engines: list[FakeEngine] = []

    def look_up_at(self, addresses: Addresses) -> None:
        """Have listeners that ask there for names, in the place of those that follow nobody yet."""
        self._unused.append(self.listeners)
        self._addresses.append(addresses)
        self.listeners = Listeners(self.registry, addresses=addresses)

    async def close(self) -> None:
        for one in (self.listeners, *self._unused):
            await one.close()
        for addresses in self._addresses:
            addresses.close()

    def engine(self, ports: tuple[int, int] = (0, 0), host: str = HOST) -> FakeEngine:
        self.engines.append(FakeEngine(self.context, ports, host))
        return self.engines[-1]

    def end(self, engine: FakeEngine) -> tuple[int, int]:
        """End an engine; returns the ports that it leaves."""
        ports = engine.ports
        engine.close()
        self.engines.remove(engine)
        return ports

    async def reborn(self, ports: tuple[int, int], host: str = HOST) -> FakeEngine:
        """Another engine on the same ports, as soon as libzmq has let go of them."""
        while True:
            try:
                return self.engine(ports, host)
            except zmq.ZMQError:
                await asyncio.sleep(0.005)

    async def follow(
        self, engine: FakeEngine, worker: int = 1, *, replay: bool = True
    ) -> EventStream:
        stream = self.registry.open_stream(
            SCOPE, WorkerRank(worker, 0), worker_ranks=range(1), has_replay=replay
        )
        endpoint = engine.replay_endpoint if replay else None
        self.listeners.start(stream, engine.endpoint, endpoint)
        await self.until(engine.has_subscriber)
        return stream

    async def until(self, condition: Callable[[], Any]) -> None:
        """Let the loop and the engines run until it holds."""
        await serve_until(self.engines, condition)

    async def mend_a_gap(self, engine: FakeEngine, stream: EventStream) -> None:
        """Lose one of three batches; all of them come."""
        for number in range(3):
            engine.publish(batch(number), is_lost=number == 1)
        await self.until(lambda: stream.cursor.last == 2)
        assert all(self.holds(stream, number) for number in range(3))
        assert stream.lost_batches == 0

    def holds(self, stream: EventStream, number: int) -> bool:
        slot = self.index.slot_of(stream.rank)
        return slot in self.index.find_matches(block_hashes(tokens(number), 16)).rows()


def play(
    context: zmq.Context[zmq.Socket[bytes]],
    scenario: Callable[[Harness], Coroutine[Any, Any, None]],
    limits: StreamLimits = LIMITS,
) -> None:
    """Run a scenario on a loop of its own and close everything after it."""

    async def run() -> None:
        harness = Harness(context, limits)
        try:
            await scenario(harness)
            harness.registry.check()
            assert harness.listeners.faults == 0
        finally:
            await harness.close()
            await harness.close()
            for engine in harness.engines:
                engine.close()

    wait.run(run())


def with_harness(
    limits: StreamLimits = LIMITS,
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """A test of a harness is a coroutine that gets it as its first argument; `play` runs it."""

    def made(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
        first, *others = inspect.signature(test).parameters.values()

        @functools.wraps(test)
        def run(context: zmq.Context[zmq.Socket[bytes]], **given: Any) -> None:
            play(context, functools.partial(test, **given), limits)

        here = [first.replace(name="context"), *others]
        run.__signature__ = inspect.Signature(here)  # type: ignore[attr-defined]
        return run

    return made
