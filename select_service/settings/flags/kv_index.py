"""KV events, their replay, the index, and how far it is believed."""

from __future__ import annotations

from typing import Final

from indexer.settings import EventLossPolicy
from select_service.settings.flags import values
from select_service.settings.flags.flag import Flag

INDEX: Final = (
    Flag(
        "--on-event-loss",
        values.member(EventLossPolicy),
        "keep|drop",
        "when lost KV events cannot be replayed: keep the rank's known blocks (and mark it"
        " uncertain), or drop them",
    ),
    Flag(
        "--kv-poll-interval-s",
        values.seconds(zero=True),
        "S",
        "ask a silent worker's replay endpoint for missed KV events this often; 0 = never",
        watch="kv_replays_asked_total",
        reloads=True,
    ),
    Flag(
        "--kv-polls-max",
        values.whole(1, values.COUNT_MAX),
        "N",
        "replays at one time that only look for missed last events; each takes a socket",
        watch='kv_listeners{state="replaying"}',
        reloads=True,
    ),
    Flag(
        "--kv-orphan-blocks-max",
        values.whole(0, values.COUNT_MAX),
        "N",
        "blocks of a scope that wait for a parent nobody has announced; the oldest give way",
        watch="index_orphan_blocks",
        reloads=True,
    ),
    Flag(
        "--kv-source-blocks-max",
        values.whole(1, values.BYTES_MAX),
        "N",
        "blocks held of one rank; what it stores beyond is left out until it removes some",
        watch='kv_events_total{outcome="no_room"}',
        reloads=True,
    ),
    Flag(
        "--index-bytes-max",
        values.whole(1, values.BYTES_MAX),
        "N",
        "bytes of all indexes together, estimated; beyond, ranks with more than their share store"
        " no more, and if that does not help the largest is forgotten, of the tenant that has most"
        " beyond its part",
        watch="index_budget_bytes",
        reloads=True,
    ),
    Flag(
        "--kv-blocks-per-turn",
        values.whole(1, 1 << 20),
        "N",
        "blocks of one rank's KV events applied before others get their turn",
        watch="kv_events_total",
    ),
    Flag(
        "--kv-messages-per-turn",
        values.whole(1, 1 << 20),
        "N",
        "KV-event messages taken from one socket before the next socket's turn",
        watch="kv_events_total",
    ),
    Flag(
        "--replay-timeout-s",
        values.seconds(zero=False),
        "S",
        "longest replay of KV events altogether",
        watch='kv_replays_total{outcome="deadline"}',
        reloads=True,
    ),
    Flag(
        "--replay-silence-s",
        values.seconds(zero=False),
        "S",
        "longest wait for the next reply within a replay",
        watch='kv_replays_total{outcome="silent"}',
        reloads=True,
    ),
    Flag(
        "--replay-attempts-max",
        values.whole(1, values.COUNT_MAX),
        "N",
        "replays in a row that may bring nothing before the missing events count as lost",
        watch="kv_lost_batches_total",
        reloads=True,
    ),
    Flag(
        "--replay-backoff-s",
        values.seconds(zero=False),
        "S",
        "a replay endpoint that failed is left alone for this long, twice as long each time",
        watch="kv_replays_asked_total",
        reloads=True,
    ),
    Flag(
        "--replay-backoff-max-s",
        values.seconds(zero=False),
        "S",
        "and no longer than this",
        watch="kv_replays_asked_total",
        reloads=True,
    ),
    Flag(
        "--replay-replies-max",
        values.whole(1, values.COUNT_MAX),
        "N",
        "most replies taken from one replay",
        watch='kv_replays_total{outcome="budget"}',
        reloads=True,
    ),
    Flag(
        "--replay-bytes-max",
        values.whole(1, values.BYTES_MAX),
        "N",
        "most bytes taken from one replay",
        watch='kv_replays_total{outcome="budget"}',
        reloads=True,
    ),
    Flag(
        "--kv-rebuild-bytes-max",
        values.whole(1, values.BYTES_MAX),
        "N",
        "bytes of replies kept while a rank's blocks are rebuilt from batch 0; beyond, the rebuild"
        " is given up and what is held stays",
        watch='kv_replays_total{outcome="budget"}',
        reloads=True,
    ),
    Flag(
        "--replay-useless-max",
        values.whole(1, values.COUNT_MAX),
        "N",
        "most replies of one replay that are garbled or out of place",
        watch='kv_replays_total{outcome="garbage"}',
        reloads=True,
    ),
    Flag(
        "--kv-backlog-batches-max",
        values.whole(1, values.COUNT_MAX),
        "N",
        "live batches of a rank held back while a replay runs; beyond, it is given up",
        watch='kv_replays_total{outcome="backlog_full"}',
    ),
    Flag(
        "--kv-backlog-bytes-max",
        values.whole(1, values.BYTES_MAX),
        "N",
        "bytes of live KV events of a rank held back while a replay runs; beyond, it is given up",
        watch='kv_replays_total{outcome="backlog_full"}',
    ),
    Flag(
        "--kv-message-bytes-max",
        values.whole(1, values.BYTES_MAX),
        "N",
        "longest KV-event batch; a longer one is refused and costs itself, and the connection that"
        " sends one of more than twice as much is dropped",
        watch='kv_bad_messages_total{reason="oversized"}',
    ),
    Flag(
        "--kv-receive-messages-max",
        values.whole(1, values.COUNT_MAX),
        "N",
        "KV-event messages queued per rank before they are read",
        watch="kv_gaps_total",
    ),
    Flag(
        "--trust-samples",
        values.whole(2, 65536),
        "N",
        "prompts of a rank over which is kept what its engine found of what was predicted"
        " (cached_tokens of prefill_complete); half of them before anything follows",
        watch='cached_tokens_told_total{outcome="compared"}',
    ),
    Flag(
        "--trust-error-max",
        values.number(0.01, 1.0),
        "SHARE",
        "share of the predicted cached tokens that an engine may not find before its rank's overlap"
        " credit shrinks by the share; 1 = never",
        watch="trust_missing_share",
    ),
    Flag(
        "--trust-error-clear",
        values.number(0.01, 1.0),
        "SHARE",
        "below this share it counts in full again",
        watch="trust_missing_share",
    ),
    Flag(
        "--trust-reread-s",
        values.seconds(zero=False),
        "S",
        "a doubtful index is read again from the replay endpoint, and once more after this long if"
        " it is still doubtful, twice as long each time",
        watch="index_rereads_total",
    ),
    Flag(
        "--trust-reread-max-s",
        values.seconds(zero=False),
        "S",
        "and no longer than this",
        watch="index_rereads_total",
    ),
    Flag(
        "--trust-rereads-max",
        values.whole(0, values.COUNT_MAX),
        "N",
        "indexes read again at one time; 0 = never",
        watch='kv_listeners{state="replaying"}',
    ),
    Flag(
        "--no-freshness-weighting",
        None,
        "",
        "late events, open gaps and lost batches of a rank do not shrink its overlap credit",
    ),
    Flag(
        "--freshness-grace-s",
        values.seconds(zero=False),
        "S",
        "a rank's events may be this late, or a gap open this long, before they shrink its credit",
        watch="trust_event_lag_seconds",
    ),
    Flag(
        "--freshness-half-s",
        values.seconds(zero=False),
        "S",
        "beyond that, the credit halves every this many seconds",
        watch="trust_factor",
    ),
)
