"""Why the process does not start: no refusals, nobody is answered with them."""

from __future__ import annotations


class SecurityFileUnusable(Exception):
    """A file of tokens, certificates or keys cannot be used; the text says where and why.

    It never shows what stands there.
    """


class TokenFileUnusable(SecurityFileUnusable):
    """`--token-file`."""


class CertificatesUnusable(SecurityFileUnusable):
    """`--tls-cert`, `--tls-key` or `--tls-client-ca`."""


class StateDirUnusable(Exception):
    """The service cannot start with this state directory; `str(error)` says why."""


class RecordingUnusable(Exception):
    """The service cannot start with this file to record to; `str(error)` says why."""
