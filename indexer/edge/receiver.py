"""Reads open ZMQ sockets without blocking, and without copying much in one go.

`sockets.py` opens them. Where the compiled receiver finds pyzmq's libzmq it reads many messages per
call, and copies long ones in pieces; the plain form copies each message whole.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import zmq

from indexer.compiled import usable
from indexer.core.events import HEAD_BYTES, Oversized

READ_BYTES_MAX: Final = 256 << 10
"""Bytes read from a socket at once beyond its first message; copying them takes some 30 µs."""

_IS_COMPILED: Final = usable("indexer._frames", 3)
if _IS_COMPILED:
    from indexer import _frames


def _finds_libzmq() -> bool:
    """Whether the compiled receiver can be used: pyzmq may hide its libzmq, or have none."""
    path: str | None = getattr(sys.modules.get("zmq.backend.cython._zmq"), "__file__", None)
    return _IS_COMPILED and path is not None and _frames.find(path)


_FINDS_LIBZMQ: Final = _finds_libzmq()


class Receiver:
    """A connected socket that is read without blocking.

    Of a frame beyond the limit only the head is returned, as `Oversized`; the rest is never copied.
    A message with a frame beyond `READ_BYTES_MAX` takes several calls, each of which copies at most
    that much; it is returned by the last one.
    """

    __slots__ = ("_address", "_longest", "_socket", "_unfinished", "fd")

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
            if not isinstance(frame, bytes):
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
        found = self.receive_some(1, b"")
        return found[0] if found else None

    def receive_some(self, messages_max: int, apart: bytes) -> list[list[bytes]]:
        """Return the next messages, if any; the last one may be of the topic `apart`.

        Stops there, and after a quarter of a megabyte as well.
        """
        if self._unfinished is not None:
            message = self._copy_on()
            return [] if message is None else [message]
        if self._socket.closed:
            return []
        messages: list[list[bytes]]
        if _FINDS_LIBZMQ:
            limits = messages_max, READ_BYTES_MAX, self._longest
            messages = _frames.receive(self._address, *limits, apart)
            if messages and not all(isinstance(one, bytes) for one in messages[-1]):
                self._unfinished = messages.pop()
            return messages
        messages, size = [], 0
        while len(messages) < messages_max and size < READ_BYTES_MAX:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.ZMQError:  # usually Again; a failing socket has no message either
                break
            messages.append([self._content(frame) for frame in frames])
            if messages[-1][0] == apart:
                break
            size += sum(map(len, frames))
        return messages

    def _content(self, frame: zmq.Frame) -> bytes:
        size = len(frame)
        if size <= self._longest:
            return frame.bytes
        return Oversized.of(bytes(frame.buffer[:HEAD_BYTES]), size)

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
