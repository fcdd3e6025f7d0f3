"""The nouns of a pair: one worker computes the prompt, another generates from its KV blocks.

As in `types.py`, one definition decodes the wire, types the core and generates /openapi.json.
"""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from select_service.types import Overlap, SelectAndReserveRequest

__all__ = ["PairLeg", "PairSelection", "SelectPairRequest"]


class SelectPairRequest(SelectAndReserveRequest, kw_only=True):
    """POST /select_pair: as /select_and_reserve; its `reservation_id` names the pair."""


class PairLeg(Struct, frozen=True, kw_only=True):
    """One of the two ranks that serve a request together, or the only one."""

    reservation_id: str
    worker_id: int
    dp_rank: int
    endpoint: str | None
    overlap: Overlap
    effective_prefill_tokens: int  # 0 of a decode leg whose prompt is computed elsewhere
    potential_decode_blocks: int  # 0 of a prefill leg; with this prompt, before it was booked


class PairSelection(Struct, kw_only=True):
    """The answer of /select_pair."""

    selection_id: str | UnsetType = UNSET
    reservation_id: str  # of the pair: lifecycle calls under it reach the leg they mean
    model_name: str
    tenant_id: str
    block_size: int
    mode: Literal["aggregated", "disaggregated"]
    reason: str
    prefill: PairLeg | None  # send it there first; null: `decode` does both
    decode: PairLeg
    transfer_blocks: int  # to be moved from the one to the other
    isl_tokens: int
    track_prefill_tokens: bool
    aggregated_cost: float | None  # of the best worker alone, in blocks; null: there is none
    disaggregated_cost: float | None  # of the best pair, its transfer included; null likewise
