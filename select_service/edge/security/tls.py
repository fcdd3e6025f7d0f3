"""TLS on the TCP port, with certificates that can be replaced without closing connections.

uvicorn gets one context for the life of the server; at each ClientHello the handshake is given the
newest one. So certificate, key and client CAs change together or not at all, and open connections
are unaffected. With client certificates only TLS 1.3 is offered: in 1.2 a client may resume an old
session, which outlives the CA that vouched for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import ssl
from typing import Final, NamedTuple, TypeAlias

from indexer.plain_file import check_plain
from select_service.errors import CertificatesUnusable

_log = logging.getLogger("select_service")

FILE_BYTES_MAX: Final = 1 << 20
"""Limit of each file; a change is read on the event loop, and must not hold it."""

LOOK_EVERY_S: Final = 2.0
"""How late a replaced file may be noticed; a check costs some microseconds."""

_Stamp: TypeAlias = tuple[tuple[int, int, int] | None, ...]


class Prepared(NamedTuple):
    """A context, and the stamps of its files before they were read."""

    context: ssl.SSLContext
    stamp: _Stamp


class Certificates:
    """The server's side of TLS.

    Attributes:
        context: for the server, for its whole life.
        reloads: rereads of the files, by outcome.
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
        """Switch a handshake to the newest context, with or without a server name."""
        client.context = self._newest

    def prepare(self) -> Prepared:
        """Create a context from the current files, for `adopt`.

        Raises:
            CertificatesUnusable: they cannot be used.
        """
        stamp = self._look()  # first: a file replaced meanwhile is then read once more
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET
        context.num_tickets = 0
        context.set_alpn_protocols(["http/1.1"])
        try:
            for path in (self._cert, self._key or self._cert):
                check_plain(path, FILE_BYTES_MAX)
            # OpenSSL would ask for the password of an encrypted key on the terminal.
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
        """Use the context for handshakes from now on."""
        self._newest, self._stamp = prepared
        self.reloads["done"] += 1
        _log.info("certificates read again")

    def reject(self) -> None:
        """Count files that were rejected."""
        self.reloads["refused"] += 1

    def watch(self, now: float) -> None:
        """Reread the files if they have changed; called a few times a second.

        Args:
            now: loop time.
        """
        if now - self._looked_at < LOOK_EVERY_S:
            return
        self._looked_at = now
        stamp = self._look()
        if stamp == self._stamp:
            return
        self._stamp = stamp  # a half-replaced pair fails once, not at every check
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
