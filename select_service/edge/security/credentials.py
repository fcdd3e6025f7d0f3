"""How this process authenticates to workers and replicas, and they to it: CURVE keys, a passport.

Built from the settings before anything is opened; `driver.py` passes it to whatever opens sockets.
"""

from __future__ import annotations

import logging
import ssl
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from indexer.edge.curve import ReplicaKeys, read_key_file
from select_service.token_file import TokenUnreadable, bearer_header

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from indexer.edge.curve import KeyPair
    from select_service.settings import Settings

_log = logging.getLogger("select_service")


class Credentials:
    """The configured keys and files; None if not configured."""

    def __init__(self, settings: Settings) -> None:
        """Read the key files.

        Raises:
            indexer.edge.curve.KeyFileError: one of them cannot be used.
        """
        self.keys: KeyPair | None = None
        self.when_other_keys: list[Callable[[KeyPair], None]] = []
        """Called with our new key pair when it changes; must not fail."""
        self._key_path = settings.curve_key
        self.replica_keys: ReplicaKeys | None = None
        if settings.curve_key is not None:
            self.keys = read_key_file(settings.curve_key)
            self.replica_keys = ReplicaKeys(self.keys, settings.curve_replica_keys)
        self.worker_key = settings.curve_worker_key
        certificate = None
        if settings.tls_cert is not None:
            certificate = settings.tls_cert, settings.tls_key
        self.passport = ClientCredentials(settings.peer_token_file, settings.peer_ca, certificate)
        self._has_ca = settings.peer_ca is not None

    def prepare(self) -> Callable[[], None] | None:
        """Reread the key files; return a function that puts them in force, None if there are none.

        Raises:
            indexer.errors.KeyFileUnusable: one of them cannot be used.
        """
        replicas = self.replica_keys
        if self._key_path is None or replicas is None:
            return None
        own = read_key_file(self._key_path)
        keys = replicas.prepare(own)

        def put_in_force() -> None:
            before, self.keys = self.keys, own
            replicas.adopt(keys, own)
            if before is None or before.public != own.public:
                _log.info("another CURVE key is ours now", extra={"public_key": own.public})
                for callback in self.when_other_keys:
                    callback(own)

        return put_in_force

    def for_recovery(self) -> Mapping[str, Any]:
        """Return what start-up recovery presents to its configured peers, and requires of them."""
        tls = self.passport.tls if self._has_ca else None
        return {"headers": partial(_headers, self.passport), "tls": tls}


def _headers(passport: ClientCredentials, url: str) -> Mapping[str, str]:
    return passport.headers(url, urlsplit(url).hostname)  # the host was configured


# Our credentials as a client of other services, and what we require of them: token, certificates.
# The token is reread from its file for each use, so that it can change. It is shown only to its
# intended recipients: servers with a certificate of `--peer-ca` or, without that option, configured
# hosts. The URL at which a replica offers its snapshot comes from a message, which is not enough.


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
