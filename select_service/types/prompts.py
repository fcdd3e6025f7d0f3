"""What every route about a prompt takes: tokens or hashes, and the scope they belong to."""

from msgspec import UNSET, Struct, UnsetType

from indexer.types import U64_MASK, Scope
from select_service.types.ranges import (
    U32,
    U64,
    Fraction,
    HashList,
    NonNegative,
    TokenList,
    check_scope_names,
    check_u64,
)


class MmObject(Struct, frozen=True):
    """One media item inside a block; only its hash enters the block hash."""

    mm_hash: U64
    offsets: list[tuple[U64, U64]]

    def __post_init__(self) -> None:
        check_u64("mm_hash", self.mm_hash)
        for start, end in self.offsets:
            check_u64("offsets", start)
            check_u64("offsets", end)


class BlockMmInfo(Struct, frozen=True):
    """The media items of one block."""

    mm_objects: list[MmObject]


class MmRoutingInfo(Struct, frozen=True):
    """Tokens with media placeholders expanded for routing."""

    routing_token_ids: list[U32]
    block_mm_infos: list[BlockMmInfo | None] = []


class RouterConfigOverride(Struct, frozen=True, kw_only=True):
    """Weights for this request only."""

    overlap_score_credit: Fraction | None = None
    prefill_load_scale: NonNegative | None = None
    overlap_score_weight: NonNegative | None = (
        None  # deprecated: prefill_load_scale; 0 zeroes credit
    )
    router_temperature: NonNegative | None = None
    track_prefill_tokens: bool | None = None
    assume_kv_reuse: bool | None = None  # false: none of a prompt's blocks is counted as shared
    shared_cache_multiplier: Fraction | None = None  # no effect


class PromptFields(Struct, kw_only=True):
    """What every prompt route takes: tokens, or hashes with their length.

    Once decoded, or `packed`, the long lists are little-endian numbers of 4 and 8 bytes each.
    """

    model_name: str = "default"
    tenant_id: str | UnsetType = UNSET
    routing_group: str | UnsetType = UNSET
    token_ids: TokenList | None = None
    mm_routing_info: MmRoutingInfo | None = None
    block_mm_infos: list[BlockMmInfo | None] | None = None
    block_hashes: HashList | None = None
    sequence_hashes: HashList | None = None
    isl_tokens: U64 | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    cache_namespace: str | None = None  # alias of cache_salt (1.5+)
    is_eagle: bool | None = None
    router_config_override: RouterConfigOverride | None = None

    def __post_init__(self) -> None:
        isl_tokens = self.isl_tokens
        if isl_tokens is not None and not 0 <= isl_tokens <= U64_MASK:  # no frame for the rest
            check_u64("isl_tokens", isl_tokens)
        if self.routing_group is not UNSET:
            check_scope_names(self.tenant_id, self.routing_group)

    @property
    def scope(self) -> Scope:
        """The partition asked for; `routing_group` is another name of `tenant_id`."""
        tenant = self.tenant_id
        if tenant is UNSET:
            tenant = self.routing_group
        return Scope(self.model_name, "default" if tenant is UNSET else tenant)
