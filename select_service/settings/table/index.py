"""What is known of caches, and sent to other replicas."""

from typing import Annotated, Final

from indexer.limits import EventLossPolicy, RecoveryLimits, StreamLimits
from select_service.settings.table.selection import AdmissionControlSettings
from select_service.settings.value_types import (
    choice,
    comma_list,
    count,
    http_url,
    member,
    number,
    peer_urls,
    seconds,
    size,
    switch,
    tcp_port,
    whole,
)
from select_service.types import (
    CoreLimits,
    DumpLimits,
    KvEventsDefault,
    ReplicaLimits,
    TrustSettings,
)

_STREAMS: Final = StreamLimits()
_TRUST: Final = TrustSettings()
_CORE: Final = CoreLimits()
_RECOVERY: Final = RecoveryLimits()
_DUMPS: Final = DumpLimits()
_REPLICAS: Final = ReplicaLimits()


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
        "blocks of a scope that wait for a parent that was not announced; the oldest give way",
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
        whole(1, 1 << 20).static("kv_events_total"),
        "blocks of one rank's KV events applied before others get their turn",
    ] = _STREAMS.blocks_per_turn
    kv_messages_per_turn: Annotated[
        int,
        whole(1, 1 << 20).static("kv_events_total"),
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
        count().static('kv_replays_total{outcome="backlog_full"}'),
        "live batches of a rank held back while a replay runs; beyond, it is given up",
    ] = _STREAMS.backlog_batches_max
    kv_backlog_bytes_max: Annotated[
        int,
        size().static('kv_replays_total{outcome="backlog_full"}'),
        "bytes of live KV events of a rank held back while a replay runs; beyond, it is given up",
    ] = _STREAMS.backlog_bytes_max
    kv_message_bytes_max: Annotated[
        int,
        size().static('kv_bad_messages_total{reason="oversized"}'),
        "longest KV-event batch; a longer one is refused and costs itself, and the "
        "connection that sends one of more than twice as much is dropped",
    ] = _STREAMS.message_bytes_max
    kv_receive_messages_max: Annotated[
        int,
        count().static("kv_gaps_total"),
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
        seconds(zero=True).static("kv_estimate_ranks"),
        "a rank is matched by the estimate, too, once its publisher was lost, or had not published "
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
        whole(2, 65536).static('cached_tokens_told_total{outcome="compared"}'),
        "prompts of a rank over which is kept what its engine found of what was predicted "
        "(cached_tokens of prefill_complete); half of them before anything follows",
    ] = _TRUST.samples
    trust_error_max: Annotated[
        float,
        number(0.01, 1.0, metavar="SHARE").static("trust_missing_share"),
        "share of the predicted cached tokens that an engine may not find before its rank's "
        "overlap credit shrinks by the share; 1 = never",
    ] = _TRUST.error_max
    trust_error_clear: Annotated[
        float,
        number(0.01, 1.0, metavar="SHARE").static("trust_missing_share"),
        "below this share it counts in full again",
    ] = _TRUST.error_clear
    trust_reread_s: Annotated[
        float,
        seconds().static("index_rereads_total"),
        "a doubtful index is read again from the replay endpoint, and once more after this "
        "long if it is still doubtful, twice as long each time",
    ] = _TRUST.reread_s
    trust_reread_max_s: Annotated[
        float,
        seconds().static("index_rereads_total"),
        "longest pause between two such reads of an index",
    ] = _TRUST.reread_max_s
    trust_rereads_max: Annotated[
        int,
        count(0).static('kv_listeners{state="replaying"}'),
        "indexes read again at one time; 0 = never",
    ] = _TRUST.rereads_max
    no_freshness_weighting: Annotated[
        bool,
        switch(),
        "late events, open gaps and lost batches of a rank do not shrink its overlap credit",
    ] = not _TRUST.weigh_freshness
    freshness_grace_s: Annotated[
        float,
        seconds().static("trust_event_lag_seconds"),
        "a rank's events may be this late, or a gap open this long, before they shrink its credit",
    ] = _TRUST.lag_grace_s
    freshness_half_s: Annotated[
        float,
        seconds().static("trust_factor"),
        "beyond that, the credit halves every this many seconds",
    ] = _TRUST.lag_half_s


class PeerRecoverySettings(KvIndexSettings, frozen=True, kw_only=True):
    """The index from a peer at the start, and ours for others."""

    dumps_max: Annotated[
        int, count().live('dumps_total{outcome="refused"}'), "GET /dump at one time, 503 beyond"
    ] = _DUMPS.at_once_max
    dump_timeout_s: Annotated[
        float,
        seconds().live('dumps_total{outcome="timeout"}'),
        "longest GET /dump altogether; one that is read too slowly is cut off",
    ] = _DUMPS.timeout_s
    indexer_peers: Annotated[
        tuple[str, ...],
        peer_urls().static("index_recovery_attempts_total"),
        "services whose /dump fills the index at the start, the first that answers wins",
    ] = ()
    recovery_attempts_max: Annotated[
        int,
        count().static("index_recovery_attempts_total"),
        "rounds over all --indexer-peers before the service starts with an empty index",
    ] = _RECOVERY.attempts_max
    recovery_backoff_s: Annotated[
        float,
        seconds(zero=True).static("index_recovery_attempts_total"),
        "pause before the second round, twice as long before each further one",
    ] = _RECOVERY.backoff_s
    recovery_silence_s: Annotated[
        float,
        seconds().static('index_recovery_attempts_total{outcome="timeout"}'),
        "longest wait for a connection to a peer, and for the next piece of its dump",
    ] = _RECOVERY.silence_s
    recovery_timeout_s: Annotated[
        float,
        seconds().static('index_recovery_attempts_total{outcome="timeout"}'),
        "longest fetch from one peer altogether",
    ] = _RECOVERY.timeout_s
    recovery_bytes_max: Annotated[
        int,
        size().static("index_recovery_bytes_total"),
        "longest dump taken from a peer, unpacked",
    ] = _RECOVERY.bytes_max
    recovery_hold_s: Annotated[
        float,
        seconds(zero=True).static("waiting_for"),
        "the HTTP port opens when the index is recovered, or after this long",
    ] = 10.0  # start-up probes are more patient than that
    recovery_unclaimed_s: Annotated[
        float,
        seconds().static("index_recovered_ranks_dropped_total"),
        "recovered ranks that no worker is registered for leave the index after this long",
    ] = _CORE.recovery_unclaimed_s
    ready_timeout_s: Annotated[
        float,
        seconds(zero=True).static("ready_given_up"),
        "/ready waits this long for what is being recovered, then no longer",
    ] = 120.0
    ready_past_events_s: Annotated[
        float,
        seconds(zero=True).static('ready_given_up{name="past_events"}'),
        "/ready waits this long after the start for what the engines known by then replay of "
        "their past; 0 = not at all",
    ] = 5.0


class ReplicationSettings(PeerRecoverySettings, frozen=True, kw_only=True):
    """Other replicas of this service: where they are, and what may be taken from them."""

    replica_sync_port: Annotated[
        int | None,
        tcp_port().common(),
        "publish reservations to replicas on this ZMQ port; off: there are no replicas",
    ] = None
    replica_sync_peers: Annotated[
        tuple[str, ...],
        comma_list("ENDPOINT,…").static("replica_peers"),
        "replicas to listen to from the start, as tcp://host:port of their --replica-sync-port",
    ] = ()
    advertise_url: Annotated[
        str | None,
        http_url(),
        "URL at which replicas fetch from this one; off: --side-port, else --port, on the host "
        "that they listen to",
    ] = None
    replica_heartbeat_s: Annotated[
        float,
        seconds().static("replica_events_total"),
        "replicas are sent this often what is owned here; also how late a lost message is noticed",
    ] = _CORE.replica_heartbeat_s
    replica_output_interval_s: Annotated[
        float,
        seconds(zero=True).live("replica_events_total"),
        "replicas are sent output blocks together, this often: a stream fills several a second",
    ] = _CORE.replica_output_interval_s
    replica_timeout_s: Annotated[
        float,
        seconds().live("replica_heard_age_seconds"),
        "a replica silent for this long is gone: its reservations age, or are adopted",
    ] = _CORE.replica_timeout_s
    replica_orphan_ttl_s: Annotated[
        float,
        seconds().live('replica_reservations_total{event="orphan_expired"}'),
        "reservations of a replica that is gone, without lease or ttl_s, end this long after "
        "their last call",
    ] = _CORE.replica_orphan_ttl_s
    replica_gap_grace_s: Annotated[
        float,
        seconds(zero=True).live("replica_gaps_total"),
        "a missing message may be this late before the replica's snapshot is fetched",
    ] = _CORE.replica_gap_grace_s
    replica_pull_retry_s: Annotated[
        float,
        seconds().live("replica_pulls_total"),
        "shortest time between two fetches from one replica",
    ] = _CORE.replica_pull_retry_s
    replica_claims_max: Annotated[
        int,
        count().live('replica_refused_total{reason="claims"}'),
        "reservations remembered of one replica",
    ] = _CORE.replica_claims_max
    replica_ended_max: Annotated[
        int,
        count().static("replica_ended"),
        "ended reservations remembered, so that late messages about them change nothing",
    ] = _CORE.replica_ended_max
    replica_ended_s: Annotated[
        float, seconds().live("replica_ended"), "how long they are remembered"
    ] = _CORE.replica_ended_s
    replica_missing_max: Annotated[
        int,
        count().live("replica_statements_missing"),
        "lost messages of a replica known one by one; beyond, everything is fetched",
    ] = _CORE.replica_missing_max
    replica_publishers_max: Annotated[
        int,
        count().live('replica_refused_total{reason="publishers"}'),
        "replicas remembered, gone ones too; without state a restart makes another one",
    ] = _CORE.replica_publishers_max
    replica_peers_max: Annotated[
        int, whole(0, 16384).live("replica_peers"), "replicas listened to, 409 beyond"
    ] = _REPLICAS.peers_max
    replica_message_bytes_max: Annotated[
        int,
        count().static('replica_peers{state="broken"}'),
        "longest message of a replica; the connection that sends a longer one is dropped",
    ] = _REPLICAS.message_bytes_max
    replica_receive_messages_max: Annotated[
        int,
        count().static("replica_statements_missing"),
        "messages queued per replica before they are read; what is lost is pulled",
    ] = _REPLICAS.receive_messages_max
    replica_send_messages_max: Annotated[
        int,
        count().static("replica_snapshots_total"),
        "messages queued for a slow replica; what it loses it pulls",
    ] = _REPLICAS.send_messages_max
    replica_pulls_max: Annotated[
        int, count().static("replica_pulls_running"), "snapshots fetched from replicas at one time"
    ] = _REPLICAS.pulls_max
    replica_pull_timeout_s: Annotated[
        float,
        seconds().live('replica_pulls_total{outcome="timeout"}'),
        "longest fetch of a replica's snapshot altogether",
    ] = _REPLICAS.pull_timeout_s
    replica_pull_bytes_max: Annotated[
        int,
        size().live('replica_pulls_total{outcome="too_large"}'),
        "longest snapshot taken from a replica",
    ] = _REPLICAS.pull_bytes_max
    replica_pull_backoff_s: Annotated[
        float,
        seconds().live("replica_pulls_total"),
        "a replica whose snapshot could not be had is left alone for this long, then twice as long",
    ] = _REPLICAS.pull_backoff_s
    replica_pull_backoff_max_s: Annotated[
        float,
        seconds().live("replica_pulls_total"),
        "longest such pause, in which a replica is left alone",
    ] = _REPLICAS.pull_backoff_max_s
    replica_snapshots_max: Annotated[
        int,
        count().live('replica_snapshots_total{outcome="refused"}'),
        "snapshots given out at one time, 503 beyond",
    ] = _REPLICAS.snapshots_max
