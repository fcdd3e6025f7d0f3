"""Reservations, leases, sessions, workers and scopes: how many, how long, how large."""

from typing import Annotated, Final

from select_service.settings.row import HITS
from select_service.settings.table.security import SecuritySettings
from select_service.settings.value_types import count, length, number, seconds, whole
from select_service.types import CoreLimits

_CORE: Final = CoreLimits()


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
        count(0).watched("freed_reservation_ids"),
        "ids of ended reservations remembered, for ten minutes; ending one again is no error",
    ] = _CORE.freed_ids_max
    cached_token_reports_max: Annotated[
        int,
        count().live(HITS),
        "ended reservations whose engines may still report cached tokens, and as many reports that "
        "wait to be told to the replicas; of each the oldest go",
    ] = _CORE.cached_token_reports_max
    leases_max: Annotated[int, count(0).live("leases"), "open leases, 503 beyond; a KiB each"] = (
        _CORE.leases_max
    )
    tenant_share: Annotated[
        float,
        number(0.0, 1.0, metavar="SHARE").live("tenant_bound_refused_total"),
        "share of every bound that is kept for the tenants of the token file, each an equal "
        "part of it that nobody else can use up; 0 = none, first come first served",
    ] = _CORE.tenant_share
    lease_copies_max: Annotated[
        int,
        count(0).live("lease_copies"),
        "leases known through replicas; beyond, no renewal for them is taken here",
    ] = _CORE.lease_copies_max
    ended_leases_max: Annotated[
        int,
        count(0).watched("ended_leases"),
        "ids of ended leases remembered, for ten minutes; a late renewal is told what happened",
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
    wave_samples_max: Annotated[
        int,
        whole(1, 1 << 16).live(HITS),  # they are sorted in one go
        "samples of one POST /select_batch, 422 beyond",
    ] = _CORE.wave_samples_max
    session_ttl_s: Annotated[
        float,
        seconds(zero=True).watched("sessions"),
        "requests with a session_id go where the session's last one went, until it is silent for "
        "this long; 0: off",
    ] = _CORE.session_ttl_s
    session_gap_factor: Annotated[
        float,
        number(0.0, 1000000.0, metavar="X").watched("session_requests_total"),
        "a session may be silent for this many times its own usual gap between the end of a "
        "request and the next, at most --session-ttl-s; 0: for --session-ttl-s",
    ] = _CORE.session_gap_factor
    sessions_max: Annotated[
        int,
        count().watched("sessions_evicted_total"),
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
