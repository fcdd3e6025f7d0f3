"""Prompts of the workloads: random tokens and their hashes, from a seed.

The hashes are computed here and not by the service's own package: an error there must show as a
wrong answer, not cancel out.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BLOCK_SIZE", "VOCABULARY", "Prompt", "body", "chain", "random_tokens", "signed"]

BLOCK_SIZE = 16
_SEED = 1337
VOCABULARY = 128_000
_BLOCK_BYTES = 4 * BLOCK_SIZE

_JSON = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt in both forms the API takes; hashes unsigned."""

    token_ids: Sequence[int]
    block_hashes: list[int]
    sequence_hashes: list[int]

    @classmethod
    def of(cls, token_ids: Sequence[int]) -> Prompt:
        """Hash some tokens."""
        local = chain_local(token_ids)
        return cls(token_ids, local, chain(local))

    def hash_form(self) -> dict[str, Any]:
        """The prompt fields with hashes, signed as every version of the API accepts them."""
        return {
            "block_hashes": signed(self.block_hashes),
            "sequence_hashes": signed(self.sequence_hashes),
            "isl_tokens": len(self.token_ids),
        }

    def token_form(self) -> dict[str, Any]:
        """The prompt fields with tokens."""
        return {"token_ids": list(self.token_ids)}


def random_tokens(rng: Random, length: int) -> list[int]:
    """Tokens that share nothing with any other call's."""
    return rng.choices(range(VOCABULARY), k=length)


def chain_local(token_ids: Sequence[int]) -> list[int]:
    """Hash of each whole block."""
    packed = array("I", token_ids).tobytes()
    ends = range(_BLOCK_BYTES, len(packed) + 1, _BLOCK_BYTES)
    return [xxhash.xxh3_64_intdigest(packed[end - _BLOCK_BYTES : end], _SEED) for end in ends]


def chain(local: Sequence[int]) -> list[int]:
    """Sequence hashes: the first as it is, then each over its predecessor and its block."""
    hashes = list(local[:1])
    for value in local[1:]:
        pair = hashes[-1].to_bytes(8, "little") + value.to_bytes(8, "little")
        hashes.append(xxhash.xxh3_64_intdigest(pair, _SEED))
    return hashes


def signed(hashes: Sequence[int]) -> list[int]:
    """The same 64 bits as signed integers."""
    return array("q", array("Q", hashes).tobytes()).tolist()


def body(*parts: dict[str, Any]) -> bytes:
    """One JSON body out of several groups of fields."""
    merged: dict[str, Any] = {}
    for part in parts:
        merged |= part
    return _JSON.encode(merged)
