"""CURVE keys (ZMQ encryption): our own pair, the keys of workers and of replicas, their files.

A client must know a server's public key before it connects; the server may check the client's key,
which the replica plane looks up in a list. `sockets.py` sets the keys on sockets; nothing is
encrypted without a key.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, Final

import zmq
from typing_extensions import override
from zmq.utils import z85

from indexer.core.curve_key import is_curve_key
from indexer.errors import KeyFileUnusable
from indexer.plain_file import open_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

FILE_BYTES_MAX: Final = 1 << 20
_PUBLIC, _SECRET = "public", "secret"
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


class KeyPair:
    """One identity. Its secret half is never shown."""

    __slots__ = ("public", "secret")

    def __init__(self, public: str, secret: str) -> None:
        self.public = public
        self.secret = secret

    @override
    def __repr__(self) -> str:
        return f"KeyPair({self.public!r})"

    @classmethod
    def new(cls) -> KeyPair:
        """Return a new random pair."""
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())


def new_key_file(path: str) -> KeyPair:
    """Create a pair and write it to a new file that only its owner may read.

    Raises:
        KeyFileUnusable: the file exists, or cannot be written.
    """
    keys = KeyPair.new()
    text = (
        "# CURVE key pair of select-service. Whoever reads the secret can speak in our name.\n"
        f"{_PUBLIC} {keys.public}\n{_SECRET} {keys.secret}\n"
    )
    try:
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(number, "w", encoding="ascii") as file:
                file.write(text)
        except OSError:
            os.unlink(path)  # half a pair is useless, and would block writing a whole one
            raise
    except OSError as error:
        raise KeyFileUnusable(f"cannot write {path}: {error.strerror}") from None
    return keys


def read_key_file(path: str) -> KeyPair:
    """Read a pair.

    Raises:
        KeyFileUnusable: it cannot be read, is not a pair, or the halves do not match.
    """
    found: dict[str, str] = {}
    for number, words in _lines(path):
        if len(words) != 2 or words[0] not in (_PUBLIC, _SECRET) or not is_curve_key(words[1]):  # noqa: PLR2004
            raise KeyFileUnusable(f"{path} line {number}: not `public KEY` or `secret KEY`")
        found[words[0]] = words[1]
    if len(found) < 2:  # noqa: PLR2004 - both
        raise KeyFileUnusable(f"{path}: both `public KEY` and `secret KEY` are needed")
    if zmq.curve_public(found[_SECRET].encode()) != found[_PUBLIC].encode():
        raise KeyFileUnusable(f"{path}: the public key is not that of the secret")
    return KeyPair(found[_PUBLIC], found[_SECRET])


def is_exposed(path: str) -> bool:
    """Tell whether anybody but its owner may read or write a file."""
    try:
        return bool(os.stat(path).st_mode & _OTHERS)
    except OSError:
        return False


class ReplicaKeys:
    """Which replicas may listen to us, and the key of each replica we listen to.

    Each line of the file has a public key, followed by the endpoints of the replica that owns it.
    Without a file, and for endpoints in no line, a replica is expected to have our own pair.

    Attributes:
        allowed: The keys of those that may listen.
        own: Our pair.
        when_narrower: Callbacks for when a key is no longer allowed, or our pair changed; must not
            fail.
        when_changed: Callbacks for when a new list takes effect; must not fail.
    """

    def __init__(self, own: KeyPair, path: str | None) -> None:
        """Read the file.

        Raises:
            KeyFileUnusable: it cannot be used.
        """
        self.own = own
        self._path = path
        self.allowed: frozenset[bytes] = frozenset()
        self.when_narrower: list[Callable[[], None]] = []
        self.when_changed: list[Callable[[], None]] = []
        self._by_endpoint: Mapping[str, str] = {}
        self.adopt(self.prepare())

    def prepare(self, own: KeyPair | None = None) -> dict[str, list[str]]:
        """Read the file again, for `adopt`; returns endpoints by key.

        Args:
            own: our future pair; None: the current one.

        Raises:
            KeyFileUnusable: it cannot be used.
        """
        keys: dict[str, list[str]] = {(own or self.own).public: []}
        if self._path is None:
            return keys
        named: set[str] = set()
        for number, (key, *endpoints) in _lines(self._path):
            if not is_curve_key(key):
                raise KeyFileUnusable(f"{self._path} line {number}: no CURVE key comes first")
            if not named.isdisjoint(endpoints):
                raise KeyFileUnusable(f"{self._path} line {number}: an endpoint has two keys")
            named.update(endpoints)
            keys.setdefault(key, []).extend(endpoints)
        return keys

    def adopt(self, keys: Mapping[str, list[str]], own: KeyPair | None = None) -> None:
        """Put a list into effect, with the pair it was prepared for."""
        is_other = own is not None and own.public != self.own.public
        self.own = own or self.own
        before, self.allowed = self.allowed, frozenset(map(_raw, keys))
        self._by_endpoint = {at: key for key, endpoints in keys.items() for at in endpoints}
        if is_other or not before <= self.allowed:
            for callback in self.when_narrower:
                callback()
        for callback in self.when_changed:
            callback()

    def key_of(self, endpoint: str) -> str:
        """Return the key that a replica must have."""
        return self._by_endpoint.get(endpoint, self.own.public)


def _raw(key: str) -> bytes:
    return bytes(z85.decode(key))


def _lines(path: str) -> list[tuple[int, list[str]]]:
    try:
        with open_plain(path) as file:
            text = file.read(FILE_BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "not a path"
        raise KeyFileUnusable(f"cannot read {path}: {why}") from None
    if len(text) > FILE_BYTES_MAX:
        raise KeyFileUnusable(f"{path} is longer than {FILE_BYTES_MAX} bytes")
    lines = enumerate(text.decode("utf-8", "replace").splitlines(), 1)
    # `#` is a digit of Z85: only a line that begins with `#` and a blank is a comment
    return [
        (number, words) for number, line in lines if (words := line.split()) and words[0] != "#"
    ]
