"""A link between a publisher and its subscribers that loses, repeats, delays and reorders messages.

A thread between two ZMQ sockets: XSUB towards the publisher, XPUB towards the subscribers. What
becomes of a message is drawn from a seeded dice, so a bad run can be played again.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time
from dataclasses import dataclass, replace
from typing import Self

import zmq

from tests.live.ports import HOST

IDLE_MS = 5


@dataclass(frozen=True)
class Weather:
    """Shares of messages, and the longest delay; `cut`: nothing passes."""

    lost: float = 0.0
    repeated: float = 0.0
    delayed: float = 0.0  # and so overtaken by those behind
    delay_s: float = 0.3
    cut: bool = False


CALM = Weather()


class LossyLink:
    """One direction between two replicas. Use as a context manager."""

    def __init__(self, source_port: int, port: int, seed: int) -> None:
        self.port = port
        self.weather = CALM
        self.counts = {"passed": 0, "lost": 0, "repeated": 0, "delayed": 0}
        self._source_port = source_port
        self._dice = random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def endpoint(self) -> str:
        """What the subscriber registers as its peer."""
        return f"tcp://{HOST}:{self.port}"

    def set(self, weather: Weather, *, cut: bool = False) -> None:
        """Change the weather from now on."""
        self.weather = replace(weather, cut=cut)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        up, down = context.socket(zmq.XSUB), context.socket(zmq.XPUB)
        for socket in (up, down):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
        down.setsockopt(zmq.XPUB_VERBOSER, 1)  # a subscriber that comes back says so upwards
        up.connect(f"tcp://{HOST}:{self._source_port}")
        down.bind(self.endpoint)
        try:
            self._pump(up, down)
        finally:
            up.close()
            down.close()
            context.term()

    def _pump(self, up: zmq.Socket[bytes], down: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(up, zmq.POLLIN)
        poller.register(down, zmq.POLLIN)
        waiting: list[tuple[float, int, list[bytes]]] = []
        numbers = itertools.count()
        while not self._stop.is_set():
            ready = dict(poller.poll(IDLE_MS))
            if down in ready:
                up.send(down.recv())  # subscriptions always get through
            if up in ready:
                frames = up.recv_multipart()
                for delay_s in self._fate():
                    due = time.monotonic() + delay_s
                    heapq.heappush(waiting, (due, next(numbers), frames))
            while waiting and waiting[0][0] <= time.monotonic():
                down.send_multipart(heapq.heappop(waiting)[2])

    def _fate(self) -> list[float]:
        """Delays of the copies that will arrive."""
        weather, dice = self.weather, self._dice
        if weather.cut or dice.random() < weather.lost:
            self.counts["lost"] += 1
            return []
        copies = 1
        if dice.random() < weather.repeated:
            self.counts["repeated"] += 1
            copies = 2
        return [self._delay() for _ in range(copies)]

    def _delay(self) -> float:
        if self._dice.random() >= self.weather.delayed:
            self.counts["passed"] += 1
            return 0.0
        self.counts["delayed"] += 1
        return self._dice.uniform(0.0, self.weather.delay_s)
