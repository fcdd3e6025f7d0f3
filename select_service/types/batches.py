"""The nouns of a batch: many prompts that are placed together, POST /select_batch.

As everywhere in `types`, one definition decodes the wire, types the core and generates
/openapi.json.
"""

from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from select_service.types.requests import SelectAndReserveRequest
from select_service.types.selections import CacheThreshold, Selection

__all__ = ["SelectBatchRequest", "WaveAnswer", "WaveItem", "WaveRank", "WaveResult"]

Samples = Annotated[int, Meta(ge=1, le=1 << 16)]
LoadLimit = Annotated[float, Meta(ge=1.0, le=1e6)]
Together = Annotated[int, Meta(ge=1, le=1 << 32)]


class WaveItem(SelectAndReserveRequest, kw_only=True):
    """One prompt of a batch, or several samples of it; a body of /select_and_reserve.

    Of `n` samples with a `reservation_id` or `selection_id`, sample k has that id with `.k` behind.
    """

    n: Samples = 1


class SelectBatchRequest(Struct, kw_only=True):
    """POST /select_batch: choose workers for a whole batch of prompts in one call."""

    requests: list[WaveItem]
    reserve: bool = False  # book what is chosen, as /select_and_reserve does
    atomic: bool = False  # with `reserve`: all of them, or none
    load_limit: LoadLimit = 1.1  # requests of a rank, as a multiple of its even share
    keep_together: Together = 4  # of equal prompts, so many on one rank whatever its share is


class WaveResult(Struct, frozen=True, omit_defaults=True):
    """The result of one sample: the answer it would have had alone."""

    request: int  # its position in `requests`
    status: int
    selection: Selection | UnsetType = UNSET  # without `sequence_hashes`
    cache_threshold: CacheThreshold | UnsetType = UNSET  # nobody holds enough of it
    shared_tokens: int = 0  # of the prompt, computed by another of the batch on the same rank
    error: str | UnsetType = UNSET
    code: str | UnsetType = UNSET
    field: str | UnsetType = UNSET
    retry_after_s: float | UnsetType = UNSET


class WaveRank(Struct, frozen=True):
    """What a batch has placed on one rank."""

    model_name: str
    tenant_id: str
    worker_id: int
    dp_rank: int
    requests: int
    prefill_tokens: int  # to compute for them


class WaveAnswer(Struct, frozen=True):
    """POST /select_batch: a result for each sample, in order; `n` of one request side by side."""

    results: list[WaveResult]
    placed: int
    groups: int  # of prompts with a common prefix; a prompt like no other is one
    prefixes_computed: int  # as often a group's prefix is computed anew: at best once each
    ranks: list[WaveRank]
