"""Hashing a prompt as the service does, so that it need not leave this process. Needs xxhash.

`calls.py` and `core/prompts.py` use it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from indexer.types import Namespace
from select_service.client.core.problems import MissingPackage

if TYPE_CHECKING:
    from collections.abc import Sequence


def hash_prompt(
    token_ids: Sequence[int] | bytes,
    block_size: int,
    *,
    lora_name: str | None = None,
    cache_salt: str | None = None,
    is_eagle: bool = False,
) -> dict[str, object]:
    """Return the request fields that represent a prompt: `client.select(**hash_prompt(…))`.

    Args:
        token_ids: unsigned 32-bit tokens, or the same packed little-endian.
        block_size: tokens per block, as configured in the workers.
        lora_name: the adapter the prompt runs under.
        cache_salt: its salt.
        is_eagle: blocks are hashed together with the token after them.

    Raises:
        MissingPackage: xxhash is not installed.
        ValueError: a token is invalid.
    """
    try:
        from indexer.core.hashing import block_hashes, sequence_hashes  # optional
    except ImportError as error:
        raise _missing() from error
    namespace = Namespace(lora_name or "", cache_salt or "")
    local = block_hashes(token_ids, block_size, namespace=namespace, is_eagle=is_eagle)
    tokens = len(token_ids) // 4 if isinstance(token_ids, bytes) else len(token_ids)
    return {
        "block_hashes": local,
        "sequence_hashes": sequence_hashes(local),
        "isl_tokens": tokens,
    }


def chain(block_hashes: bytes) -> bytes:
    """Return the sequence hashes of packed block hashes.

    Raises:
        MissingPackage: xxhash is not installed.
    """
    try:
        from indexer.core.hashing import sequence_hashes  # optional
    except ImportError as error:
        raise _missing() from error
    return sequence_hashes(block_hashes)


def _missing() -> MissingPackage:
    return MissingPackage("hashing in the client needs xxhash: pip install 'xxhash>=3.4.1'")
