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
    """Hash of the media item, which enters the hash of the block, e.g. `81093`."""
    offsets: list[tuple[U64, U64]]
    """Where the item's placeholders lie: first token, and token behind the last."""

    def __post_init__(self) -> None:
        check_u64("mm_hash", self.mm_hash)
        for start, end in self.offsets:
            check_u64("offsets", start)
            check_u64("offsets", end)


class BlockMmInfo(Struct, frozen=True):
    """The media items of one block."""

    mm_objects: list[MmObject]
    """The media items of the block."""


class MmRoutingInfo(Struct, frozen=True):
    """Tokens with media placeholders expanded for routing."""

    routing_token_ids: list[U32]
    """The prompt's tokens with media placeholders expanded; little-endian numbers of 4 bytes where
    they are packed, e.g. `[1, 32000, 32000]`."""
    block_mm_infos: list[BlockMmInfo | None] = []
    """For each block its media items; null: it has none."""


class RouterConfigOverride(Struct, frozen=True, kw_only=True):
    """Weights for this request only."""

    overlap_score_credit: Fraction | None = None
    prefill_load_scale: NonNegative | None = None
    overlap_score_weight: NonNegative | None = None
    """Old name of `prefill_load_scale`; 0 also sets the credit to 0, e.g. `1.0`."""
    router_temperature: NonNegative | None = None
    """0 picks the cheapest rank; above, cheaper ranks are only likelier, e.g. `0.0`."""
    track_prefill_tokens: bool | None = None
    assume_kv_reuse: bool | None = None  # false: none of a prompt's blocks is counted as shared
    """Whether the prompt's blocks are counted as shared with other requests."""
    shared_cache_multiplier: Fraction | None = None
    """Accepted, without effect, e.g. `0.0`."""


class PromptFields(Struct, kw_only=True):
    """What every prompt route takes: tokens, or hashes with their length.

    Once decoded, or `packed`, the long lists are little-endian numbers of 4 and 8 bytes each.
    """

    model_name: str = "default"
    tenant_id: str | UnsetType = UNSET
    routing_group: str | UnsetType = UNSET
    token_ids: TokenList | None = None
    """The prompt's tokens; little-endian numbers of 4 bytes where they are packed, e.g. `[1, 15043,
    3186]`."""
    mm_routing_info: MmRoutingInfo | None = None
    """The prompt's tokens, where it has media; takes the place of `token_ids`."""
    block_mm_infos: list[BlockMmInfo | None] | None = None
    """For each block its media items; null: it has none."""
    block_hashes: HashList | None = None
    sequence_hashes: HashList | None = None
    isl_tokens: U64 | None = None
    lora_name: str | None = None
    """Name of the LoRA adapter; its blocks are cached apart, e.g. `"sql-adapter"`."""
    cache_salt: str | None = None
    """Salt of the prompt's cache, as the engine gets it; blocks with another salt are cached apart,
    e.g. `"customer-7"`."""
    cache_namespace: str | None = None
    """Another name of `cache_salt`, e.g. `"customer-7"`."""
    is_eagle: bool | None = None
    """Whether blocks are hashed as for EAGLE; null: as the workers say."""
    router_config_override: RouterConfigOverride | None = None
    """Weights for this request only."""

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
