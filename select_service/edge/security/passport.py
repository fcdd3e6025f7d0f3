"""What we show to other services we fetch from, and what we ask of them: a token, certificates.

The token is read from its file each time it is shown, so that it can change; nobody else sees it.
It is shown only to whom it is meant for: to who proves himself by a certificate of `--peer-ca` or,
without that, to a host that somebody has configured. Where a replica says its snapshot is to be
fetched is the word of a message, and not enough.
"""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from indexer.edge.plain_file import open_plain

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Passport"]

TOKEN_BYTES_MAX: Final = 4096
"""Of the file: eight times the longest token there is."""


class Passport:
    """Credentials of this process as a client of its like.

    Attributes:
        withheld: Times the token was not shown, because nobody knows who is there.
        failures: Times its file could not be read.
    """

    def __init__(
        self,
        token_file: str | None = None,
        ca: str | None = None,
        certificate: tuple[str, str | None] | None = None,
    ) -> None:
        """Know the files; none is read yet.

        Args:
            token_file: has the token, and nothing else.
            ca: certificates of those who vouch for peers; None: the system's.
            certificate: file of our own and of its key, shown to peers who ask for one.
        """
        self._token_file = token_file
        self._ca = ca
        self._certificate = certificate
        self.withheld = 0
        self.failures = 0

    @property
    def scheme(self) -> str:
        """How peers are spoken to that do not say it themselves."""
        return "http" if self._ca is None else "https"

    def tls(self) -> ssl.SSLContext:
        """Return what verifies peers. Reads files, for tens of ms.

        Raises:
            OSError: they cannot be read, or are no certificates.
        """
        context = ssl.create_default_context(cafile=self._ca)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self._certificate is not None:
            context.load_cert_chain(*self._certificate)
        return context

    def headers(self, url: str, configured_host: str | None) -> Mapping[str, str]:
        """Return the header with the token, if it may be shown there.

        Args:
            url: what is fetched.
            configured_host: the host somebody has told us to listen to, or to fetch from.
        """
        if self._token_file is None:
            return {}
        parts = urlsplit(url)
        if self._ca is not None:  # nothing said by the way may lead it past TLS
            may_see = parts.scheme == "https"
        else:
            may_see = configured_host is not None and parts.hostname == configured_host
        if not may_see:
            self.withheld += 1
            return {}
        try:
            with open_plain(self._token_file) as file:
                text = file.read(TOKEN_BYTES_MAX + 1)
            token = text.strip().decode("ascii")
        except (OSError, ValueError):
            self.failures += 1
            return {}
        if len(text) > TOKEN_BYTES_MAX or not token or not token.isprintable() or " " in token:
            self.failures += 1
            return {}
        return {"authorization": f"Bearer {token}"}
