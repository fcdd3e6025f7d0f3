"""Dynamo's `--agentic` preset: the core's own `kv-cost` with other weights.

Overlap is credited twice, prompt tokens to compute count four times, and each request on a rank
counts 64 blocks of 16 tokens, the block size that the preset was validated with.
"""

from __future__ import annotations

from typing import Final

from select_service.types import RouterConfig

DYNAMO_AGENTIC: Final = "dynamo-agentic"
REQUEST_TOKENS: Final = 64 * 16


def agentic_weights(block_size: int) -> RouterConfig:
    """Return the preset's weights for blocks of this many tokens."""
    return RouterConfig(
        overlap_score_credit=2.0,
        prefill_load_scale=4.0,
        decode_active_request_weight=REQUEST_TOKENS / block_size,
    )
