"""Other replicas of this service: where they are, and what may be taken from them."""

from typing import Annotated, Final

from select_service.settings.table.peer_recovery import PeerRecoverySettings
from select_service.settings.value_types import (
    comma_list,
    count,
    http_url,
    seconds,
    size,
    tcp_port,
    whole,
)
from select_service.types import CoreLimits, ReplicaLimits

_CORE: Final = CoreLimits()
_REPLICAS: Final = ReplicaLimits()


class ReplicationSettings(PeerRecoverySettings, frozen=True, kw_only=True):
    """Other replicas of this service: where they are, and what may be taken from them."""

    replica_sync_port: Annotated[
        int | None,
        tcp_port().common(),
        "publish reservations to replicas on this ZMQ port; off: there are no replicas",
    ] = None
    replica_sync_peers: Annotated[
        tuple[str, ...],
        comma_list("ENDPOINT,…").watched("replica_peers"),
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
        seconds().watched("replica_events_total"),
        "replicas are told this often what is owned here; also how late a lost message is noticed",
    ] = _CORE.replica_heartbeat_s
    replica_output_interval_s: Annotated[
        float,
        seconds(zero=True).live("replica_events_total"),
        "replicas are told of output blocks together, this often: a stream fills several a second",
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
        count().watched("replica_ended"),
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
        count().watched('replica_peers{state="broken"}'),
        "longest message of a replica; the connection that sends a longer one is dropped",
    ] = _REPLICAS.message_bytes_max
    replica_receive_messages_max: Annotated[
        int,
        count().watched("replica_statements_missing"),
        "messages queued per replica before they are read; what is lost is pulled",
    ] = _REPLICAS.receive_messages_max
    replica_send_messages_max: Annotated[
        int,
        count().watched("replica_snapshots_total"),
        "messages queued for a slow replica; what it loses it pulls",
    ] = _REPLICAS.send_messages_max
    replica_pulls_max: Annotated[
        int, count().watched("replica_pulls_running"), "snapshots fetched from replicas at one time"
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
