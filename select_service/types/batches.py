"""The nouns of a batch: many prompts that are placed together, POST /select_batch.

As everywhere in `types`, one definition decodes the wire, types the core and generates
/openapi.json.
"""

from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from select_service.types.requests import SelectAndReserveRequest
from select_service.types.selections import CacheThreshold, Selection

Samples = Annotated[int, Meta(ge=1, le=1 << 16)]
LoadLimit = Annotated[float, Meta(ge=1.0, le=1e6)]
Together = Annotated[int, Meta(ge=1, le=1 << 32)]


class SelectBatchItem(SelectAndReserveRequest, kw_only=True):
    """One prompt of a batch, or several samples of it; a body of /select_and_reserve.

    Of `n` samples with a `reservation_id` or `selection_id`, sample k has that id with `.k` behind.
    """

    n: Samples = 1
    """Samples of the prompt; sample k has the item's ids with `.k` behind them, e.g. `8`."""


class SelectBatchRequest(Struct, kw_only=True):
    """POST /select_batch: choose workers for a whole batch of prompts in one call."""

    requests: list[SelectBatchItem]
    """Prompts to place together."""
    reserve: bool = False
    """Whether to book what is chosen, as `/select_and_reserve` does."""
    atomic: bool = False
    """With `reserve`: place all of them, or none."""
    load_limit: LoadLimit = 1.1
    """Most requests of a rank, as a multiple of its even share, e.g. `1.1`."""
    keep_together: Together = 4
    """How many equal prompts go to one rank, whatever its share is, e.g. `4`."""


class SelectBatchResult(Struct, frozen=True, omit_defaults=True):
    """The result of one sample: the answer it would have had alone."""

    request: int
    """Position of the item in `requests`, from 0, e.g. `0`."""
    status: int
    selection: Selection | UnsetType = UNSET
    """The selection, without `sequence_hashes`."""
    cache_threshold: CacheThreshold | UnsetType = UNSET
    """The answer where no rank holds enough of the prompt."""
    shared_tokens: int = 0
    """Tokens of the prompt that another one of the batch computes on the same rank, e.g. `1024`."""
    error: str | UnsetType = UNSET
    code: str | UnsetType = UNSET
    field: str | UnsetType = UNSET
    retry_after_s: float | UnsetType = UNSET


class SelectBatchRank(Struct, frozen=True):
    """What a batch has placed on one rank."""

    model_name: str
    tenant_id: str
    worker_id: int
    dp_rank: int
    requests: int
    """Number of requests placed there, e.g. `4`."""
    prefill_tokens: int
    """Tokens to compute for them, e.g. `4096`."""


class SelectBatchAnswer(Struct, frozen=True):
    """POST /select_batch: a result for each sample, in order; `n` of one request side by side."""

    results: list[SelectBatchResult]
    """A result for each sample, in order; those of one request are side by side."""
    placed: int
    """Number of samples that were placed, e.g. `8`."""
    groups: int
    """Number of groups of prompts with a common prefix; a prompt like no other is one, e.g. `2`."""
    prefixes_computed: int  # as often a group's prefix is computed anew: at best once each
    """How often the prefix of a group is computed anew; at best once each, e.g. `2`."""
    ranks: list[SelectBatchRank]
    """What was placed on each rank."""
