"""Authorization: maps the credentials of a request to a grant, or to the reason there is none.

Without a token file all may do everything. A grant is decided once per block of header lines
that `http/connection.py` remembers, so a reload notifies everyone who remembers any. `tokens.py`
knows the file, `tenancy/tenant_view.py` restricts requests whose token is bound to tenants.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from select_service.edge.routing import OPEN
from select_service.edge.security.tokens import (
    BYTES_MAX,
    TOKEN_CHARS_MAX,
    TokenBook,
    read_token_file,
)
from select_service.errors import (
    MissingScope,
    ServiceError,
    TokenIsBound,
    Unauthenticated,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from select_service.edge.routing import Route

_log = logging.getLogger("select_service")

READ: Final = "read"
_BEARER: Final = b"bearer "
_NOTHING: Final = frozenset({OPEN})


class Grant(Struct, frozen=True):
    """What one bearer may do."""

    name: str | None  # of its record; None: unauthenticated
    scopes: frozenset[str]
    tenants: tuple[str, ...] | None = None  # None: all
    reason: str = ""  # why unauthenticated: missing, unknown or expired

    @property
    def may_read(self) -> bool:
        """Whether it may read the state of the service."""
        return READ in self.scopes

    @property
    def sees_all(self) -> bool:
        """Whether nothing it reads needs to be filtered."""
        return self.tenants is None and self.may_read

    @property
    def whose(self) -> str | None:
        """The tenant that is charged with what is of no scope; None: it is bound to none."""
        return self.tenants[0] if self.tenants else None

    def refusal(self) -> ServiceError:
        """Return the error for reading."""
        return Unauthenticated(self.reason) if self.name is None else MissingScope(READ)

    def allows(self, route: Route[Any]) -> bool:
        """Whether a route may be used; `tenancy/tenant_view.py` then restricts what it shows."""
        return route.scope in self.scopes and (self.tenants is None or not route.of_process)


_NOBODY: Final = {
    reason: Grant(None, _NOTHING, (), reason) for reason in ("missing", "unknown", "expired")
}


def _wall_clock() -> float:
    return time.time()  # noqa: TID251 - tokens expire by the wall clock


class Authority:
    """The token file in force.

    Attributes:
        refused: requests refused, by reason.
        reloads: rereads of the file, by outcome.
    """

    def __init__(
        self,
        path: str,
        wall: Callable[[], float] = _wall_clock,
        *,
        bytes_max: int = BYTES_MAX,
        chars_max: int = TOKEN_CHARS_MAX,
    ) -> None:
        """Read the file, within a limit of bytes, for tokens up to a limit of characters.

        Raises:
            TokenFileUnusable: it cannot be used.
        """
        self._path = path
        self._bytes_max = bytes_max
        self._chars_max = chars_max
        self._wall = wall
        self.book = read_token_file(path, bytes_max, chars_max)
        self._reckoned_at = wall()
        self._next_expiry = self.book.next_expiry(self._reckoned_at)
        self._forgetful: list[Callable[[], None]] = []
        self.refused = dict.fromkeys(("missing", "unknown", "expired", "scope", "bound"), 0)
        self.foreign = 0  # names of other tenants in requests of bound tokens
        self.reloads = {"done": 0, "refused": 0}

    def on_change(self, forget: Callable[[], None]) -> None:
        """Register a callback for when grants may no longer hold."""
        self._forgetful.append(forget)

    def note_foreign(self) -> None:
        """Count that a bound token has named something of another tenant."""
        self.foreign += 1

    # -- what is in force ----------------------------------------------------------------------

    def prepare(self) -> TokenBook:
        """Reread the file, for `adopt`.

        Raises:
            TokenFileUnusable: it cannot be used.
        """
        return read_token_file(self._path, self._bytes_max, self._chars_max)

    def adopt(self, book: TokenBook) -> None:
        """Put a token book in force for requests from now on."""
        self.reloads["done"] += 1
        self._put(book)
        _log.info("token file read again", extra={"tokens": len(book)})

    def reject(self) -> None:
        """Count a file that was rejected."""
        self.reloads["refused"] += 1

    def _put(self, book: TokenBook) -> None:
        self.book = book
        self._reckoned_at = self._wall()
        self._next_expiry = book.next_expiry(self._reckoned_at)
        for forget in self._forgetful:
            forget()

    def tick(self) -> None:
        """Drop expired grants; called a few times a second, so that requests need not check.

        If the clock is set back before an expiry that has passed, that expiry comes again: grants
        given until then must be dropped then.
        """
        if not self._reckoned_at <= self._wall() < self._next_expiry:
            self._put(self.book)

    # -- requests ------------------------------------------------------------------------------

    def grant(self, credentials: bytes | None, certificate: Sequence[str]) -> Grant:
        """Return what a request may do.

        Args:
            credentials: its Authorization header; if present, only this counts.
            certificate: names in the client's certificate.
        """
        if credentials is None:
            entry = self.book.by_certificate(certificate) if certificate else None
            if entry is None:
                return _NOBODY["missing"]
        else:
            token = _token_in(credentials)
            entry = None if token is None else self.book.by_token(token)
            if entry is None:
                return _NOBODY["unknown"]
        if entry.expires_at <= self._wall():
            return _NOBODY["expired"]
        return Grant(entry.name, entry.scopes | _NOTHING, entry.tenants)

    def check(self, grant: Grant, route: Route[Any]) -> None:
        """Refuse a request that may not use a route.

        Raises:
            Unauthenticated: its credentials are missing or invalid.
            MissingScope: they are valid, but do not allow this.
            TokenIsBound: the route concerns the whole process, and the token is bound to tenants.
        """
        if grant.allows(route):
            return
        if grant.name is None:
            self.refused[grant.reason] += 1
            raise Unauthenticated(grant.reason)
        if route.scope not in grant.scopes:
            self.refused["scope"] += 1
            raise MissingScope(route.scope)
        self.refused["bound"] += 1
        raise TokenIsBound


def _token_in(credentials: bytes) -> bytes | None:
    """Return the token in an Authorization header, unverified."""
    return credentials[7:].strip() if credentials[:7].lower() == _BEARER else None


def certificate_names(certificate: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the names in a client's certificate: of its SAN or, without any, the common name.

    A CA vouches for a SAN entry according to its kind; a common name may contain anything.

    Args:
        certificate: in the form `ssl` returns; None: there is none.
    """
    if not certificate:
        return ()
    san = [text for kind, text in certificate.get("subjectAltName", ()) if kind in ("URI", "DNS")]
    if san:
        return tuple(dict.fromkeys(san))
    subject = certificate.get("subject", ())
    return tuple(value for part in subject for key, value in part if key == "commonName")
