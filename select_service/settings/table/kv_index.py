"""KV events, their replay, the index, and how far it is believed."""

from typing import Annotated, Final

from indexer.limits import EventLossPolicy, StreamLimits
from select_service.settings.table.admission import AdmissionControlSettings
from select_service.settings.value_types import (
    choice,
    count,
    member,
    number,
    seconds,
    size,
    switch,
    whole,
)
from select_service.types import CoreLimits, KvEventsDefault, TrustSettings

_STREAMS: Final = StreamLimits()
_TRUST: Final = TrustSettings()
_CORE: Final = CoreLimits()


class KvIndexSettings(AdmissionControlSettings, frozen=True, kw_only=True):
    """KV events, their replay, the index, and how far it is believed."""

    on_event_loss: Annotated[
        EventLossPolicy,
        member(EventLossPolicy),
        "when lost KV events cannot be replayed: keep the rank's known blocks (and mark it "
        "uncertain), or drop them",
    ] = EventLossPolicy.KEEP
    kv_poll_interval_s: Annotated[
        float,
        seconds(zero=True).live("kv_replays_asked_total"),
        "ask a silent worker's replay endpoint for missed KV events this often; 0 = never",
    ] = _STREAMS.poll_after_s
    kv_polls_max: Annotated[
        int,
        count().live('kv_listeners{state="replaying"}'),
        "replays at one time that only look for missed last events; each takes a socket",
    ] = _STREAMS.polls_max
    kv_orphan_blocks_max: Annotated[
        int,
        count(0).live("index_orphan_blocks"),
        "blocks of a scope that wait for a parent nobody has announced; the oldest give way",
    ] = _STREAMS.orphan_blocks_max
    kv_source_blocks_max: Annotated[
        int,
        size().live('kv_events_total{outcome="no_room"}'),
        "blocks held of one rank; what it stores beyond is left out until it removes some",
    ] = _STREAMS.source_blocks_max
    index_bytes_max: Annotated[
        int,
        size().live("index_budget_bytes"),
        "bytes of all indexes together, estimated; beyond, ranks with more than their share "
        "store no more, and if that does not help the largest is forgotten, of the tenant "
        "that has most beyond its part",
    ] = _STREAMS.index_bytes_max
    kv_blocks_per_turn: Annotated[
        int,
        whole(1, 1 << 20).watched("kv_events_total"),
        "blocks of one rank's KV events applied before others get their turn",
    ] = _STREAMS.blocks_per_turn
    kv_messages_per_turn: Annotated[
        int,
        whole(1, 1 << 20).watched("kv_events_total"),
        "KV-event messages taken from one socket before the next socket's turn",
    ] = _STREAMS.messages_per_turn
    replay_timeout_s: Annotated[
        float,
        seconds().live('kv_replays_total{outcome="deadline"}'),
        "longest replay of KV events altogether",
    ] = _STREAMS.replay_deadline_s
    replay_silence_s: Annotated[
        float,
        seconds().live('kv_replays_total{outcome="silent"}'),
        "longest wait for the next reply within a replay",
    ] = _STREAMS.replay_silence_s
    replay_attempts_max: Annotated[
        int,
        count().live("kv_lost_batches_total"),
        "replays in a row that may bring nothing before the missing events count as lost",
    ] = _STREAMS.replay_attempts_max
    replay_backoff_s: Annotated[
        float,
        seconds().live("kv_replays_asked_total"),
        "a replay endpoint that failed is left alone for this long, twice as long each time",
    ] = _STREAMS.replay_backoff_s
    replay_backoff_max_s: Annotated[
        float, seconds().live("kv_replays_asked_total"), "longest such pause between attempts"
    ] = _STREAMS.replay_backoff_max_s
    replay_replies_max: Annotated[
        int,
        count().live('kv_replays_total{outcome="budget"}'),
        "most replies taken from one replay",
    ] = _STREAMS.replay_replies_max
    replay_bytes_max: Annotated[
        int, size().live('kv_replays_total{outcome="budget"}'), "most bytes taken from one replay"
    ] = _STREAMS.replay_bytes_max
    kv_rebuild_bytes_max: Annotated[
        int,
        size().live('kv_replays_total{outcome="budget"}'),
        "bytes of replies kept while a rank's blocks are rebuilt from batch 0; beyond, the "
        "rebuild is given up and what is held stays",
    ] = _STREAMS.rebuild_bytes_max
    replay_useless_max: Annotated[
        int,
        count().live('kv_replays_total{outcome="garbage"}'),
        "replies of one replay that may be garbled or out of place",
    ] = _STREAMS.replay_useless_max
    kv_backlog_batches_max: Annotated[
        int,
        count().watched('kv_replays_total{outcome="backlog_full"}'),
        "live batches of a rank held back while a replay runs; beyond, it is given up",
    ] = _STREAMS.backlog_batches_max
    kv_backlog_bytes_max: Annotated[
        int,
        size().watched('kv_replays_total{outcome="backlog_full"}'),
        "bytes of live KV events of a rank held back while a replay runs; beyond, it is given up",
    ] = _STREAMS.backlog_bytes_max
    kv_message_bytes_max: Annotated[
        int,
        size().watched('kv_bad_messages_total{reason="oversized"}'),
        "longest KV-event batch; a longer one is refused and costs itself, and the "
        "connection that sends one of more than twice as much is dropped",
    ] = _STREAMS.message_bytes_max
    kv_receive_messages_max: Annotated[
        int,
        count().watched("kv_gaps_total"),
        "KV-event messages queued per rank before they are read",
    ] = _STREAMS.receive_messages_max
    kv_events_default: Annotated[
        KvEventsDefault,
        choice("auto", "engine", "predicted", "none"),
        "where the blocks of workers are known from whose record has no kv_events: engine: KV "
        "events, without whose endpoint a worker is incomplete; predicted: KV events where it "
        "has an endpoint, otherwise an estimate of what routing put there; auto: predicted where "
        "the record has total_kv_blocks, engine elsewhere; none: nowhere, as with "
        "DYN_USE_KV_EVENTS=false",
    ] = "auto"
    kv_estimate_after_s: Annotated[
        float,
        seconds(zero=True).watched("kv_estimate_ranks"),
        "a rank is matched by the estimate, too, once its publisher was lost, or had not told of "
        "the prompts that it computed, for this long, or batches are lost; 0 = never",
    ] = _TRUST.estimate_after_s
    kv_estimate_rank_blocks: Annotated[
        int,
        count().live("kv_estimate_blocks"),
        "blocks that the estimate keeps of one rank whose record has no total_kv_blocks",
    ] = _CORE.kv_estimate_rank_blocks
    kv_estimate_blocks_max: Annotated[
        int,
        count().live("kv_estimate_blocks"),
        "blocks of all ranks that are estimated; beyond, a rank forgets its least recent ones "
        "for each new one",
    ] = _CORE.kv_estimate_blocks_max
    kv_estimate_ttl_s: Annotated[
        float,
        seconds().live("kv_estimate_blocks"),
        "a prompt counts as cached for this long after a rank has computed it, in an estimate",
    ] = _CORE.kv_estimate_ttl_s
    trust_samples: Annotated[
        int,
        whole(2, 65536).watched('cached_tokens_told_total{outcome="compared"}'),
        "prompts of a rank over which is kept what its engine found of what was predicted "
        "(cached_tokens of prefill_complete); half of them before anything follows",
    ] = _TRUST.samples
    trust_error_max: Annotated[
        float,
        number(0.01, 1.0, metavar="SHARE").watched("trust_missing_share"),
        "share of the predicted cached tokens that an engine may not find before its rank's "
        "overlap credit shrinks by the share; 1 = never",
    ] = _TRUST.error_max
    trust_error_clear: Annotated[
        float,
        number(0.01, 1.0, metavar="SHARE").watched("trust_missing_share"),
        "below this share it counts in full again",
    ] = _TRUST.error_clear
    trust_reread_s: Annotated[
        float,
        seconds().watched("index_rereads_total"),
        "a doubtful index is read again from the replay endpoint, and once more after this "
        "long if it is still doubtful, twice as long each time",
    ] = _TRUST.reread_s
    trust_reread_max_s: Annotated[
        float,
        seconds().watched("index_rereads_total"),
        "longest pause between two such reads of an index",
    ] = _TRUST.reread_max_s
    trust_rereads_max: Annotated[
        int,
        count(0).watched('kv_listeners{state="replaying"}'),
        "indexes read again at one time; 0 = never",
    ] = _TRUST.rereads_max
    no_freshness_weighting: Annotated[
        bool,
        switch(),
        "late events, open gaps and lost batches of a rank do not shrink its overlap credit",
    ] = not _TRUST.weigh_freshness
    freshness_grace_s: Annotated[
        float,
        seconds().watched("trust_event_lag_seconds"),
        "a rank's events may be this late, or a gap open this long, before they shrink its credit",
    ] = _TRUST.lag_grace_s
    freshness_half_s: Annotated[
        float,
        seconds().watched("trust_factor"),
        "beyond that, the credit halves every this many seconds",
    ] = _TRUST.lag_half_s
