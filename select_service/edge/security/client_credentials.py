"""Our credentials as a client of other services, and what we require of them: token, certificates.

The token is reread from its file for each use, so that it can change. It is shown only to its
intended recipients: servers with a certificate of `--peer-ca` or, without that option, configured
hosts. The URL at which a replica offers its snapshot comes from a message, which is not enough.
"""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from select_service.token_file import TokenUnreadable, bearer_header

if TYPE_CHECKING:
    from collections.abc import Mapping


class ClientCredentials:
    """Credentials of this process as a client of other replicas and peers.

    Attributes:
        withheld: times the token was not shown, because the server was not verified.
        failures: times its file could not be read.
    """

    def __init__(
        self,
        token_file: str | None = None,
        ca: str | None = None,
        certificate: tuple[str, str | None] | None = None,
    ) -> None:
        """Remember the files; none is read yet.

        Args:
            token_file: contains the token, and nothing else.
            ca: certificates of the authorities for peers; None: the system's.
            certificate: files of our certificate and its key, for peers that ask for one.
        """
        self._token_file = token_file
        self._ca = ca
        self._certificate = certificate
        self.withheld = 0
        self.failures = 0

    @property
    def scheme(self) -> str:
        """The URL scheme for peers that do not announce one."""
        return "http" if self._ca is None else "https"

    def tls(self) -> ssl.SSLContext:
        """Return a context that verifies peers. Reads files, for tens of ms.

        Raises:
            OSError: they cannot be read, or are not certificates.
        """
        context = ssl.create_default_context(cafile=self._ca)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self._certificate is not None:
            context.load_cert_chain(*self._certificate)
        return context

    def headers(self, url: str, configured_host: str | None) -> Mapping[str, str]:
        """Return the header with the token, if it may be shown to this server.

        Args:
            url: to be fetched.
            configured_host: the host we were configured to listen to, or to fetch from.
        """
        if self._token_file is None:
            return {}
        parts = urlsplit(url)
        if self._ca is not None:  # whatever a message says, the token needs TLS
            may_see = parts.scheme == "https"
        else:
            may_see = configured_host is not None and parts.hostname == configured_host
        if not may_see:
            self.withheld += 1
            return {}
        try:
            return bearer_header(self._token_file)
        except TokenUnreadable:
            self.failures += 1
            return {}
