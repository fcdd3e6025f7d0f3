"""The index from a peer at the start, and ours for others."""

from __future__ import annotations

from typing import Final

from select_service.settings.flags import values
from select_service.settings.flags.flag import Flag

RECOVERY: Final = (
    Flag(
        "--dumps-max",
        values.whole(1, values.COUNT_MAX),
        "N",
        "GET /dump at one time, 503 beyond",
        watch='dumps_total{outcome="refused"}',
        reloads=True,
    ),
    Flag(
        "--dump-timeout-s",
        values.seconds(zero=False),
        "S",
        "longest GET /dump altogether; one that is read too slowly is cut off",
        watch='dumps_total{outcome="timeout"}',
        reloads=True,
    ),
    Flag(
        "--indexer-peers",
        values.peer_urls,
        "URL,…",
        "services whose /dump fills the index at the start, the first that answers wins",
        watch="index_recovery_attempts_total",
    ),
    Flag(
        "--recovery-attempts-max",
        values.whole(1, values.COUNT_MAX),
        "N",
        "rounds over all --indexer-peers before the service starts with an empty index",
        watch="index_recovery_attempts_total",
    ),
    Flag(
        "--recovery-backoff-s",
        values.seconds(zero=True),
        "S",
        "pause before the second round, twice as long before each further one",
        watch="index_recovery_attempts_total",
    ),
    Flag(
        "--recovery-silence-s",
        values.seconds(zero=False),
        "S",
        "longest wait for a connection to a peer, and for the next piece of its dump",
        watch='index_recovery_attempts_total{outcome="timeout"}',
    ),
    Flag(
        "--recovery-timeout-s",
        values.seconds(zero=False),
        "S",
        "longest fetch from one peer altogether",
        watch='index_recovery_attempts_total{outcome="timeout"}',
    ),
    Flag(
        "--recovery-bytes-max",
        values.whole(1, values.BYTES_MAX),
        "N",
        "longest dump taken from a peer, unpacked",
        watch="index_recovery_bytes_total",
    ),
    Flag(
        "--recovery-hold-s",
        values.seconds(zero=True),
        "S",
        "the HTTP port opens when the index is recovered, or after this long",
        watch="waiting_for",
    ),
    Flag(
        "--recovery-unclaimed-s",
        values.seconds(zero=False),
        "S",
        "recovered ranks that no worker is registered for leave the index after this long",
        watch="index_recovered_ranks_dropped_total",
    ),
    Flag(
        "--ready-timeout-s",
        values.seconds(zero=True),
        "S",
        "/ready waits this long for what is being recovered, then no longer",
        watch="ready_given_up",
    ),
)
