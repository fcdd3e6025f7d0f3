"""Answers that are written, and that the kernel does not have yet: lost if the connection breaks.

A TLS transport reports neither a write that the kernel has refused nor what is encrypted and
waits for the kernel, so the kernel is asked.
"""

from __future__ import annotations

import select
import socket
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import asyncio

    from select_service.edge.codec.responses import Response
    from select_service.edge.http.pieces import Flow

WRITE_BUFFER_MAX: Final = 65536
"""Unsent bytes of a connection from which on its writers wait: the default of asyncio."""


class UnsentAnswers:
    """Those of one connection, with what a client would not know of if they were lost."""

    def __init__(
        self, transport: asyncio.Transport, flow: Flow, tls_socket: socket.socket | None
    ) -> None:
        self._transport, self._flow, self._tls_socket = transport, flow, tls_socket
        self.answers: tuple[Response, ...] = ()
        self._had_room = False  # under TLS: the kernel had room when it was asked last

    def watch(self, answer: Response, loop: asyncio.AbstractEventLoop) -> None:
        """Watch over a written answer: it is lost if the connection breaks before it is sent.

        Sent means that the kernel has all of it, which `resumed` reports; until then writers
        wait for every byte.
        """
        if self._tls_socket is not None and is_reset(self._tls_socket):
            answer.lost()
        elif self._transport.get_write_buffer_size():
            self._transport.set_write_buffer_limits(1, 0)
            if self._flow.write_paused:
                self.answers += (answer,)
        elif self._tls_socket is not None and not self._watch_if_held_up(answer):
            # uvloop before 0.23 writes what is encrypted at the end of the loop's turn
            loop.call_soon(self._watch_if_held_up, answer)

    def _watch_if_held_up(self, answer: Response) -> bool:
        """Watch over an answer that the kernel has no room for under TLS; return whether so."""
        assert self._tls_socket is not None
        held_up = not has_room(self._tls_socket)
        if held_up:
            self.answers += (answer,)
            self._had_room = False
        return held_up

    def look(self) -> None:
        """Under TLS, note what the kernel has all of by now: twice it had room for more."""
        if self.answers and self._tls_socket is not None and not self._flow.write_paused:
            had_room, self._had_room = self._had_room, has_room(self._tls_socket)
            if had_room and self._had_room:
                self.answers = ()

    def resumed(self) -> None:
        """The transport has written everything: without TLS the kernel has it."""
        if self.answers:
            if self._tls_socket is None:
                self.answers = ()
            self._transport.set_write_buffer_limits(WRITE_BUFFER_MAX, WRITE_BUFFER_MAX // 4)

    def close(self, *, in_order: bool) -> None:
        """The connection has ended; in order, TLS closes once the kernel has all."""
        if not (in_order and self._tls_socket is not None):
            for answer in self.answers:
                answer.lost()
        self.answers = ()


_TCP_CLOSE: Final = b"\x07"  # the first byte of Linux's tcp_info is the state


def is_reset(connected: socket.socket) -> bool:
    """Return whether the other end has reset a TCP connection; only Linux shows it, else False."""
    if sys.platform != "linux":
        return False
    try:
        return connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) == _TCP_CLOSE
    except OSError:
        return True  # closed here


def has_room(connected: socket.socket) -> bool:
    """Return whether the kernel would take more of a connection; only Linux shows it, else True."""
    if sys.platform != "linux" or connected.fileno() < 0:
        return True
    asked = select.poll()
    asked.register(connected, select.POLLOUT)
    return bool(asked.poll(0))
