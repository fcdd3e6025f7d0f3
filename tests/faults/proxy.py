"""A TCP proxy that may be late, slow, mute, lying or gone: between any two ends of TCP.

One thread with a loop of its own; what it does to bytes changes at any moment, for connections that
are open as well. Nothing is drawn but which bytes are garbled, and that from a seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from tests.live.ports import HOST, free_port
from tests.wait import PATIENCE_S

PIECE_BYTES = 1 << 16
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclass(frozen=True)
class Fault:
    """What becomes of bytes, in both directions."""

    late_s: float = 0.0
    bytes_per_s: float = 0.0  # 0: as fast as it goes
    garbled: float = 0.0  # share of pieces in which one byte is another
    cut: float = 0.0  # in which some bytes are missing
    repeated: float = 0.0  # of which some bytes come twice
    swapped: float = 0.0  # of which what came last goes first
    mute: bool = False  # connections open and stay open, and nothing passes
    refusing: bool = False  # who connects is reset


HEALTHY = Fault()
BLACK_HOLE = Fault(mute=True)
REFUSING = Fault(refusing=True)


class Proxy:
    """Stands in front of a port. Use as a context manager."""

    def __init__(self, target_port: int, *, target_host: str = HOST, seed: int = 0) -> None:
        self.port = free_port()
        self.connections = 0
        self.mangled = 0  # pieces that came out other than they went in
        self._target = (target_host, target_port)
        self._dice = random.Random(seed)
        self._fault = HEALTHY
        self._loop = asyncio.new_event_loop()
        self._passing = asyncio.Event()
        self._passing.set()
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    @property
    def endpoint(self) -> str:
        """For ZMQ."""
        return f"tcp://{HOST}:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        serving = asyncio.start_server(self._serve, HOST, self.port)
        self._server = asyncio.run_coroutine_threadsafe(serving, self._loop).result(PATIENCE_S)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(PATIENCE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # -- what tests say ----------------------------------------------------------------------------

    def set(self, fault: Fault) -> None:
        """From now on this becomes of all bytes; what is `refusing` resets open connections too."""
        self._do(lambda: self._set(fault))

    def reset(self) -> None:
        """Reset every open connection, once."""
        self._do(self._reset)

    def _do(self, what: Callable[[], None]) -> None:
        done = threading.Event()

        def do() -> None:
            what()
            done.set()

        self._loop.call_soon_threadsafe(do)
        assert done.wait(PATIENCE_S)

    def _set(self, fault: Fault) -> None:
        self._fault = fault
        if fault.mute:
            self._passing.clear()
        else:
            self._passing.set()
        if fault.refusing:
            self._reset()

    def _reset(self) -> None:
        for writer in self._open:
            _abort(writer)

    # -- connections -------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if self._fault.refusing:
                _abort(writer)
                return
            await self._passing.wait()
            await self._join(reader, writer)
        except (OSError, asyncio.CancelledError):
            _abort(writer)
        finally:
            self._tasks.discard(task)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        both = {writer, far_writer}
        self._open |= both
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, far_writer))
                group.create_task(self._pump(far_reader, writer))
        finally:
            self._open -= both
            for one in both:
                one.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(PIECE_BYTES):
                fault = self._fault
                if fault.late_s:
                    await asyncio.sleep(fault.late_s)
                if fault.bytes_per_s:
                    await asyncio.sleep(len(piece) / fault.bytes_per_s)
                await self._passing.wait()
                writer.write(self._mangle(piece, fault))
                await writer.drain()
        if not writer.is_closing():
            with contextlib.suppress(OSError):
                writer.write_eof()

    def _mangle(self, piece: bytes, fault: Fault) -> bytes:
        dice, whole = self._dice, piece
        if fault.garbled and dice.random() < fault.garbled:
            piece = self._garble(piece)
        a, b = sorted(dice.randrange(len(piece) + 1) for _ in range(2))
        if fault.cut and dice.random() < fault.cut:
            piece = piece[:a] + piece[b:]
        if fault.repeated and dice.random() < fault.repeated:
            piece = piece[:b] + piece[a:b] + piece[b:]
        if fault.swapped and dice.random() < fault.swapped:
            piece = piece[a:] + piece[:a]
        self.mangled += piece != whole
        return piece

    def _garble(self, piece: bytes) -> bytes:
        changed = bytearray(piece)
        changed[self._dice.randrange(len(changed))] ^= 1 << self._dice.randrange(8)
        return bytes(changed)

    async def _close(self) -> None:
        self._server.close()
        self._passing.set()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _abort(writer: asyncio.StreamWriter) -> None:
    """Close with a reset."""
    found = writer.get_extra_info("socket")
    if found is not None:
        with contextlib.suppress(OSError):
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    writer.transport.abort()
