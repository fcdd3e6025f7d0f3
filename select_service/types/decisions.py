"""The nouns of a decision record, as `/decisions` and `explain` answer it.

`core/decisions/record.py` says what they are made of, `core/decisions/explain.py` how.
"""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from select_service.types.kv_source import KvSource
from select_service.types.shadow import ShadowWeights

Excluded = Literal[
    "busy",
    "cache_hit",
    "draining",
    "failing",
    "full",
    "not_allowed",
    "not_schedulable",
    "pinned_elsewhere",
    "refused",
    "role",
    "session",
    "taint",
    "unreachable",
    "batch",
]
"""Why a rank was no candidate. `failing` and `unreachable`: it is passed over for a while, because
its reservations failed or its event publisher is out of reach; `refused`: no rank was, the request
was turned away before; `session`: its session is on another; `batch`: the rank was chosen for all
of a batch (POST /select_batch)."""


Outcome = Literal["placed", "refused", "cache_threshold"]
"""How a decision ended."""


class DecisionPrompt(Struct, frozen=True, kw_only=True):
    """The prompt a decision was about."""

    isl_tokens: int
    blocks: int
    """Whole blocks of the prompt, e.g. `32`."""
    block_size: int
    block_hashes: list[str]
    """The first 512 block hashes, as decimal text, e.g. `["81093"]`."""
    is_cut: bool
    """Whether the prompt has more blocks than are listed."""


class DecisionWeights(Struct, frozen=True, kw_only=True):
    """Every weight in force."""

    overlap_score_credit: float
    overlap_score_credit_decay: float
    prefill_load_scale: float
    host_cache_hit_weight: float
    disk_cache_hit_weight: float
    temperature: float
    track_prefill_tokens: bool
    kv_transfer_cost_per_block: float
    decode_load_scale: float
    delay_weight: float  # at that time: of its own prefill, for those that wait behind it
    eviction_weight: float  # at that time: of that, for each token its rank computed lately
    expects_booked: bool  # whether what others are booked with counts as cached
    context_load_scale: float
    pace: float  # at that time: tokens a second that a queue counts as worked off
    interference: float  # at that time: of its own prefill, for each request of its rank
    decode_active_request_weight: float
    slowness: float  # of what a worn rank takes longer than others, as a share of its cost


class DecisionAdmission(Struct, frozen=True, kw_only=True):
    """The gate's decision."""

    policy: str
    slo_class: str | None
    """Service class of the request, e.g. `"standard"`."""
    tenant: str
    """What the request was counted for, e.g. `"default"`."""
    outcome: Literal["admit", "wait", "refuse"]
    """What became of it."""
    reason: str
    gate: str | None
    """Gate that refused it or made it wait, e.g. `"busy"`."""


class DecisionRefusal(Struct, frozen=True, kw_only=True):
    """The error the caller was given."""

    code: str
    error: str
    gate: str | None
    """Gate that refused it, e.g. `"busy"`."""
    reason: str | None


class RunnerUp(Struct, frozen=True):
    """The best of the others."""

    worker_id: int
    dp_rank: int
    cost: float
    """Cost of the best other rank, in blocks, e.g. `14.0`."""


class Chosen(Struct, frozen=True, kw_only=True):
    """The chosen rank, and by how much it was cheaper."""

    worker_id: int
    dp_rank: int
    endpoint: str | None
    cost: float
    """Cost of the chosen rank, in blocks; of a pair: of both legs, e.g. `12.5`."""
    margin: float | None  # cost of the best other minus this one's
    """Cost of the best other rank less this one's, in blocks, e.g. `1.5`."""
    runner_up: RunnerUp | None
    """The best other rank."""
    ties: int
    """Ranks that had the lowest cost, e.g. `1`."""
    picked_by: Literal["lowest", "tie", "softmax", "only"]
    """How it was picked."""
    kv_source: KvSource | UnsetType = UNSET
    """Where it pulls blocks of the prompt from."""


class DecisionLeg(Struct, frozen=True, kw_only=True):
    """One rank of a pair."""

    worker_id: int
    dp_rank: int
    endpoint: str | None
    cost: float
    kv_source: KvSource | UnsetType = UNSET
    """Where a prefill rank pulls blocks of the prompt from."""


class DecisionPair(Struct, frozen=True, kw_only=True):
    """What /select_pair compared: the best pair with the best rank for the whole request."""

    mode: Literal["aggregated", "disaggregated"]
    reason: str
    aggregated_cost: float | None
    disaggregated_cost: float | None
    prefill: DecisionLeg | None
    """Prefill rank of the best pair, whether it was taken or not."""
    decode: DecisionLeg | None
    """Decode rank of the best pair, whether it was taken or not."""


class DecisionShadowChoice(Struct, frozen=True, kw_only=True):
    """The rank of one side's choice, and what it means for the prompt."""

    worker_id: int
    dp_rank: int
    cost_by_live_weights: float
    """Its cost by the weights in force, in blocks, e.g. `12.5`."""
    cost_by_shadow_weights: float
    """Its cost by the shadow weights, in blocks, e.g. `11.0`."""
    prefill_tokens: int
    """Tokens of the prompt to compute there, e.g. `128`."""
    cached_tokens: int
    """Tokens of the prompt that it has cached, e.g. `384`."""
    queued_prefill_tokens: int
    """Tokens of other prompts before it, e.g. `2048`."""
    decode_blocks: int  # with the prompt's


class DecisionShadow(Struct, frozen=True, kw_only=True):
    """What the shadow weights would have chosen; regrets in blocks."""

    weights: ShadowWeights
    """The shadow weights."""
    agrees: bool
    """Whether both would choose the same rank."""
    regret_by_live_weights: float  # what the shadow's choice costs more
    """Blocks that the shadow's choice costs more by the weights in force, e.g. `0.0`."""
    regret_by_shadow_weights: float
    """Blocks that the live choice costs more by the shadow weights, e.g. `0.0`."""
    live: DecisionShadowChoice
    """The choice of the weights in force."""
    shadow: DecisionShadowChoice
    """The choice of the shadow weights."""


class DecisionIndex(Struct, frozen=True):
    """What was known of a rank's KV events, a quarter of a second before at most."""

    state: Literal["none", "silent", "current", "uncertain", "replaying"]
    """How the rank's KV events stand."""
    lag_s: float | None  # age of the last batch, by the engine's clock
    """Age of the last batch of KV events in seconds, by the engine's clock, e.g. `0.02`."""
    open_gaps: int
    """Gaps in its KV events that are being mended, e.g. `0`."""
    estimated: bool | UnsetType = UNSET  # true: matched by what routing put there


class DecisionLegs(Struct, frozen=True):
    """The cost of a rank as a leg of a pair; None: not in that place."""

    prefill_cost: float | None
    """Cost of the rank as the prefill leg, in blocks; null: not in that place, e.g. `10.0`."""
    decode_cost: float | None
    """Cost of the rank as the decode leg of the chosen prefill rank, by the policy in force, moving
    blocks included, e.g. `4.0`."""
    blocks_to_move: int | None
    """KV blocks to move to it, e.g. `32`."""


class Candidate(Struct, frozen=True):
    """One rank with every term of its cost (blocks); None: this term was not computed.

    `context_cost` adds up, for each of its requests and this one, the blocks it attends to and a
    fixed part for being one, and a part for waiting for an answer to end where `max_num_seqs` run.

    cost = (prefill_load_scale · (prefill_cost - credit + pull_cost + delay_cost
                                  + eviction_cost + interference_cost)
            + decode_load_scale · decode_cost + context_load_scale · context_cost
            + decode_active_request_weight · requests) · taint_factor
    """

    worker_id: int
    dp_rank: int
    endpoint: str | None
    excluded: Excluded | None
    """Why the rank was not eligible; null: it was."""
    prefill_tokens: int | None
    """Prompt tokens that it has to compute for other requests, e.g. `2048`."""
    decode_blocks: int | None
    """KV blocks that it holds for other requests, e.g. `96`."""
    shared_blocks: int | None
    """Blocks of this prompt that are already among those, e.g. `8`."""
    device_blocks: int | None
    host_blocks: int | None
    """Blocks of the prompt that it has in host memory, e.g. `0`."""
    disk_blocks: int | None
    cached_tokens: int | None
    """Tokens of the prompt that count as cached, as far as its index is believed, e.g. `128`."""
    prefill_cost: float | None
    """Cost of the prompt tokens to compute, in blocks, e.g. `140.0`."""
    credit: float | None
    """What overlap takes off, and blocks that it pulls, in blocks, e.g. `8.0`."""
    decode_cost: float | None
    """Cost of the blocks that it holds, in blocks, e.g. `96.0`."""
    taint_factor: float | None
    """Factor of preferred taints; null: none is preferred, e.g. `0.8`."""
    cost: float | None
    index: DecisionIndex | None
    """What was known of its KV events."""
    trust: float  # multiplies the credit and what is cached
    expected_blocks: int | None = None
    """Blocks of the prompt that are booked and not cached yet; taken off with the credit, e.g. `0`.
    """
    churn_tokens: float | None = None
    """Tokens that it has computed lately; older ones count for less, e.g. `4096.0`."""
    delay_cost: float | None = None
    """Cost of the wait of requests behind this one, in blocks, e.g. `0.0`."""
    eviction_cost: float | None = None
    """Cost of the blocks that this prompt evicts, in blocks, e.g. `0.0`."""
    context_cost: float | None = None
    """Cost of the blocks that its requests attend to, in blocks, e.g. `0.0`."""
    interference_cost: float | None = None
    """Cost of the prompt's own prefill for the requests of the rank, in blocks, e.g. `0.0`."""
    unheard_s: float | None = None
    """Seconds since its queue was known; null: the policy does not ask, e.g. `0.1`."""
    ahead_tokens: int | None = None
    """Tokens of its queue that it can have computed since, e.g. `512`."""
    worked_off_tokens: float | None = None
    """The part of those that counts as computed, in `prefill_cost`, e.g. `400.0`."""
    requests: int | None = None
    """Live requests of the rank, e.g. `4`."""
    slowness: float | None = None
    """Factor of the cost; above 1 if the rank takes many times as long as others; null: the policy
    does not ask, e.g. `1.0`."""
    pulled_blocks: int | UnsetType = UNSET
    """Blocks of the prompt that it would pull from another rank; with `--kv-pull`, e.g. `64`."""
    pull_cost: float | UnsetType = UNSET
    """What moving those costs, in blocks, e.g. `6.4`."""
    predicted_ttft_ms: float | None = None
    """Predicted time to the prompt's first token there; null: the rank was not measured yet, e.g.
    `180.0`."""
    predicted_itl_ms: float | None = None
    """Predicted time between its tokens there; null likewise, e.g. `21.0`."""
    legs: DecisionLegs | UnsetType = UNSET
    """Its cost as a leg of a pair; for `/select_pair`."""


class Decision(Struct, kw_only=True):
    """One selection, and everything that decided it."""

    decision_id: str
    selection_id: str | None
    reservation_id: str | None
    route: Literal["select", "select_and_reserve", "select_pair"]
    """Route of the request."""
    at_ms: float
    """When it was decided, in milliseconds since 1970, e.g. `1764250000000.0`."""
    waited_s: float
    """Seconds that the request waited, e.g. `0.0`."""
    model_name: str
    tenant_id: str
    outcome: Outcome
    """What became of the request."""
    refusal: DecisionRefusal | None
    """Error that the caller was given."""
    prompt: DecisionPrompt
    """The prompt."""
    weights: DecisionWeights
    """Weights in force."""
    admission: DecisionAdmission | None
    """The gate's decision."""
    chosen: Chosen | None
    """The chosen rank; null: none was."""
    pair: DecisionPair | UnsetType = UNSET
    """The best pair, compared with the best rank; for `/select_pair`."""
    shadow: DecisionShadow | UnsetType = UNSET
    """What the shadow weights would have chosen; where they scored it."""
    predicted_ttft_ms: float | UnsetType = UNSET
    """Predicted time to the first token on the chosen rank, of a pair the one that computes the
    prompt; once it was measured, e.g. `180.0`."""
    predicted_itl_ms: float | UnsetType = UNSET
    """Predicted time between tokens on the chosen rank; once it was measured, e.g. `21.0`."""
    withdrawn: bool | UnsetType = UNSET
    """True where the answer could not be written: nothing is booked then."""
    candidates: list[Candidate] | UnsetType = UNSET
    """All ranks with every term of their cost."""


class DecisionList(Struct, frozen=True):
    """GET /decisions: newest first."""

    decisions: list[Decision]
    """Decisions, newest first."""
