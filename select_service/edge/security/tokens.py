"""The token file: tokens and certificates, and what their bearers may do.

One JSON object per line. A token has 256 random bits and is stored as its SHA-256: slow hashes
protect secrets that people invent, but nobody can try even a millionth of 2^128 random tokens. For
the same reason a token too short to be random is refused, whatever the file says. A line may have
the token itself instead; then clients can show it out of the same file (`token_file.py`). Requests
are the business of `authority.py`.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Final, Literal, get_args

import msgspec
from msgspec import Meta, Struct

from indexer.plain_file import open_plain
from select_service.errors import TokenFileUnusable
from select_service.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

AccessScope = Literal["catalog", "select", "lifecycle", "read", "admin"]
SCOPES: Final[tuple[str, ...]] = get_args(AccessScope)
ADMIN: Final = "admin"
"""This scope includes all others."""

TOKEN_PREFIX: Final = "sst_"  # noqa: S105 - lets scanners find leaked tokens
TOKEN_BYTES: Final = 32
TOKEN_CHARS_MIN: Final = 22
"""Shortest token: 128 bits in base64. Shorter ones can be guessed from their hash."""

TOKEN_CHARS_MAX: Final = Settings().token_chars_max
"""Longest token that is hashed: a request must not make us hash a head of 64 KiB."""

BYTES_MAX: Final = Settings().token_file_bytes_max
"""Default limit of the file."""

_HOLDING: Final = frozenset({"catalog", "select", "lifecycle"})
"""Scopes with which something can be registered, booked or opened."""

_HEX: Final = "^[0-9a-f]{64}$"
_NOBODYS: Final = bytes(32)


class TokenRecord(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One line: a name, how its bearer is recognized, and what that bearer may do."""

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    sha256: Annotated[str, Meta(pattern=_HEX)] | None = None  # of the token, in hex
    token: Annotated[str, Meta(min_length=TOKEN_CHARS_MIN)] | None = None  # or: the token itself
    certificate: Annotated[str, Meta(min_length=1)] | None = None  # or: a name in one (mTLS)
    scopes: Annotated[list[AccessScope], Meta(min_length=1)]
    tenants: Annotated[list[str], Meta(min_length=1)] | None = None  # None: all of them
    expires: Annotated[datetime, Meta(tz=True)] | None = None

    def __post_init__(self) -> None:
        if [self.sha256, self.token, self.certificate].count(None) != 2:  # noqa: PLR2004 - of three
            raise ValueError("either `sha256`, `token` or `certificate` must be given")
        if not self.name.isprintable():
            raise ValueError("the name must be printable")


class TokenEntry(Struct, frozen=True):
    """A record in the form it is used."""

    name: str
    digest: bytes  # of its token; b"" with a certificate
    scopes: frozenset[str]
    tenants: tuple[str, ...] | None  # None: all
    expires_at: float  # POSIX seconds; infinity: never
    is_plain: bool  # the file has its token, and not only a hash


class TokenBook:
    """All known bearers."""

    def __init__(
        self, records: Iterable[TokenRecord] = (), *, chars_max: int = TOKEN_CHARS_MAX
    ) -> None:
        """Take records; tokens longer than `chars_max` are never accepted.

        Raises:
            TokenFileUnusable: two of them share a name, a token or a certificate.
        """
        self._chars_max = chars_max
        self._by_digest: dict[bytes, TokenEntry] = {}
        self._by_certificate: dict[str, TokenEntry] = {}
        names: set[str] = set()
        for record in records:
            entry = _entry(record)
            if entry.name in names:
                raise TokenFileUnusable(f"the name {entry.name!r} comes twice")
            names.add(entry.name)
            if record.certificate is not None:
                if record.certificate in self._by_certificate:
                    raise TokenFileUnusable(f"{entry.name!r} has the certificate of another")
                self._by_certificate[record.certificate] = entry
            elif entry.digest in self._by_digest:
                raise TokenFileUnusable(f"{entry.name!r} has the token of another")
            else:
                self._by_digest[entry.digest] = entry

    def __len__(self) -> int:
        return len(self._by_digest) + len(self._by_certificate)

    def __iter__(self) -> Iterator[TokenEntry]:
        yield from self._by_digest.values()
        yield from self._by_certificate.values()

    def by_token(self, token: bytes) -> TokenEntry | None:
        """Return the bearer of a token.

        The lookup is by hash, so its timing reveals nothing about nearly right tokens; the result
        is compared in constant time all the same.
        """
        if not TOKEN_CHARS_MIN <= len(token) <= self._chars_max:
            return None
        digest = hashlib.sha256(token).digest()
        entry = self._by_digest.get(digest)
        same = hmac.compare_digest(digest, _NOBODYS if entry is None else entry.digest)
        return entry if same else None

    def by_certificate(self, names: Sequence[str]) -> TokenEntry | None:
        """Return the bearer of a certificate with one of these names; the first match counts."""
        for name in names:
            entry = self._by_certificate.get(name)
            if entry is not None:
                return entry
        return None

    def tenants(self) -> tuple[tuple[str, ...], bool]:
        """Return all tenants that bearers are bound to, and whether others may hold anything.

        Bearers that are bound to none may act for tenants outside the file.
        """
        bound = dict.fromkeys(tenant for one in self for tenant in one.tenants or ())
        others = any(one.tenants is None and one.scopes & _HOLDING for one in self)
        return tuple(bound), others

    def next_expiry(self, now: float) -> float:
        """Return the next expiry after `now` in POSIX seconds; infinity: none."""
        return min((one.expires_at for one in self if one.expires_at > now), default=math.inf)


def _entry(record: TokenRecord) -> TokenEntry:
    scopes = frozenset(SCOPES if ADMIN in record.scopes else record.scopes)
    digest = b"" if record.sha256 is None else bytes.fromhex(record.sha256)
    if record.token is not None:
        digest = hashlib.sha256(record.token.encode()).digest()
    tenants = None if record.tenants is None else tuple(dict.fromkeys(record.tenants))
    expires_at = math.inf if record.expires is None else record.expires.timestamp()
    is_plain = record.token is not None
    return TokenEntry(record.name, digest, scopes, tenants, expires_at, is_plain)


def read_token_file(
    path: str, bytes_max: int = BYTES_MAX, chars_max: int = TOKEN_CHARS_MAX
) -> TokenBook:
    """Read a whole file, within a limit of bytes, for tokens up to a limit of characters.

    Raises:
        TokenFileUnusable: it cannot be read, or a line is invalid.
    """
    try:
        with open_plain(path) as file:
            text = file.read(bytes_max + 1)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "not a path"
        raise TokenFileUnusable(f"cannot read {path}: {why}") from None
    if len(text) > bytes_max:
        most = f"{bytes_max} bytes (--token-file-bytes-max)"
        raise TokenFileUnusable(f"{path} is longer than {most}")
    records = []
    decode = msgspec.json.Decoder(TokenRecord).decode
    for number, line in enumerate(map(bytes.strip, text.splitlines()), 1):
        if not line or line.startswith(b"#"):
            continue
        try:
            records.append(decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise TokenFileUnusable(f"{path} line {number}: {_why(error)}") from None
    try:
        return TokenBook(records, chars_max=chars_max)
    except TokenFileUnusable as error:
        raise TokenFileUnusable(f"{path}: {error}") from None


def _why(error: Exception) -> str:
    """Describe an error without quoting the input, which may be a misplaced token."""
    if isinstance(error, msgspec.ValidationError):
        text = str(error)
        if "unknown field" in text or "enum value" in text:
            return "an unknown field or scope" if "unknown field" in text else "an unknown scope"
        return text
    return "no JSON object (a token alone is a client's: `token new` prints the line of it)"


def new_token() -> tuple[str, str]:
    """Return a new token, and its SHA-256 in hex."""
    token = TOKEN_PREFIX + secrets.token_urlsafe(TOKEN_BYTES)
    return token, hashlib.sha256(token.encode()).hexdigest()
