"""Tokens of prompts that were tokenized before: the last ones, bounded in bytes."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import Final

_ENTRY_BYTES: Final = 200
"""What a remembered prompt costs besides its tokens."""


def cache_key(partition: str, text: bytes) -> bytes:
    """Return the name of a prompt's tokens.

    Args:
        partition: model and tenant; other models have other tokens.
        text: the body of the request to an engine's /tokenize.
    """
    named = partition.encode("utf-8", "surrogatepass")
    return blake2b(b"%d:%b%b" % (len(named), named, text), digest_size=16).digest()


class TokenCache:
    """Packed tokens by key; the least recently used are dropped.

    Attributes:
        bytes: What it holds, with an estimate of its own overhead.
    """

    __slots__ = ("_known", "bytes", "bytes_max")

    def __init__(self, bytes_max: int) -> None:
        self._known: OrderedDict[bytes, bytes] = OrderedDict()
        self.bytes = 0
        self.bytes_max = bytes_max

    def get(self, key: bytes) -> bytes | None:
        """Return the tokens of a key."""
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
        return known

    def put(self, key: bytes, tokens: bytes) -> None:
        """Remember tokens, unless they alone are more than may be held."""
        size = len(tokens) + _ENTRY_BYTES
        if size > self.bytes_max:
            return
        if key not in self._known:
            self.bytes += size
        self._known[key] = tokens
        while self.bytes > self.bytes_max:
            _, oldest = self._known.popitem(last=False)
            self.bytes -= len(oldest) + _ENTRY_BYTES
