"""How requests are let in, priced and booked."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from select_service.settings.row import HITS
from select_service.settings.table.clients import SecuritySettings
from select_service.settings.value_types import (
    choice,
    costs_object,
    count,
    json_object,
    length,
    number,
    optional,
    seconds,
    size,
    status,
    switch,
    text,
    weights_object,
    whole,
    yes_or_no,
)
from select_service.types import CacheBasis, CacheScope, CoreLimits, RouterConfig
from select_service.types.admission import AdmissionSettings, Mode, StaleReports
from select_service.types.router_config import Policy
from select_service.types.shadow import ShadowSettings, Weight

_CORE: Final = CoreLimits()
_SHADOW: Final = ShadowSettings()
_ROUTER: Final = RouterConfig()
_ADMISSION: Final = AdmissionSettings()


class BookingSettings(SecuritySettings, frozen=True, kw_only=True):
    """Reservations, leases, sessions, workers and scopes: how many, how long, how large."""

    reservation_ttl_s: Annotated[
        float,
        seconds(zero=True).live('reservation_events_total{event="expired"}'),
        "a reservation without a lease ends this long after its last lifecycle call; 0 = never",
    ] = _CORE.reservation_ttl_s
    reservation_ttl_max_s: Annotated[
        float,
        seconds().live('reservation_events_total{event="expired"}'),
        "longest ttl_s that a reservation may ask for instead, 422 beyond",
    ] = _CORE.reservation_ttl_max_s
    outlier_failures: Annotated[
        int,
        count(0).live('outlier_ejections_total{reason="failing"}'),
        "reservations of a rank that end as failed in a row before it is passed over, as long as "
        "others may be chosen; 0 = never",
    ] = _CORE.outlier_failures
    outlier_unreachable_s: Annotated[
        float,
        seconds(zero=True).live('outlier_ejections_total{reason="unreachable"}'),
        "a rank is passed over when its event publisher was connected and has been out of reach "
        "for this long; 0 = never",
    ] = _CORE.outlier_unreachable_s
    outlier_ejection_s: Annotated[
        float,
        seconds().live("outlier_ranks"),
        "a rank is passed over for this long before one request probes it, twice as long each time",
    ] = _CORE.outlier_ejection_s
    outlier_ejection_max_s: Annotated[
        float, seconds().live("outlier_ranks"), "longest such pause between two probes of a rank"
    ] = _CORE.outlier_ejection_max_s
    freed_ids_max: Annotated[
        int,
        count(0).static("freed_reservation_ids"),
        "ids of ended reservations remembered, for ten minutes; ending one again is no error",
    ] = _CORE.freed_ids_max
    cached_token_reports_max: Annotated[
        int,
        count().live(HITS),
        "ended reservations whose engines may still report cached tokens, and as many reports that "
        "wait to be sent to the replicas; of each the oldest go",
    ] = _CORE.cached_token_reports_max
    leases_max: Annotated[int, count(0).live("leases"), "open leases, 503 beyond; a KiB each"] = (
        _CORE.leases_max
    )
    tenant_share: Annotated[
        float,
        number(0.0, 1.0, metavar="SHARE").live("tenant_bound_refused_total"),
        "share of every bound that is kept for the tenants of the token file, each an equal "
        "part of it that no other can use up; 0 = none, first come first served",
    ] = _CORE.tenant_share
    lease_copies_max: Annotated[
        int,
        count(0).live("lease_copies"),
        "leases known through replicas; beyond, no renewal for them is taken here",
    ] = _CORE.lease_copies_max
    ended_leases_max: Annotated[
        int,
        count(0).static("ended_leases"),
        "ids of ended leases remembered, for ten minutes; a late renewal learns what happened",
    ] = _CORE.ended_leases_max
    lease_reopen_s: Annotated[
        float,
        seconds(zero=True).live('lease_events_total{event="reopening"}'),
        "a lease closed so lately is not opened again, 409; 0 = at once, at most ten minutes",
    ] = _CORE.lease_reopen_s
    lease_ttl_min_s: Annotated[
        float,
        seconds().live('lease_events_total{event="expired"}'),
        "shortest time to live of a lease, 422 below",
    ] = _CORE.lease_ttl_min_s
    lease_ttl_max_s: Annotated[
        float,
        seconds().live('lease_events_total{event="expired"}'),
        "longest time to live of a lease, 422 beyond; the load of a client that died may stay "
        "this long",
    ] = _CORE.lease_ttl_max_s
    lease_name_length_max: Annotated[
        int,
        length().live(HITS),
        "characters of a lease_id and of an owner, 422 beyond",
    ] = _CORE.lease_name_length_max
    batch_operations_max: Annotated[
        int,
        count().live(HITS),
        "operations of one batch, 422 beyond",
    ] = _CORE.batch_operations_max
    batch_samples_max: Annotated[
        int,
        whole(1, 1 << 16).live(HITS),  # they are sorted in one go
        "samples of one POST /select_batch, 422 beyond",
    ] = _CORE.batch_samples_max
    session_ttl_s: Annotated[
        float,
        seconds(zero=True).static("sessions"),
        "requests with a session_id go where the session's last one went, until it is silent for "
        "this long; 0: off",
    ] = _CORE.session_ttl_s
    session_gap_factor: Annotated[
        float,
        number(0.0, 1000000.0, metavar="X").static("session_requests_total"),
        "a session may be silent for this many times its own usual gap between the end of a "
        "request and the next, at most --session-ttl-s; 0: for --session-ttl-s",
    ] = _CORE.session_gap_factor
    sessions_max: Annotated[
        int,
        count().static("sessions_evicted_total"),
        "sessions remembered; the one silent for longest is forgotten first",
    ] = _CORE.sessions_max
    data_parallel_size_max: Annotated[
        int,
        whole(1, 1 << 16).live("ranks"),  # all of a worker's are attached in one turn of the loop
        "most ranks a worker may have, 400 beyond",
    ] = _CORE.data_parallel_size_max
    workers_max: Annotated[int, count().live(HITS), "workers registered, 409 beyond"] = (
        _CORE.workers_max
    )
    worker_bytes_max: Annotated[
        int,
        count().live(HITS),
        "longest record of a worker, in MessagePack; 422 beyond",
    ] = _CORE.worker_bytes_max
    scopes_max: Annotated[
        int,
        count().live(HITS),
        "scopes (model and tenant) with workers; a worker that would open one more is incomplete",
    ] = _CORE.scopes_max
    unserved_scopes_max: Annotated[
        int,
        whole(1, 1000).live(HITS),  # all are looked at when one has to leave: 0.1 ms
        "scopes without a worker whose requests are counted by name, and as many that never "
        "had one; the tenant that has most loses one for another",
    ] = _CORE.unserved_scopes_max
    event_sources_max: Annotated[
        int,
        count().live(HITS),
        "ranks whose KV events are listened to; a worker that would open one more is incomplete",
    ] = _CORE.event_sources_max
    scope_linger_s: Annotated[
        float,
        seconds(zero=True).live("scopes_closed_total"),
        "a scope without workers is given up after this long, or when its place is needed; "
        "its block size stays pinned",
    ] = _CORE.scope_linger_s
    reservations_max: Annotated[
        int,
        count().live(HITS),
        "live reservations booked here, with those that wait; 503 beyond",
    ] = _CORE.reservations_max
    tokens_per_request_max: Annotated[
        int,
        count().live('selections_failed_total{code="too_many_tokens"}'),
        "tokens of a prompt, whatever the size of their blocks (of hashes: those of their blocks), "
        "422 beyond",
    ] = _CORE.tokens_per_request_max
    id_length_max: Annotated[
        int,
        length().live(HITS),
        "characters of a session_id, and of a reservation_id or selection_id that is booked, "
        "422 beyond",
    ] = _CORE.id_length_max
    name_length_max: Annotated[
        int,
        length().live(HITS),
        "characters of a model, tenant, lora_name or fairness_id, 422 beyond",
    ] = _CORE.name_length_max
    queue_recheck_s: Annotated[
        float,
        seconds().live("pending_requests"),
        "waiting requests are examined again this often, even if nothing has happened",
    ] = _CORE.queue_recheck_s


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
        "share of what a rank can have computed since its last report that counts as "
        "gone from its queue; off: as --policy has it",
    ] = None
    interference_scale: Annotated[
        float | None,
        number(0.0, 1000000.0, metavar="X"),
        "what a prompt's own prefill costs each request that its rank has, less where prompts "
        "wait; off: as --policy has it",
    ] = None
    slowness_scale: Annotated[
        float | None,
        number(0.0, 1.0, metavar="X"),
        "what is added to the cost of a worn rank (one that takes more than three times as long as "
        "three quarters of its pool) for each time that it takes longer, as a share of it; off: as "
        "--policy has it",
    ] = None
    overtaking_s: Annotated[
        float | None,
        number(0.0, 1000000.0, metavar="S").static("selections_queued_total"),
        "where no policy file orders the queue, a waiting request is overtaken by one that "
        "comes up to this many seconds later for each 1,000 tokens less to compute; off: as "
        "--policy has it",
    ] = None
    overtaking_share: Annotated[
        float | None,
        number(0.0, 1.0, metavar="X").static("selections_queued_total"),
        "or, where queues are long, by one that comes up to this share of the wait later; "
        "the longer of the two counts; off: as --policy has it",
    ] = None
    kv_transfer_cost_per_block: Annotated[
        float,
        number(0.0, 1000000.0, metavar="BLOCKS").static(limit=False),
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
        switch().static("selections_pulling_total", limit=False),
        "let ranks pull KV blocks of prompts from others, where that costs less than computing "
        "them: selections then have a kv_source",
    ] = _ROUTER.kv_pull
    kv_pull_costs: Annotated[
        Literal["set", "learnt"],
        choice("set", "learnt", metavar="WHICH").static("measured_pull_seconds_total", limit=False),
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


class AdmissionControlSettings(CostSettings, frozen=True, kw_only=True):
    """Whether a request is let in now: thresholds, limits, policies, and what workers report."""

    admission_control: Annotated[
        Mode,
        choice("token-capacity", "none").live(env="DYN_ADMISSION_CONTROL"),
        "whether busy thresholds are in force",
    ] = _ADMISSION.mode
    active_decode_blocks_threshold: Annotated[
        float | None,
        optional(number(0.0, 1.0)).live(
            "admission_busy_ranks", env="DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD"
        ),
        "a rank is busy above this share of its KV blocks",
    ] = None
    active_prefill_tokens_threshold: Annotated[
        int | None,
        optional(size(0)).live("admission_busy_ranks", env="DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD"),
        "a rank is busy above this many active prefill tokens",
    ] = None
    active_prefill_tokens_threshold_frac: Annotated[
        float | None,
        optional(number(0.0)).live(
            "admission_busy_ranks", env="DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC"
        ),
        "a rank is busy above this multiple of its max_num_batched_tokens",
    ] = None
    overload_status_code: Annotated[
        int,
        status().static(env="DYN_HTTP_OVERLOAD_STATUS_CODE", limit=False),
        "status of refusals for load",
    ] = _ADMISSION.overload_status
    max_inflight_default: Annotated[
        int | None,
        optional(count()).live("admission_full_ranks", env="DYN_ENGINE_REQUEST_LIMIT"),
        "requests given at a time to a worker that does not say (`max_inflight`)",
    ] = None
    max_queued_default: Annotated[
        int,
        count(0).live("admission_decisions_total", env="DYN_DYNAMO_REQUEST_QUEUE_LIMIT"),
        "requests that may wait for such a worker (`max_queued`)",
    ] = _ADMISSION.max_queued
    queue_deadline_s: Annotated[
        float | None,
        optional(seconds()).live("admission_wait_seconds"),
        "how long a request may wait; off: for a full worker as long as it is measured to take "
        "until its turn (30 while that is unknown) or as its slo_ttft_ms allows, else for ever",
    ] = None
    queue_deadline_min_s: Annotated[
        float,
        seconds().live("admission_wait_seconds"),
        "the least that may be measured",
    ] = _ADMISSION.queue_deadline_min_s
    queue_deadline_max_s: Annotated[
        float,
        seconds().live("admission_wait_seconds"),
        "the most that a request waits for a full worker without --queue-deadline-s",
    ] = _ADMISSION.queue_deadline_max_s
    global_cache_hit_threshold: Annotated[
        float,
        number(0.0, 1.0).live(limit=False),
        "share of a prompt a worker must have cached, where the request does not say",
    ] = _ADMISSION.cache_hit_threshold
    cache_hit_scope: Annotated[
        CacheScope,
        choice("gpu", "cpu", "disk", "any").live(),
        "down to which tier cached tokens count for that",
    ] = _ADMISSION.cache_hit_scope
    cache_hit_basis: Annotated[
        CacheBasis,
        choice("prompt", "cacheable").live(),
        "share of the prompt, or of what an engine can have cached of it",
    ] = _ADMISSION.cache_hit_basis
    cache_hit_attempts_max: Annotated[
        int,
        count(0).live("cache_threshold_guarded_total"),
        "a request with this many attempts behind it is held to no threshold",
    ] = _ADMISSION.cache_hit_attempts_max
    admission_policy: Annotated[
        str,
        text("NAME"),
        "always-admit, token-bucket, reject-all, tier-shed, gaie-legacy or slo-shed",
    ] = _ADMISSION.policy
    admission_config: Annotated[
        Mapping[str, Any], json_object(), "configuration of the policy"
    ] = {}
    slo_class_max: Annotated[
        str | None,
        text("NAME").static("admission_clamped_total"),
        "the most important class a request may claim; one above counts as this",
    ] = None
    slo_target_ttft_s: Annotated[
        float | None,
        optional(number(0.001, metavar="S")).static(limit=False),
        "a rank is saturated with the prefill tokens it computes in that time; "
        "off: half of slo-shed's tightest target, 1 s for other policies",
    ] = _ADMISSION.slo_target_ttft_s
    prefill_tokens_per_s: Annotated[
        float,
        number(1.0, metavar="N").static(limit=False),
        "what one rank computes, until it was measured",
    ] = _ADMISSION.prefill_tokens_per_s
    return_horizon_s: Annotated[
        float,
        seconds().static("admission_promises"),
        "how far ahead a refused request is promised a place at most: 10 minutes at once, and "
        "farther the longer an overload lasts",
    ] = _ADMISSION.return_horizon_s
    return_slots_max: Annotated[
        int, count(0).static("admission_promises"), "promises held at once, 200 bytes each"
    ] = _ADMISSION.return_slots_max
    tenant_labels_max: Annotated[
        int,
        whole(2, 10000).static('admission_tenant_requests_total{fairness_id="other"}'),
        "tenants with admission series of their own; the rest is summed up under `other`",
    ] = _ADMISSION.tenant_labels_max
    load_report_stale_s: Annotated[
        float,
        seconds().live("worker_reports_stale"),
        "age at which a worker's report of its load is believed no longer",
    ] = _ADMISSION.load_report_stale_s
    load_report_stale_as: Annotated[
        StaleReports,
        choice("full", "unknown").live("worker_reports_stale"),
        "what a rank whose report is that old is for slo-shed: full, or as loaded as it is booked",
    ] = _ADMISSION.load_report_stale_as
    load_report_bytes_max: Annotated[
        int,
        size().static("worker_reports_bad_total"),
        "longest message with which a worker reports its load beside its KV events; longer is bad",
    ] = _ADMISSION.load_report_bytes_max
