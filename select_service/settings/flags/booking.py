"""Reservations, leases, sessions, workers and scopes: how many, how long, how large."""

from __future__ import annotations

from typing import Final

from select_service.settings.flags import values
from select_service.settings.flags.flag import Flag

BOOKING: Final = (
    Flag(
        "--reservation-ttl-s",
        values.seconds(zero=True),
        "S",
        "a reservation without a lease ends this long after its last lifecycle call; 0 = never",
        watch='reservation_events_total{event="expired"}',
        reloads=True,
    ),
    Flag(
        "--reservation-ttl-max-s",
        values.seconds(zero=False),
        "S",
        "longest ttl_s a booking may ask for instead, 422 beyond",
        watch='reservation_events_total{event="expired"}',
        reloads=True,
    ),
    Flag(
        "--freed-ids-max",
        values.whole(0, values.COUNT_MAX),
        "N",
        "ids of ended reservations remembered, for ten minutes; ending one again is no error",
        watch="freed_reservation_ids",
    ),
    Flag(
        "--leases-max",
        values.whole(0, values.COUNT_MAX),
        "N",
        "open leases, 503 beyond; a KiB each",
        watch="leases",
        reloads=True,
    ),
    Flag(
        "--tenant-share",
        values.number(0.0, 1.0),
        "SHARE",
        "share of every bound that is kept for the tenants of the token file, each an equal part of"
        " it that nobody else can use up; 0 = none, first come first served",
        watch="tenant_bound_refused_total",
        reloads=True,
    ),
    Flag(
        "--lease-copies-max",
        values.whole(0, values.COUNT_MAX),
        "N",
        "leases known through replicas; beyond, no renewal for them is taken here",
        watch="lease_copies",
        reloads=True,
    ),
    Flag(
        "--ended-leases-max",
        values.whole(0, values.COUNT_MAX),
        "N",
        "ids of ended leases remembered, for ten minutes; a late renewal is told what happened",
        watch="ended_leases",
    ),
    Flag(
        "--lease-reopen-s",
        values.seconds(zero=True),
        "S",
        "a lease closed so lately is not opened again, 409; 0 = at once, at most ten minutes",
        watch='lease_events_total{event="reopening"}',
        reloads=True,
    ),
    Flag(
        "--lease-ttl-min-s",
        values.seconds(zero=False),
        "S",
        "shortest time to live of a lease, 422 below",
        watch='lease_events_total{event="expired"}',
        reloads=True,
    ),
    Flag(
        "--lease-ttl-max-s",
        values.seconds(zero=False),
        "S",
        "longest, 422 beyond: how long the load of a client that died may stay",
        watch='lease_events_total{event="expired"}',
        reloads=True,
    ),
    Flag(
        "--lease-name-length-max",
        values.whole(1, values.LENGTH_MAX),
        "N",
        "characters of a lease_id and of an owner, 422 beyond",
        watch='limit_hits_total{name="lease_name_length_max"}',
        reloads=True,
    ),
    Flag(
        "--batch-operations-max",
        values.whole(1, values.COUNT_MAX),
        "N",
        "operations of one batch, 422 beyond",
        watch='limit_hits_total{name="batch_operations_max"}',
        reloads=True,
    ),
    Flag(
        "--wave-samples-max",
        values.whole(1, 1 << 16),  # they are sorted in one go
        "N",
        "samples of one POST /select_batch, 422 beyond",
        watch='limit_hits_total{name="wave_samples_max"}',
        reloads=True,
    ),
    Flag(
        "--session-ttl-s",
        values.seconds(zero=True),
        "S",
        "requests with a session_id go where its last one went, until silent for this long; 0: off",
        watch="sessions",
    ),
    Flag(
        "--sessions-max",
        values.whole(1, values.COUNT_MAX),
        "N",
        "sessions remembered; the one silent for longest is forgotten first",
        watch="sessions_evicted_total",
    ),
    Flag(
        "--data-parallel-size-max",
        values.whole(1, 1 << 16),  # all of a worker's are seated in one turn of the loop
        "N",
        "most ranks a worker may have, 400 beyond",
        watch="ranks",
        reloads=True,
    ),
    Flag(
        "--workers-max",
        values.whole(1, values.COUNT_MAX),
        "N",
        "workers registered, 409 beyond",
        watch='limit_hits_total{name="workers_max"}',
        reloads=True,
    ),
    Flag(
        "--worker-bytes-max",
        values.whole(1, values.COUNT_MAX),
        "N",
        "longest record of a worker, in MessagePack; 422 beyond",
        watch='limit_hits_total{name="worker_bytes_max"}',
        reloads=True,
    ),
    Flag(
        "--scopes-max",
        values.whole(1, values.COUNT_MAX),
        "N",
        "scopes (model and tenant) with workers; a worker that would open one more is incomplete",
        watch='limit_hits_total{name="scopes_max"}',
        reloads=True,
    ),
    Flag(
        "--unserved-scopes-max",
        values.whole(1, 1_000),  # all are looked at when one has to leave: 0.1 ms
        "N",
        "scopes without a worker whose requests are counted by name, and as many that never had"
        " one; the tenant that has most loses one for another",
        watch='limit_hits_total{name="unserved_scopes_max"}',
        reloads=True,
    ),
    Flag(
        "--event-sources-max",
        values.whole(1, values.COUNT_MAX),
        "N",
        "ranks whose KV events are listened to; a worker that would open one more is incomplete",
        watch='limit_hits_total{name="event_sources_max"}',
        reloads=True,
    ),
    Flag(
        "--scope-linger-s",
        values.seconds(zero=True),
        "S",
        "a scope without workers is given up after this long, or when its place is needed; its"
        " block size stays pinned",
        watch="scopes_closed_total",
        reloads=True,
    ),
    Flag(
        "--reservations-max",
        values.whole(1, values.COUNT_MAX),
        "N",
        "live reservations booked here, with those that wait; 503 beyond",
        watch='limit_hits_total{name="reservations_max"}',
        reloads=True,
    ),
    Flag(
        "--blocks-per-request-max",
        values.whole(1, values.COUNT_MAX),
        "N",
        "blocks of a prompt, 422 beyond",
        watch='selections_failed_total{code="too_many_blocks"}',
        reloads=True,
    ),
    Flag(
        "--id-length-max",
        values.whole(1, values.LENGTH_MAX),
        "N",
        "characters of a session_id, and of a reservation_id or selection_id that is booked, 422"
        " beyond",
        watch='limit_hits_total{name="id_length_max"}',
        reloads=True,
    ),
    Flag(
        "--name-length-max",
        values.whole(1, values.LENGTH_MAX),
        "N",
        "characters of a model, tenant, lora_name or fairness_id, 422 beyond",
        watch='limit_hits_total{name="name_length_max"}',
        reloads=True,
    ),
    Flag(
        "--queue-recheck-s",
        values.seconds(zero=False),
        "S",
        "waiting requests are looked at again this often, whatever did not happen",
        watch="pending_requests",
        reloads=True,
    ),
)
