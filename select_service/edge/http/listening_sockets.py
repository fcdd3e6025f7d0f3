"""The listening sockets: a TCP port, a Unix domain socket, or both; and a side entrance.

The side entrance is a TCP port for clients on the network when the API itself is not reachable
there: it serves replicas, probes and Prometheus, with `SIDE_PATHS` only.

Everything is bound before the service starts, so that failures show at once, but no client is
accepted before it has started. `app.py` controls this; `connection.py` handles what arrives.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import stat
from typing import TYPE_CHECKING, Final

from select_service.tcp_listener import bind_tcp

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

SIDE_PATHS: Final = ("/health", "/ready", "/metrics", "/replica_sync/snapshot")
"""The paths served by the side entrance."""

NOT_AT_THE_SIDE: Final = f"the side entrance (--side-port) has {', '.join(SIDE_PATHS)} alone"

_SILENT_S: Final = 60
_PROBES: Final = 4
"""A peer that vanished silently is noticed after 60 + 4 * 15 s; until then its request may hold a
place in the queue."""
_PROBE_EVERY_S: Final = 15

_PROBE_S: Final = 1.0
"""How long the owner of an existing socket file may take to show that it is alive."""


class CannotListenError(Exception):
    """An address cannot be bound; the text says which, and why."""


def bind(host: str, port: int) -> list[socket.socket]:
    """Bind without listening: no client is accepted before the service has started."""
    listeners = bind_tcp(host, port)
    for one in listeners:
        _probe_when_silent(one)
        one.setblocking(False)  # noqa: FBT003 - the name of the parameter is `flag`
    return listeners


def _probe_when_silent(listener: socket.socket) -> None:
    """Enable TCP keepalive, so that the kernel checks whether silent peers still exist.

    Accepted connections inherit it, which saves four calls for each.
    """
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", _SILENT_S),
        ("TCP_KEEPINTVL", _PROBE_EVERY_S),
        ("TCP_KEEPCNT", _PROBES),
    ):
        if hasattr(socket, option):  # platform-dependent
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


class UnixSocket:
    """A socket file that exists only while it is listened on.

    It is bound under a temporary name and renamed by `appear`: clients never meet a file that
    refuses them or has the wrong mode, and a dead process's file is replaced atomically. A live
    one's is not replaced.
    """

    def __init__(self, path: str, mode: int) -> None:
        """Bind under a temporary name beside the path.

        Raises:
            CannotListenError: the path is taken, or no socket can be created beside it.
        """
        self.path = path
        _check_free(path)
        self._bound_path: str | None = f"{path}.{secrets.token_hex(2)}"
        self._inode: tuple[int, int] | None = None  # once it has appeared
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.socket.bind(self._bound_path)
            os.chmod(self._bound_path, mode)
        except OSError as error:
            self.close()
            raise _cannot(path, error) from None
        self.socket.setblocking(False)  # noqa: FBT003 - the name of the parameter is `flag`

    def appear(self) -> None:
        """Take the path, now that the socket listens.

        Raises:
            CannotListenError: another process took it first.
        """
        assert self._bound_path is not None, "appears once"
        _check_free(self.path)
        try:
            found = os.stat(self._bound_path)
            os.rename(self._bound_path, self.path)
        except OSError as error:
            raise _cannot(self.path, error) from None
        self._inode, self._bound_path = (found.st_dev, found.st_ino), None

    def vanish(self) -> None:
        """Remove the file, unless it is another process's by now. Idempotent."""
        with contextlib.suppress(OSError):
            if self._bound_path is not None:
                os.unlink(self._bound_path)
        with contextlib.suppress(OSError):
            found = os.lstat(self.path)
            if (found.st_dev, found.st_ino) == self._inode:
                os.unlink(self.path)
        self._bound_path = self._inode = None

    def close(self) -> None:
        """Remove the file and close the socket. Idempotent."""
        self.vanish()
        self.socket.close()


class ListeningSockets:
    """All sockets a process listens on. A context manager; leaving it closes them."""

    def __init__(
        self,
        tcp: Sequence[socket.socket] = (),
        unix: UnixSocket | None = None,
        side: Sequence[socket.socket] = (),
    ) -> None:
        """Take bound sockets; a name with several addresses has one for each."""
        self.tcp = tcp
        self.unix = unix
        self.side = side

    @classmethod
    def bound(
        cls,
        address: tuple[str, int] | None,
        path: str | None,
        mode: int,
        side: tuple[str, int] | None = None,
    ) -> ListeningSockets:
        """Bind the requested sockets: TCP at an address, a Unix socket at a path, a side entrance.

        Raises:
            CannotListenError: one of them cannot be bound; then none is kept.
        """
        with contextlib.ExitStack() as undo:
            found = cls()
            undo.push(found)
            found.tcp = () if address is None else _bind(*address)
            found.unix = None if path is None else UnixSocket(path, mode)
            found.side = () if side is None else _bind(*side)
            undo.pop_all()
        return found

    @property
    def sockets(self) -> list[socket.socket]:
        """The listening sockets of the API."""
        return [*self.tcp, *([] if self.unix is None else [self.unix.socket])]

    @property
    def port(self) -> int:
        """The TCP port; 0: none."""
        return int(self.tcp[0].getsockname()[1]) if self.tcp else 0

    @property
    def replica_port(self) -> int:
        """The port for replicas; 0: none."""
        return int(self.side[0].getsockname()[1]) if self.side else self.port

    def describe(self) -> dict[str, object]:
        """Return the addresses, for the log."""
        addresses: dict[str, object] = {}
        if self.tcp:
            addresses["host"], addresses["port"] = _shown(self.tcp), self.port
        if self.unix is not None:
            addresses["uds"] = self.unix.path
        if self.side:
            addresses["side_host"], addresses["side_port"] = _shown(self.side), self.replica_port
        return addresses

    def appear(self) -> None:
        """Publish the socket file, now that the socket listens.

        Raises:
            CannotListenError: another process took the path first.
        """
        if self.unix is not None:
            self.unix.appear()

    def vanish(self) -> None:
        """Remove the socket file. Idempotent."""
        if self.unix is not None:
            self.unix.vanish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.unix is not None:
            self.unix.close()
        for one in (*self.tcp, *self.side):
            one.close()


def _shown(listeners: Sequence[socket.socket]) -> str:
    return ", ".join(one.getsockname()[0] for one in listeners)


def _bind(host: str, port: int) -> Sequence[socket.socket]:
    try:
        return bind(host, port)
    except OSError as error:
        text = f"{host} port {port}: {error}"
        if error.errno == errno.EADDRINUSE:
            text += ": another process listens there. Stop it, or name a port that is free, or 0"
        raise CannotListenError(text) from None


def _check_free(path: str) -> None:
    """Refuse a path that leads to a live process, or to something other than a socket."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise _cannot(path, error) from None
    if not stat.S_ISSOCK(mode):
        raise CannotListenError(f"{path}: a file that is no socket is in the way")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return  # its process is dead, or has just left
        except TimeoutError:
            pass  # alive, and overloaded
        except OSError as error:
            raise _cannot(path, error) from None
    raise CannotListenError(f"{path}: a process that lives listens there")


def _cannot(path: str, error: OSError) -> CannotListenError:
    return CannotListenError(f"{path}: {error.strerror or error}")
