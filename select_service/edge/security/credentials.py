"""How this process authenticates to workers and replicas, and they to it: CURVE keys, a passport.

Built from the settings before anything is opened; `driver.py` passes it to whatever opens sockets.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from indexer.edge.curve import ReplicaKeys, read_key_file
from select_service.edge.security.client_credentials import ClientCredentials

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
                for tell in self.when_other_keys:
                    tell(own)

        return put_in_force

    def for_recovery(self) -> Mapping[str, Any]:
        """Return what start-up recovery presents to its configured peers, and requires of them."""
        tls = self.passport.tls if self._has_ca else None
        return {"headers": partial(_headers, self.passport), "tls": tls}


def _headers(passport: ClientCredentials, url: str) -> Mapping[str, str]:
    return passport.headers(url, urlsplit(url).hostname)  # the host was configured
