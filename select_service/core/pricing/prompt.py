"""A prompt as all code sees it once it is read: packed hashes of its blocks, length in tokens.

`routing/read.py` makes one of tokens, media or ready-made hashes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from indexer.core.hashing import sequence_hashes
from indexer.types import HASH_BYTES

if TYPE_CHECKING:
    from indexer.types import PackedHashes


class Prompt(Struct, eq=False):
    """What selection and ledger need to know of a prompt."""

    block_hashes: PackedHashes
    """Matched against the index; b"" if only a booking needs the prompt."""
    sequence_hashes: PackedHashes
    """Counted by the ledger; of a prompt in tokens computed on first use, which most selections
    never reach."""
    isl_tokens: int
    blocks: int
    first_hash: PackedHashes
    """The first sequence hash, or b"": enough to tell whether any chain can match."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> PackedHashes:
            """Compute the sequence hashes: called only as long as they are not set."""
            if name != "sequence_hashes":
                raise AttributeError(name)
            self.sequence_hashes = sequence_hashes(self.block_hashes)
            return self.sequence_hashes


def prompt_of(block_hashes: PackedHashes, chain: PackedHashes | None, isl_tokens: int) -> Prompt:
    """Combine the parts of a prompt.

    `block_hashes` is b"" if only a booking needs the prompt. `chain` has as many sequence
    hashes; None: computed from the block hashes when they are needed.
    """
    known = block_hashes if chain is None else chain  # they begin alike
    blocks = len(known) // HASH_BYTES
    prompt = Prompt(block_hashes, known, isl_tokens, blocks, known[:HASH_BYTES])
    if chain is None:
        del prompt.sequence_hashes
    return prompt
