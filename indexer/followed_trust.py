"""Trust in the authorities of a file, which is read again when it has been replaced.

So is a client's own certificate. Both rotate, and clients outlive them. Open connections stay as
they are; each new one is made with what the files are then. Files that cannot be used change
nothing.
"""

from __future__ import annotations

import logging
import os
import ssl
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import socket
    from pathlib import Path
    from typing import TypeAlias

    Stamp: TypeAlias = tuple[tuple[int, int, int] | None, ...]

_log = logging.getLogger("indexer")


class FollowedTrust(ssl.SSLContext):
    """The context of a client that verifies servers.

    Args:
        ca: certificates of the authorities; None: the system's.
        certificate: files of the client's own certificate and its key.

    Raises:
        OSError: a file cannot be read, or has no certificates (an ssl.SSLError).
    """

    def __new__(cls, *_: object, **__: object) -> Self:
        """Make a context of the usual kind; new connections use those read from the files."""
        return super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT)

    def __init__(self, ca: str | Path | None, certificate: tuple[str, str] | None = None) -> None:
        self._files = (None if ca is None else str(ca), *(certificate or ()))
        self._stamp = _stamp_of(self._files)  # first: one replaced meanwhile is then read again
        self._newest = _read(*self._files)

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        """Begin a connection of an event loop."""
        return self._current().wrap_bio(*arguments, **options)

    def wrap_socket(self, sock: socket.socket, *arguments: Any, **options: Any) -> ssl.SSLSocket:
        """Begin a connection of a thread."""
        return self._current().wrap_socket(sock, *arguments, **options)

    def _current(self) -> ssl.SSLContext:
        """Return the context of the files as they are; of unusable ones the last usable."""
        stamp = _stamp_of(self._files)
        if stamp != self._stamp:
            self._stamp = stamp  # files that cannot be used are read once
            try:
                self._newest = _read(*self._files)
            except (OSError, ValueError) as error:
                names = ", ".join(filter(None, self._files))
                why = getattr(error, "strerror", None) or error
                _log.warning("%s: %s; what was read before holds", names, why)
        return self._newest


def _read(ca: str | None, cert: str | None = None, key: str | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if cert is not None:
        context.load_cert_chain(cert, key)
    return context


def _stamp_of(files: tuple[str | None, ...]) -> Stamp:
    return tuple(map(_stamp, files))


def _stamp(path: str | None) -> tuple[int, int, int] | None:
    if path is None:
        return None
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
