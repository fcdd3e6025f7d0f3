"""A service with a doctor, and engines on real sockets that can be wired wrong; time is skipped."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import zmq
from msgspec.structs import replace

from indexer.core.stream import EventStream
from indexer.types import StreamLimits
from select_service.edge.driver.driver import Driver
from select_service.edge.driver.driver_options import EdgeLimits
from select_service.types import (
    CoreLimits,
    OverlapScoresRequest,
    RouterConfig,
    SelectAndReserveRequest,
    WorkerSpec,
)
from select_service.types.doctor import DoctorLimits, Finding
from tests import wait
from tests.indexer.edge.fake_engine import FakeEngine
from tests.indexer.encoding import encode_batch, removed, stored

BLOCK = 16
STREAMS = StreamLimits(tick_s=0.002, replay_silence_s=0.05, pause_s=0.001)


class Clock:
    """The machine's clocks, which pass by skips and looks: a busy machine changes no finding."""

    def __init__(self) -> None:
        self.skipped = 0.0

    def creep(self) -> None:
        """Let a look take a moment, so that those who never answer are given up."""
        self.skipped += 0.001

    def __call__(self) -> float:
        return 1_000.0 + self.skipped

    def wall(self) -> float:
        return 1_790_000_000.0 + self.skipped


class Engine:
    """Caches what it is sent, and publishes it; `twist` makes it publish something else."""

    def __init__(self, ward: Ward, ports: tuple[int, int] = (0, 0)) -> None:
        self._ward = ward
        self.sockets = FakeEngine(ward.context, ports)
        self.held: dict[tuple[tuple[int, ...], str], int] = {}  # whole prefix → name of its end
        self.names = itertools.count(1)
        self.dp_rank: int | None = None
        self.clock_off_s = 0.0
        self.block = BLOCK
        self.is_silent = False
        self.twist: Callable[[dict[str, Any]], dict[str, Any]] = lambda event: event
        self.sees: Callable[[Sequence[int]], Sequence[int]] = lambda tokens: tokens

    def compute(self, prompt: Sequence[int], **colours: Any) -> None:
        """Cache a prompt; publish the blocks that are new.

        Args:
            prompt: its tokens.
            colours: adapter or salt; what has another one is another block.
        """
        tokens, apart = tuple(self.sees(prompt)), repr(sorted(colours.items()))
        events = []
        size = self.block
        for end in range(size, len(tokens) + 1, size):
            prefix = tokens[:end]
            if (prefix, apart) not in self.held:
                name = self.held[prefix, apart] = next(self.names)
                parent = self.held.get((prefix[:-size], apart))
                block = list(prefix[-size:])
                event = stored([name], block, parent, **({"block_size": size} | colours))
                events.append(self.twist(event))
        if events:
            self.send(events)

    def evict(self, count: int) -> None:
        """Forget some blocks, leaves first."""
        for key in sorted(self.held, key=lambda key: len(key[0]))[-count:]:
            self.send([removed([self.held.pop(key)])])

    def send(self, events: list[dict[str, Any]]) -> None:
        ts = self._ward.clock.wall() + self.clock_off_s
        payload = encode_batch(events, ts=ts, rank=self.dp_rank)
        if not self.is_silent:
            self.sockets.publish(payload)

    def restart(self) -> Engine:
        """Another engine on the same ports, with an empty cache."""
        ports = self.sockets.ports
        self.sockets.close()
        self._ward.engines.remove(self)
        return self._ward.engine(ports)


class Ward:
    """One service and its engines on one loop."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        service: Driver,
        clock: Clock,
        start: Callable[..., Awaitable[Driver]],
    ):
        self._start = start
        self.context = context
        self.service = service
        self.clock = clock
        self.engines: list[Engine] = []
        self._ids = itertools.count(1)
        self.reported = 0

    async def restart(self, **settings: Any) -> None:
        """Stop the service, and start another one with further settings."""
        await self.service.close()
        self.service = await self._start(**settings)

    def engine(self, ports: tuple[int, int] = (0, 0)) -> Engine:
        while True:  # libzmq lets go of a port in its own time
            try:
                engine = Engine(self, ports)
            except zmq.ZMQError:
                time.sleep(0.005)
            else:
                self.engines.append(engine)
                return engine

    async def hire(
        self, engine: Engine, worker_id: int = 1, *, replay: bool = True, **fields: Any
    ) -> None:
        """Register an engine; wait until it is listened to, and was asked for its past."""
        before = self.streams(worker_id)
        sources = {
            "kv_events_endpoint": engine.sockets.endpoint,
            "replay_endpoint": engine.sockets.replay_endpoint if replay else None,
        }
        self.register(worker_id, **(sources | fields))
        publishers = {one.sockets.endpoint: one for one in self.engines}
        new = [stream for stream in self.streams(worker_id) if stream not in before]
        for stream, endpoint, _ in [*self.service.core.membership.sources()]:
            one = publishers.get(endpoint)
            if one is not None and stream in new:  # each has a connection of its own
                await self.until(one.sockets.has_subscriber)
        await self.until(lambda: all(self.is_connected(s) for s in self.streams(worker_id)))
        await self.until(lambda: not any(s.awaits_past for s in self.streams(worker_id)))

    def register(self, worker_id: int = 1, **fields: Any) -> None:
        body = {"worker_id": worker_id, "endpoint": f"http://w{worker_id}", "block_size": BLOCK}
        self.service.upsert_worker(msgspec.convert(body | fields, WorkerSpec))

    def streams(self, worker_id: int = 1) -> list[EventStream]:
        membership = self.service.core.membership
        return [s for s, _, _ in membership.sources() if s.rank.worker_id == worker_id]

    def is_connected(self, stream: EventStream) -> bool:
        link = self.service.sources.link(stream)
        return link is not None and link.is_connected

    async def until(self, condition: Callable[[], Any]) -> None:
        """Let service and engines run until it holds."""

        def holds() -> bool:
            if condition():
                return True
            self.clock.creep()
            for engine in self.engines:
                engine.sockets.serve()
            return False

        await wait.until(holds)

    async def received(self, engine: Engine, worker_id: int = 1) -> None:
        """Wait until a healthy engine's events are applied."""
        last = engine.sockets.sequence - 1
        (stream,) = self.streams(worker_id)
        await self.until(lambda: last < 0 or stream.cursor.last == last)

    async def ask(self, tokens: Sequence[int] | None = None, **fields: Any) -> int:
        """Select and book a worker, and free it again; returns which it was."""
        if tokens is not None:
            fields["token_ids"] = list(tokens)
        name = f"r{next(self._ids)}"
        body = {"reservation_id": name, **fields}
        request = msgspec.convert(body, SelectAndReserveRequest)
        answer = await self.service.select_and_reserve(request)
        self.service.free(name)
        return answer.worker_id  # type: ignore[union-attr]

    def scores(self, tokens: Sequence[int]) -> OverlapScoresRequest:
        return OverlapScoresRequest(token_ids=list(tokens))

    async def examine(self) -> list[Finding]:
        """What the doctor finds at this moment."""
        await self.service.doctor().examine()
        self.clock.creep()  # what is done next is done later
        return self.service.doctor().examiner.report(self.clock()).findings

    async def codes(self) -> list[str]:
        return [finding.code for finding in await self.examine()]

    async def pass_time(self, seconds: float, step_s: float = 10.0) -> list[str]:
        """Let time pass, with an examination every ten seconds; the last one's codes."""
        codes = await self.codes()
        for _ in range(round(seconds / step_s)):
            self.clock.skipped += step_s
            await self.rest()
            codes = await self.codes()
        return codes

    async def rest(self) -> None:
        """Some turns of the loop for replays that became due, and as long as they take."""
        for _ in range(6):
            self.clock.creep()
            for engine in self.engines:
                engine.sockets.serve()
            await asyncio.sleep(STREAMS.tick_s)
        streams = [s for s, _, _ in self.service.core.membership.sources()]
        await self.until(lambda: not any(s.is_replaying for s in streams if not s.closed))


def play(
    context: zmq.Context[zmq.Socket[bytes]],
    scenario: Callable[[Ward], Awaitable[None]],
    *,
    config: RouterConfig | None = None,
    streams: StreamLimits = STREAMS,
    **settings: Any,
) -> None:
    """Run a scenario on a loop of its own and close everything after it."""

    async def run() -> None:
        clock = Clock()
        core = replace(CoreLimits(), **settings.pop("core", {}))

        async def start(**more: Any) -> Driver:
            service = Driver(
                config,
                limits=replace(core),
                edge_limits=EdgeLimits(
                    streams=replace(streams), doctor=DoctorLimits(interval_s=0.0)
                ),
                clock=clock,
                seed=1,
                **(settings | more),
            )
            await service.start()
            service.doctor()._wall_clock = clock.wall
            service.doctor()._machine_clock = clock
            await service.doctor().examine()  # from now on prompts are sampled
            return service

        ward = Ward(context, await start(), clock, start)
        try:
            await scenario(ward)
            ward.service.core.check()
            assert ward.service.doctor().faults == 0
        finally:
            await ward.service.close()
            for engine in ward.engines:
                engine.sockets.close()

    wait.run(run())


def prompt(number: int, blocks: int = 3, extra: int = 5) -> list[int]:
    """Some tokens that no other prompt begins with."""
    return [1000 * number + at for at in range(blocks * BLOCK + extra)]
