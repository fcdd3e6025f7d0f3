"""The nouns of a decision record, as `/decisions` and `explain` answer it.

`core/decisions/record.py` says what they are made of, `core/decisions/explain.py` how.
"""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from select_service.types.shadow import ShadowWeights

__all__ = [
    "Candidate",
    "Chosen",
    "Decision",
    "DecisionAdmission",
    "DecisionIndex",
    "DecisionLeg",
    "DecisionLegs",
    "DecisionList",
    "DecisionPair",
    "DecisionPrompt",
    "DecisionRefusal",
    "DecisionShadow",
    "DecisionShadowChoice",
    "DecisionWeights",
    "RunnerUp",
]

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
    "wave",
]
"""Why a rank was no candidate. `failing` and `unreachable`: it is passed over for a while, because
its reservations failed or its event publisher is out of reach; `refused`: nobody was, the request
was turned away before; `session`: its session is on another; `wave`: the rank was chosen for all of
a batch together (POST /select_batch)."""


Outcome = Literal["placed", "refused", "cache_threshold"]
"""How a decision ended."""


class DecisionPrompt(Struct, frozen=True, kw_only=True):
    """The prompt a decision was about."""

    isl_tokens: int
    blocks: int  # whole ones
    block_size: int
    block_hashes: list[str]  # u64 as decimal text, the first 512
    is_cut: bool  # whether there are more


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
    delay_weight: float  # at that time: of its own prefill, for those who wait behind it
    eviction_weight: float  # at that time: of that, for each token its rank computed lately
    expects_booked: bool  # whether what others are booked with counts as cached
    context_load_scale: float
    pace: float  # at that time: tokens a second that a queue counts as worked off
    interference: float  # at that time: of its own prefill, for each request of its rank


class DecisionAdmission(Struct, frozen=True, kw_only=True):
    """What the gate said."""

    policy: str
    slo_class: str | None
    tenant: str
    outcome: Literal["admit", "wait", "refuse"]
    reason: str
    gate: str | None  # who refused, or made it wait


class DecisionRefusal(Struct, frozen=True, kw_only=True):
    """The error the caller was given."""

    code: str
    error: str
    gate: str | None
    reason: str | None


class RunnerUp(Struct, frozen=True):
    """The best of the others."""

    worker_id: int
    dp_rank: int
    cost: float


class Chosen(Struct, frozen=True, kw_only=True):
    """The chosen rank, and by how much it was cheaper."""

    worker_id: int
    dp_rank: int
    endpoint: str | None
    cost: float  # of a pair: of both legs
    margin: float | None  # cost of the best other minus this one's
    runner_up: RunnerUp | None
    ties: int  # how many had the lowest cost
    picked_by: Literal["lowest", "tie", "softmax", "only"]


class DecisionLeg(Struct, frozen=True, kw_only=True):
    """One rank of a pair."""

    worker_id: int
    dp_rank: int
    endpoint: str | None
    cost: float


class DecisionPair(Struct, frozen=True, kw_only=True):
    """What /select_pair compared: the best pair with the best rank for the whole request."""

    mode: Literal["aggregated", "disaggregated"]
    reason: str
    aggregated_cost: float | None
    disaggregated_cost: float | None
    prefill: DecisionLeg | None  # of the best pair, whether it was taken or not
    decode: DecisionLeg | None


class DecisionShadowChoice(Struct, frozen=True, kw_only=True):
    """The rank of one side's choice, and what it means for the prompt."""

    worker_id: int
    dp_rank: int
    cost_by_live_weights: float
    cost_by_shadow_weights: float
    prefill_tokens: int  # of the prompt, to compute
    cached_tokens: int  # of the prompt, on the rank
    queued_prefill_tokens: int  # of others, before it
    decode_blocks: int  # with the prompt's


class DecisionShadow(Struct, frozen=True, kw_only=True):
    """What the shadow weights would have chosen; regrets in blocks."""

    weights: ShadowWeights
    agrees: bool
    regret_by_live_weights: float  # what the shadow's choice costs more
    regret_by_shadow_weights: float  # what the live choice costs more
    live: DecisionShadowChoice
    shadow: DecisionShadowChoice


class DecisionIndex(Struct, frozen=True):
    """What was known of a rank's KV events, a quarter of a second before at most."""

    state: Literal["none", "silent", "current", "uncertain", "replaying"]
    lag_s: float | None  # age of the last batch, by the engine's clock
    open_gaps: int  # being mended
    estimated: bool | UnsetType = UNSET  # true: matched by what routing put there


class DecisionLegs(Struct, frozen=True):
    """The cost of a rank as a leg of a pair; None: not in that place."""

    prefill_cost: float | None
    decode_cost: float | None  # behind the prefill rank chosen, moving blocks included
    blocks_to_move: int | None


class Candidate(Struct, frozen=True):
    """One rank with every term of its cost (blocks); None: this term was not computed.

    `context_cost` adds up, for each of its requests and this one, the blocks it attends to and a
    fixed part for being one, and a part for waiting for a seat where all are taken.

    cost = (prefill_load_scale · (prefill_cost - credit + delay_cost + eviction_cost
                                  + interference_cost)
            + decode_load_scale · decode_cost + context_load_scale · context_cost) · taint_factor
    """

    worker_id: int
    dp_rank: int
    endpoint: str | None
    excluded: Excluded | None
    prefill_tokens: int | None  # active, P
    decode_blocks: int | None  # active, D
    shared_blocks: int | None  # of this prompt, already among those
    device_blocks: int | None
    host_blocks: int | None
    disk_blocks: int | None
    cached_tokens: int | None  # as far as its index is believed
    prefill_cost: float | None
    credit: float | None  # what overlap takes off
    decode_cost: float | None
    taint_factor: float | None  # None: no taint is preferred
    cost: float | None
    index: DecisionIndex | None
    trust: float  # multiplies the credit and what is cached
    expected_blocks: int | None = None  # not cached yet, and booked: taken off with the credit
    churn_tokens: float | None = None  # computed lately, older ones for less
    delay_cost: float | None = None
    eviction_cost: float | None = None
    context_cost: float | None = None
    interference_cost: float | None = None
    unheard_s: float | None = None  # since its queue was known; None: no policy here asks
    ahead_tokens: int | None = None  # of its queue, computed since at most
    worked_off_tokens: float | None = None  # the part that counts as computed, in `prefill_cost`
    requests: int | None = None  # live ones of the rank
    legs: DecisionLegs | UnsetType = UNSET  # of /select_pair


class Decision(Struct, kw_only=True):
    """One selection, and everything that decided it."""

    decision_id: str
    selection_id: str | None
    reservation_id: str | None
    route: Literal["select", "select_and_reserve", "select_pair"]
    at_ms: float  # unix time
    waited_s: float
    model_name: str
    tenant_id: str
    outcome: Outcome
    refusal: DecisionRefusal | None
    prompt: DecisionPrompt
    weights: DecisionWeights
    admission: DecisionAdmission | None
    chosen: Chosen | None
    pair: DecisionPair | UnsetType = UNSET
    shadow: DecisionShadow | UnsetType = UNSET  # where other weights scored it, too
    withdrawn: bool | UnsetType = UNSET  # true: its answer could not be written, nothing is booked
    candidates: list[Candidate] | UnsetType = UNSET


class DecisionList(Struct, frozen=True):
    """GET /decisions: newest first."""

    decisions: list[Decision]
