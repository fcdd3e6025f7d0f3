"""What the kernel knows of a connection, where a TLS transport does not tell."""

from __future__ import annotations

import select
import socket
import sys
from typing import Final

_TCP_CLOSE: Final = b"\x07"  # the first byte of Linux's tcp_info is the state


def is_reset(connected: socket.socket) -> bool:
    """Tell whether the other end has reset a TCP connection; only Linux tells, else False."""
    if sys.platform != "linux":
        return False
    try:
        return connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) == _TCP_CLOSE
    except OSError:
        return True  # closed here


def has_room(connected: socket.socket) -> bool:
    """Tell whether the kernel would take something of a connection; only Linux tells, else True."""
    if sys.platform != "linux" or connected.fileno() < 0:
        return True
    asked = select.poll()
    asked.register(connected, select.POLLOUT)
    return bool(asked.poll(0))
