"""Whether a request is let in now: thresholds, limits, policies, and what workers report."""

from collections.abc import Mapping
from typing import Annotated, Any, Final

from select_service.settings.table.cost import CostSettings
from select_service.settings.value_types import (
    choice,
    count,
    json_object,
    number,
    optional,
    seconds,
    size,
    status,
    text,
    whole,
)
from select_service.types import CacheBasis, CacheScope
from select_service.types.admission import AdmissionSettings, Mode, StaleReports

_ADMISSION: Final = AdmissionSettings()


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
        status().watched(env="DYN_HTTP_OVERLOAD_STATUS_CODE", limit=False),
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
        "how long a request may wait; off: 30 for a full worker, else for ever",
    ] = None
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
        text("NAME").watched("admission_clamped_total"),
        "the most important class a request may claim; one above counts as this",
    ] = None
    slo_target_ttft_s: Annotated[
        float | None,
        optional(number(0.001, metavar="S")).watched(limit=False),
        "a rank is saturated with the prefill tokens it computes in that time; "
        "off: half of slo-shed's tightest target, 1 s for other policies",
    ] = _ADMISSION.slo_target_ttft_s
    prefill_tokens_per_s: Annotated[
        float,
        number(1.0, metavar="N").watched(limit=False),
        "what one rank computes, until it was measured",
    ] = _ADMISSION.prefill_tokens_per_s
    return_horizon_s: Annotated[
        float,
        seconds().watched("admission_promises"),
        "how far ahead a refused request is promised a place at most: 10 minutes at once, and "
        "farther the longer an overload lasts",
    ] = _ADMISSION.return_horizon_s
    return_slots_max: Annotated[
        int, count(0).watched("admission_promises"), "promises held at once, 200 bytes each"
    ] = _ADMISSION.return_slots_max
    tenant_labels_max: Annotated[
        int,
        whole(2, 10000).watched('admission_tenant_requests_total{fairness_id="other"}'),
        "tenants with admission series of their own; the rest is summed up under `other`",
    ] = _ADMISSION.tenant_labels_max
    load_report_stale_s: Annotated[
        float,
        seconds().live("worker_reports_stale"),
        "age at which what a worker told of its load is believed no longer",
    ] = _ADMISSION.load_report_stale_s
    load_report_stale_as: Annotated[
        StaleReports,
        choice("full", "unknown").live("worker_reports_stale"),
        "what a rank whose report is that old is for slo-shed: full, or as loaded as it is booked",
    ] = _ADMISSION.load_report_stale_as
    load_report_bytes_max: Annotated[
        int,
        size().watched("worker_reports_bad_total"),
        "longest message with which a worker tells its load beside its KV events; longer is bad",
    ] = _ADMISSION.load_report_bytes_max
