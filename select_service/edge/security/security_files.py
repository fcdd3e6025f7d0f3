"""Tokens, certificates and keys of one process together: read at the start, and again on SIGHUP.

All of them are read before any is put in force, so that a bad file changes nothing;
`config_reload.py` does it, together with the settings.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from indexer.edge.curve import is_exposed
from select_service.edge.security.authority import Authority
from select_service.edge.security.credentials import Credentials
from select_service.edge.security.tls import Certificates
from select_service.errors import CertificatesUnusable, TokenFileUnusable

if TYPE_CHECKING:
    from collections.abc import Callable

    from select_service.settings import Settings

_log = logging.getLogger("select_service")


class SecurityFiles:
    """The security of this process.

    Attributes:
        reloads: rereads of all files, by outcome.
    """

    def __init__(self, settings: Settings) -> None:
        """Read every configured file.

        Raises:
            SecurityFileUnusable, indexer.errors.KeyFileUnusable: one of them cannot be used.
        """
        self.authority: Authority | None = None
        if settings.token_file is not None:
            self.authority = Authority(
                settings.token_file,
                bytes_max=settings.token_file_bytes_max,
                chars_max=settings.token_chars_max,
            )
        self.certificates: Certificates | None = None
        if settings.tls_cert is not None:
            self.certificates = Certificates(
                settings.tls_cert, settings.tls_key, settings.tls_client_ca
            )
        self.credentials = Credentials(settings)
        self.reloads = {"done": 0, "refused": 0}
        secret = [settings.tls_key, settings.curve_key, settings.peer_token_file]
        if self.authority is not None and any(one.is_plain for one in self.authority.book):
            secret.append(settings.token_file)
        for path in secret:
            if path is not None and is_exposed(path):
                _log.warning("%s can be read by others than its owner: chmod 600", path)

    def tick(self, now: float) -> None:
        """Apply expiries and changed certificates; called a few times a second."""
        if self.authority is not None:
            self.authority.tick()
        if self.certificates is not None:
            self.certificates.watch(now)

    def reject(self, error: Exception) -> None:
        """Count a rejected reload, also at the part whose file was at fault."""
        self.reloads["refused"] += 1
        if isinstance(error, TokenFileUnusable) and self.authority is not None:
            self.authority.reject()
        elif isinstance(error, CertificatesUnusable) and self.certificates is not None:
            self.certificates.reject()

    def prepare(self) -> Callable[[], None]:
        """Read every file; return a function that puts them all in force. Callable in any thread.

        Raises:
            SecurityFileUnusable, indexer.errors.KeyFileUnusable: one of them cannot be used.
        """
        authority, certificates = self.authority, self.certificates
        book = None if authority is None else authority.prepare()
        context = None if certificates is None else certificates.prepare()
        keys = self.credentials.prepare()

        def put_in_force() -> None:
            if authority is not None and book is not None:
                authority.adopt(book)
            if certificates is not None and context is not None:
                certificates.adopt(context)
            if keys is not None:
                keys()
            self.reloads["done"] += 1

        return put_in_force
