"""TLS on the TCP port, with certificates that may be exchanged while connections go on.

uvicorn gets one context for the life of the server; as each client says hello, its handshake is
given the newest one. So certificate, key and client authorities change together or not at all, and
whoever is connected stays so. With client certificates it is TLS 1.3 alone: in 1.2 a client may go
on with an old session, which outlives the authority that vouched for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import ssl
from typing import Final, NamedTuple, TypeAlias

from indexer.edge.plain_file import check_plain
from select_service.errors import CertificatesUnusable

__all__ = ["Certificates"]

_log = logging.getLogger("select_service")

FILE_BYTES_MAX: Final = 1 << 20
"""Of each; they are read on the event loop, which one that has changed must not hold."""

LOOK_EVERY_S: Final = 2.0
"""How late an exchanged file may be noticed; a look costs some microseconds."""

_Stamp: TypeAlias = tuple[tuple[int, int, int] | None, ...]


class Prepared(NamedTuple):
    """What the files said, and how they looked before they were read."""

    context: ssl.SSLContext
    stamp: _Stamp


class Certificates:
    """The server's side of TLS.

    Attributes:
        context: for the server, for its whole life.
        reloads: Times the files were read again, by outcome.
    """

    def __init__(self, cert: str, key: str | None, client_ca: str | None) -> None:
        """Read the files.

        Raises:
            CertificatesUnusable: they cannot be used.
        """
        self._cert, self._key, self._client_ca = cert, key, client_ca
        self._looked_at = 0.0
        self.reloads = {"done": 0, "refused": 0}
        self._newest, self._stamp = self.prepare()
        self.context = self.prepare().context
        self.context.sni_callback = self._greet

    def _greet(self, client: ssl.SSLObject, _name: str | None, _old: ssl.SSLContext) -> None:
        """A client says hello, with or without a server's name: give it the newest context."""
        client.context = self._newest

    def prepare(self) -> Prepared:
        """Make a context of what the files say now, for `adopt`.

        Raises:
            CertificatesUnusable: they cannot be used.
        """
        stamp = self._look()  # first: a file that is exchanged meanwhile is read once more
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET
        context.num_tickets = 0
        context.set_alpn_protocols(["http/1.1"])
        try:
            for path in (self._cert, self._key or self._cert):
                check_plain(path, FILE_BYTES_MAX)
            # a key that is encrypted must not ask for a password on a terminal
            context.load_cert_chain(self._cert, self._key, password=_no_password)
        except (OSError, ValueError) as error:
            raise CertificatesUnusable(f"certificate {self._cert}: {_why(error)}") from None
        if self._client_ca is not None:
            try:
                check_plain(self._client_ca, FILE_BYTES_MAX)
                context.load_verify_locations(cafile=self._client_ca)
            except (OSError, ValueError) as error:
                raise CertificatesUnusable(f"client CA {self._client_ca}: {_why(error)}") from None
            context.verify_mode = ssl.CERT_REQUIRED
            context.minimum_version = ssl.TLSVersion.TLSv1_3
        return Prepared(context, stamp)

    def adopt(self, prepared: Prepared) -> None:
        """Use it for handshakes from now on."""
        self._newest, self._stamp = prepared
        self.reloads["done"] += 1
        _log.info("certificates read again")

    def reject(self) -> None:
        """Note that files were not taken over."""
        self.reloads["refused"] += 1

    def watch(self, now: float) -> None:
        """Read the files again if they have changed; called a few times a second.

        Args:
            now: loop time.
        """
        if now - self._looked_at < LOOK_EVERY_S:
            return
        self._looked_at = now
        stamp = self._look()
        if stamp == self._stamp:
            return
        self._stamp = stamp  # a pair of which one half is new fails once, not with every look
        try:
            self.adopt(self.prepare())
        except CertificatesUnusable as error:
            self.reject()
            _log.error("certificates stay as they are: %s", error)

    def _look(self) -> _Stamp:
        return tuple(map(_stamp_of, (self._cert, self._key, self._client_ca)))


def _stamp_of(path: str | None) -> tuple[int, int, int] | None:
    if path is None:
        return None
    with contextlib.suppress(OSError):
        found = os.stat(path)
        return found.st_mtime_ns, found.st_ino, found.st_size
    return None


def _no_password() -> str:
    raise ValueError("the key is encrypted, and nobody is there to be asked")


def _why(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return error.reason or "not PEM"
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
