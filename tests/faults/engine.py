"""An engine in a process of its own: it can be stopped, killed, cut off, and made to lie.

It stores and evicts blocks of the prompts that all engines share, keeps what it has published for
replays, and knows what it holds: that is the truth an index is compared with.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import random
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import msgspec
import zmq

from tests.e2e.fleet import EngineModel, Fleet
from tests.e2e.stage import BLOCK_SIZE
from tests.indexer.encoding import end_marker, message
from tests.live.ports import HOST, free_port

ANSWER_S = 30.0
TURN_MS = 5
RING_BATCHES = 10_000
FLOOD_BLOCKS = 512  # of one store event, and of the removal behind it
PROMPTS = [list(prompt) for prompt in Fleet(random.Random(0), {}).prompts if prompt]

Replay = Literal["honest", "mute", "garbage", "endless", "backwards", "beyond"]
Row = list[int]


class Engine:
    """One worker's engine, as a process; each call waits until the engine has done it."""

    def __init__(self, worker_id: int, *, host: str = HOST, namespace: str | None = None) -> None:
        self.worker_id = worker_id
        self.host = host
        self.ports = (free_port(), free_port())
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(
            target=_live, args=(theirs, host, self.ports, worker_id, namespace), daemon=True
        )

    @property
    def endpoints(self) -> tuple[str, str]:
        """Where it publishes, and where it is asked for replays."""
        return f"tcp://{self.host}:{self.ports[0]}", f"tcp://{self.host}:{self.ports[1]}"

    def __enter__(self) -> Self:
        self._process.start()
        self._answer()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._ours.close()

    # -- what tests say ----------------------------------------------------------------------------

    def churn(self, times: int = 1) -> None:
        """Store and evict something, so many times."""
        self._ask("churn", times)

    def run(self, per_second: float) -> None:
        """Store and evict from now on; 0: rest."""
        self._ask("run", per_second)

    def lose(self, times: int) -> None:
        """As `churn`, and nobody receives it but who asks for a replay."""
        self._ask("lose", times)

    def restart(self) -> None:
        """Begin again at number 0 with an empty cache, as a process that was started anew."""
        self._ask("restart")

    def replay(self, how: Replay) -> None:
        """How replays are answered from now on."""
        self._ask("answer_replays", how)

    def send(self, *frames: bytes) -> None:
        """Publish exactly this."""
        self._ask("send", frames)

    def flood(self, blocks: int, per_second: int) -> float:
        """Offer so many blocks that come and go at once; what was offered per second."""
        return float(self._ask("flood", blocks, per_second, wait_s=120.0))

    def holds(self) -> list[Row]:
        """Of every prompt: blocks on the device, with those of the host, with those of the disk."""
        return self._ask("holds")  # type: ignore[no-any-return]

    def freeze(self) -> None:
        """Stop it in the middle of whatever it does."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        import os

        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def _ask(self, what: str, *args: object, wait_s: float = ANSWER_S) -> Any:
        self._ours.send((what, args))
        return self._answer(wait_s)

    def _answer(self, wait_s: float = ANSWER_S) -> Any:
        assert self._ours.poll(wait_s), f"engine {self.worker_id} does not answer"
        failure, answer = self._ours.recv()
        assert failure is None, failure
        return answer


@contextlib.contextmanager
def engines(count: int, *, first: int = 1) -> Iterator[list[Engine]]:
    """Some engines side by side."""
    with contextlib.ExitStack() as stack:
        found = [Engine(first + number) for number in range(count)]
        for one in found:
            one._process.start()  # all begin, then each is waited for
        for one in found:
            stack.callback(one.__exit__)
            one._answer()
        yield found


# -- the other process -----------------------------------------------------------------------------


@dataclass
class _Life:
    """What the process is."""

    context: zmq.Context[zmq.Socket[bytes]]
    host: str
    ports: tuple[int, int]
    dice: random.Random
    ring: deque[tuple[int, bytes]] = field(default_factory=lambda: deque(maxlen=RING_BATCHES))
    is_deaf: bool = False  # what it says is lost
    period_s: float = 0.0
    mode: Replay = "honest"
    endless: set[bytes] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.open()
        self.model = EngineModel(self)  # type: ignore[arg-type]
        self.prompts = [tuple(prompt) for prompt in PROMPTS]

    def open(self) -> None:
        self.pub = self._bind(zmq.PUB, self.ports[0])
        self.router = self._bind(zmq.ROUTER, self.ports[1])
        self.router.setsockopt(zmq.ROUTER_MANDATORY, 1)

    def _bind(self, kind: int, port: int) -> zmq.Socket[bytes]:
        until = time.monotonic() + ANSWER_S / 2
        socket = self.context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 100_000)
        while True:
            try:
                socket.bind(f"tcp://{self.host}:{port}")
            except zmq.ZMQError:  # libzmq has not let go of the last one's yet
                if time.monotonic() > until:
                    raise
                time.sleep(0.005)
            else:
                return socket

    def publish(self, seq: int, payload: object) -> None:
        """What the model calls."""
        encoded = payload if isinstance(payload, bytes) else msgspec.msgpack.encode(payload)
        self.ring.append((seq, encoded))
        if not self.is_deaf:
            self.pub.send_multipart(message(seq, encoded))

    # -- commands ----------------------------------------------------------------------------------

    def churn(self, times: int) -> None:
        for _ in range(times):
            if self.dice.random() < 0.3:
                self.model.evict_leaf(self.dice)
                continue
            tier = self.dice.choice(["device", "device", "host", "disk"])
            self.model.store(self.dice.choice(self.prompts), tier, self.dice.randrange(1, 5))

    def run(self, per_second: float) -> None:
        self.period_s = 1 / per_second if per_second else 0.0

    def lose(self, times: int) -> None:
        self.is_deaf = True
        self.churn(times)
        self.is_deaf = False

    def restart(self) -> None:
        self.pub.close()
        self.router.close()
        self.ring.clear()
        self.endless.clear()
        self.open()
        self.model = EngineModel(self)  # type: ignore[arg-type]

    def answer_replays(self, how: Replay) -> None:
        self.mode = how
        self.endless.clear()

    def send(self, frames: tuple[bytes, ...]) -> None:
        self.pub.send_multipart(frames)

    def flood(self, blocks: int, per_second: int) -> float:
        came, went = _coming_and_going(self.dice.getrandbits(40))
        began = time.monotonic()
        for number in range(blocks // FLOOD_BLOCKS // 2):
            for payload in (came, went):
                self.publish(self.model.seq, payload)
                self.model.seq += 1
            self.answer()
            ahead_s = (2 * FLOOD_BLOCKS * number) / per_second - (time.monotonic() - began)
            if ahead_s > 0:
                time.sleep(ahead_s)
        return blocks / (time.monotonic() - began)

    def holds(self) -> list[Row]:
        return [self.model.truth.row({"token_ids": prompt}) for prompt in self.prompts]

    # -- replays -----------------------------------------------------------------------------------

    def answer(self) -> None:
        """Answer whoever has asked for a replay."""
        while self.router.poll(0):
            identity, _, start = self.router.recv_multipart()
            with contextlib.suppress(zmq.ZMQError):  # gone again
                self._answer_one(identity, int.from_bytes(start, "big"))
        for identity in list(self.endless):
            try:
                for _ in range(200):
                    self._reply(identity, *(self.ring[0] if self.ring else (0, b"")))
            except zmq.ZMQError:
                self.endless.discard(identity)

    def _answer_one(self, identity: bytes, first: int) -> None:
        wanted = [one for one in self.ring if one[0] >= first]
        match self.mode:
            case "mute":
                return
            case "garbage":
                for _ in range(50):
                    self.router.send_multipart(
                        [identity, b"", self.dice.randbytes(40)], zmq.NOBLOCK
                    )
                return
            case "endless":
                self.endless.add(identity)
                return
            case "backwards":
                wanted.reverse()
            case "beyond":
                wanted = [(seq + 1000, payload) for seq, payload in wanted]
            case "honest":
                pass
        for seq, payload in wanted:
            self._reply(identity, seq, payload)
        self.router.send_multipart([identity, *end_marker()], zmq.NOBLOCK)

    def _reply(self, identity: bytes, seq: int, payload: bytes) -> None:
        self.router.send_multipart([identity, b"", *message(seq, payload)], zmq.NOBLOCK)


def _coming_and_going(name: int) -> tuple[bytes, bytes]:
    """A batch that stores a chain of blocks, and one that removes it."""
    names = [(name << 20) + number for number in range(FLOOD_BLOCKS)]
    tokens = [(1 << 30) + number for number in range(FLOOD_BLOCKS * BLOCK_SIZE)]
    stored = ["BlockStored", names, None, tokens, BLOCK_SIZE, None, None]
    removed = ["BlockRemoved", names, None]
    encode: Callable[[object], bytes] = msgspec.msgpack.encode
    return encode([0.0, [stored], None]), encode([0.0, [removed], None])


def _live(
    pipe: multiprocessing.connection.Connection,
    host: str,
    ports: tuple[int, int],
    seed: int,
    namespace: str | None,
) -> None:
    if namespace is not None:
        from tests.faults.namespaces import enter  # one of few is anywhere else

        enter(namespace)
    life = _Life(zmq.Context(), host, ports, random.Random(seed))
    pipe.send((None, None))
    due = 0.0
    while True:
        poller = zmq.Poller()
        poller.register(life.router, zmq.POLLIN)
        poller.register(pipe.fileno(), zmq.POLLIN)
        poller.poll(TURN_MS)
        life.answer()
        if life.period_s and time.monotonic() >= due:
            due = time.monotonic() + life.period_s
            life.churn(1)
        while pipe.poll():
            try:
                what, args = pipe.recv()
            except EOFError:
                return
            try:
                pipe.send((None, getattr(life, what)(*args)))
            except Exception as error:  # noqa: BLE001 - sent to the caller
                pipe.send((repr(error), None))
