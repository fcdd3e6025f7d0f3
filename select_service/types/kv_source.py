"""Where KV blocks of a prompt are, other than on the rank that serves it."""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

KvTier: TypeAlias = Literal["device", "host_pinned", "disk", "external"]
"""Where a block is; `external` is a store shared by workers."""


class KvSource(Struct, frozen=True, kw_only=True):
    """Where the selected rank should pull KV blocks of the prompt from, rather than compute them.

    They follow those that it holds itself, on any tier, or is to compute for others
    (`--expects-booked`).
    """

    worker_id: int
    """Worker that holds them; of blocks in a shared store the one that put them there, e.g. `7`."""
    dp_rank: int
    endpoint: str
    tier: KvTier
    """Tier of the last of them; `external` is a store that every worker can read, e.g. `"device"`.
    """
    blocks: int
    """How many there are, e.g. `96`."""


class PulledBlocks(Struct, frozen=True, omit_defaults=True):
    """What a booked prompt pulls, as replicas and the state file hold it; see `KvSource`."""

    worker_id: Annotated[int, Meta(ge=0)]
    blocks: Annotated[int, Meta(ge=0)]
    dp_rank: Annotated[int, Meta(ge=0)] = 0
    tier: Annotated[str, Meta(max_length=64)] = "device"  # a newer version may know others
