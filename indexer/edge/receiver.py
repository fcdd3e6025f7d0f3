"""Reads open ZMQ sockets without blocking, and without copying much in one go.

`sockets.py` opens them. Where the compiled receiver finds pyzmq's libzmq it reads many messages per
call; the plain form beside it does the same.
"""

from __future__ import annotations

import sys
from io import BytesIO
from typing import Any, Final

import zmq

from indexer.compiled import usable
from indexer.core.events import HEAD_BYTES, Oversized

READ_BYTES_MAX: Final = 256 << 10
"""Bytes read from a socket at once beyond its first message; copying them takes some 30 µs."""

_NOBLOCK: Final = int(zmq.NOBLOCK)

_IS_COMPILED: Final = usable("indexer._frames", 3)
if _IS_COMPILED:
    from indexer import _frames


def _finds_libzmq() -> bool:
    """Whether the compiled receiver can be used: pyzmq may hide its libzmq, or have none."""
    path: str | None = getattr(sys.modules.get("zmq.backend.cython._zmq"), "__file__", None)
    return _IS_COMPILED and path is not None and _frames.find(path)


_FINDS_LIBZMQ: Final = _finds_libzmq()


class LongFrame:
    """A long frame as libzmq holds it, copied piece by piece. The one of `_frames.pyx` is a twin.

    Attributes:
        size: Bytes of the whole.
        copied: Bytes copied so far.
    """

    __slots__ = ("_content", "_frame", "copied", "size")

    def __init__(self, frame: zmq.Frame) -> None:
        self._frame = frame
        self._content = BytesIO()  # its `getvalue` copies nothing
        self.size = len(frame)
        self.copied = 0

    def copy(self, most: int) -> bytes | None:
        """Copy up to so many bytes more; return the whole once all are copied, else None."""
        self._content.write(self._frame.buffer[self.copied : self.copied + most])
        self.copied = self._content.tell()
        return None if self.copied < self.size else self._content.getvalue()


if _IS_COMPILED:
    from indexer._frames import LongFrame as CompiledLongFrame
else:
    CompiledLongFrame = LongFrame  # type: ignore[assignment,misc]

_LONG_FRAMES: Final = (LongFrame, CompiledLongFrame)
_SIZED: Final = (LongFrame, CompiledLongFrame, Oversized)


class Receiver:
    """A connected socket that is read without blocking.

    Of a frame beyond the limit only the head is returned, as `Oversized`; the rest is never copied.
    A message with a frame beyond `READ_BYTES_MAX` takes several calls, each of which copies at most
    that much; it is returned by the last one.
    """

    __slots__ = (
        "_address",
        "_longest",
        "_socket",
        "_unfinished",
        "fd",
    )

    def __init__(self, socket: zmq.Socket[bytes], longest: int) -> None:
        """Read an open socket.

        Args:
            socket: non-blocking.
            longest: bytes of a frame that is returned whole.
        """
        self._socket = socket
        self._longest = longest
        self._address = socket.underlying
        self._unfinished: list[Any] | None = None  # frames of a message, some to be copied yet
        self.fd: int = socket.getsockopt(zmq.FD)  # type: ignore[assignment]

    @property
    def is_copying(self) -> bool:
        """Whether a message has come that the next call copies on."""
        return self._unfinished is not None

    def _copy_on(self) -> list[bytes] | None:
        """Copy a piece of the message that is being copied; return it once it is whole."""
        frames = self._unfinished
        assert frames is not None
        left = READ_BYTES_MAX
        for at, frame in enumerate(frames):
            if isinstance(frame, _LONG_FRAMES):
                before = frame.copied
                content = frame.copy(left)
                if content is None:
                    return None
                frames[at] = content
                left -= len(content) - before
        self._unfinished = None
        return frames

    def receive(self) -> list[bytes] | None:
        """Return the frames of the next message; None if there is none, or it `is_copying`."""
        if self._unfinished is None:
            self._unfinished = self._receive_frames()
        return None if self._unfinished is None else self._copy_on()

    def _receive_frames(self) -> list[Any] | None:
        receive = self._socket.recv
        try:
            # not `recv_multipart`: a frame knows whether another follows; asking the socket costs
            # more than receiving
            frame = receive(_NOBLOCK, copy=False)
            frames = [self._content(frame)]
            while frame.more:
                frame = receive(_NOBLOCK, copy=False)
                frames.append(self._content(frame))
        except zmq.ZMQError:  # usually Again; a failing socket has no message either
            return None
        return frames

    def _content(self, frame: zmq.Frame) -> bytes | LongFrame:
        size = len(frame)
        if READ_BYTES_MAX < size <= self._longest:
            return LongFrame(frame)
        if size <= self._longest:
            return frame.bytes
        return Oversized.of(bytes(frame.buffer[:HEAD_BYTES]), size)

    def receive_some(self, messages_max: int, apart: bytes) -> list[list[bytes]]:
        """Return the next messages, if any; the last one may be of the topic `apart`.

        Stops there, and after a quarter of a megabyte as well.
        """
        if self._unfinished is not None:
            message = self._copy_on()
            return [] if message is None else [message]
        if self._socket.closed:
            return []
        if _FINDS_LIBZMQ:
            limits = messages_max, READ_BYTES_MAX, self._longest
            messages = _frames.receive(self._address, *limits, apart)
            if messages and any(isinstance(one, _LONG_FRAMES) for one in messages[-1]):
                self._unfinished = messages.pop()
            return messages
        messages = []
        size = 0
        while len(messages) < messages_max and size < READ_BYTES_MAX:
            message = self._receive_frames()
            if message is None:
                break
            if any(isinstance(one, LongFrame) for one in message):
                self._unfinished = message
                break
            messages.append(message)
            if message[0] == apart:
                break
            size += sum(map(len, message))
        return messages

    @property
    def is_given_up(self) -> bool:
        """Whether a dealer is read empty, and its libzmq has no connection and will make none.

        That only happens after a breach of protocol: a message beyond the limit, or a peer that
        does not speak ZMQ. Connections that break otherwise are re-established silently.
        """
        return not int(self._socket.getsockopt(zmq.EVENTS)) & (zmq.POLLIN | zmq.POLLOUT)

    def close(self) -> None:
        """Close the socket and drop what was not read."""
        self._unfinished = None
        self._socket.close(linger=0)
