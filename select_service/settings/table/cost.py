"""What a worker costs, and what other weights would say."""

from collections.abc import Mapping
from typing import Annotated, Final, Literal

from select_service.settings.table.booking import BookingSettings
from select_service.settings.value_types import (
    choice,
    costs_object,
    number,
    switch,
    weights_object,
    yes_or_no,
)
from select_service.types import RouterConfig
from select_service.types.router_config import Policy
from select_service.types.shadow import ShadowSettings, Weight

_SHADOW: Final = ShadowSettings()
_ROUTER: Final = RouterConfig()


class CostSettings(BookingSettings, frozen=True, kw_only=True):
    """What a worker costs, and what other weights would say."""

    policy: Annotated[
        Policy,
        choice("kv-cost", "first-token", metavar="NAME").common(),
        "how ranks are priced: by the contract's formula (kv-cost), or by the time until first "
        "tokens come (first-token)",
    ] = _ROUTER.policy
    decode_load_scale: Annotated[
        float | None,
        number(0.0, 1000000.0, metavar="X"),
        "what a block held while decoding costs, in blocks to compute; off: as --policy has it",
    ] = None
    delay_scale: Annotated[
        float | None,
        number(0.0, 1000000.0, metavar="X"),
        "what a prompt's own prefill costs each of those behind it; off: as --policy has it",
    ] = None
    eviction_scale: Annotated[
        float | None,
        number(0.0, 1000000.0, metavar="X"),
        "cost of each block that a prompt evicts from an average cache where all of every "
        "prompt is found cached, less where less is found; off: as --policy has it",
    ] = None
    expects_booked: Annotated[
        bool | None,
        yes_or_no(),
        "whether blocks that other reservations cover count as cached; off: as --policy has it",
    ] = None
    context_load_scale: Annotated[
        float | None,
        number(0.0, 1000000.0, metavar="X"),
        "cost of each block that a request attends to, in blocks to compute; a shared one "
        "counts for each request; off: as --policy has it",
    ] = None
    pace_scale: Annotated[
        float | None,
        number(0.0, 1.0, metavar="X"),
        "share of what a rank can have computed since it was last heard of that counts as "
        "gone from its queue; off: as --policy has it",
    ] = None
    interference_scale: Annotated[
        float | None,
        number(0.0, 1000000.0, metavar="X"),
        "what a prompt's own prefill costs each request that its rank has, less where prompts "
        "wait; off: as --policy has it",
    ] = None
    overtaking_s: Annotated[
        float | None,
        number(0.0, 1000000.0, metavar="S").watched("selections_queued_total"),
        "where no policy file orders the queue, a waiting request is overtaken by one that "
        "comes up to this many seconds later for each 1,000 tokens less to compute; off: as "
        "--policy has it",
    ] = None
    overtaking_share: Annotated[
        float | None,
        number(0.0, 1.0, metavar="X").watched("selections_queued_total"),
        "or, where queues are long, by one that comes up to this share of the wait later; "
        "the longer of the two counts; off: as --policy has it",
    ] = None
    kv_transfer_cost_per_block: Annotated[
        float,
        number(0.0, 1000000.0, metavar="BLOCKS").watched(limit=False),
        "what moving one KV block from one worker to another costs, in blocks of prefill",
    ] = _ROUTER.kv_transfer_cost_per_block
    kv_transfer_cost_by_domain: Annotated[
        Mapping[str, float],
        costs_object(),
        "the same between workers in one place of a topology domain, by domain, e.g. "
        "rack=0.02,zone=0.05; the least of those that they share counts",
    ] = {}
    kv_pull: Annotated[
        bool,
        switch().watched("selections_pulling_total", limit=False),
        "let ranks pull KV blocks of prompts from others, where that costs less than computing "
        "them: selections then have a kv_source",
    ] = _ROUTER.kv_pull
    kv_pull_costs: Annotated[
        Literal["set", "learnt"],
        choice("set", "learnt", metavar="WHICH").watched(
            "measured_pull_seconds_total", limit=False
        ),
        "what a pull is taken to cost: as --kv-transfer-cost-per-block and its domains are set, or "
        "learnt from first tokens, where they were measured four times",
    ] = _ROUTER.kv_pull_costs
    shadow_weights: Annotated[
        Mapping[str, Weight],
        weights_object().live("shadow_decisions_total"),
        "weights that score live traffic and act on nothing, where they differ from those in "
        "force; {} = none",
    ] = {}
    shadow_sample: Annotated[
        float,
        number(0.0001, 1.0, metavar="SHARE").live(
            'shadow_skipped_total{reason="sample"}', limit=False
        ),
        "share of the decisions that they score",
    ] = _SHADOW.sample
    shadow_cost_max: Annotated[
        float,
        number(0.0001, 1.0, metavar="SHARE").live('shadow_skipped_total{reason="budget"}'),
        "share of the time that scoring may take; once it is spent, decisions are skipped",
    ] = _SHADOW.cost_max
