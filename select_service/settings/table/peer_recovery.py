"""The index from a peer at the start, and ours for others."""

from typing import Annotated, Final

from indexer.limits import RecoveryLimits
from select_service.settings.table.kv_index import KvIndexSettings
from select_service.settings.value_types import count, peer_urls, seconds, size
from select_service.types import CoreLimits, DumpLimits

_CORE: Final = CoreLimits()
_RECOVERY: Final = RecoveryLimits()
_DUMPS: Final = DumpLimits()


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
        peer_urls().watched("index_recovery_attempts_total"),
        "services whose /dump fills the index at the start, the first that answers wins",
    ] = ()
    recovery_attempts_max: Annotated[
        int,
        count().watched("index_recovery_attempts_total"),
        "rounds over all --indexer-peers before the service starts with an empty index",
    ] = _RECOVERY.attempts_max
    recovery_backoff_s: Annotated[
        float,
        seconds(zero=True).watched("index_recovery_attempts_total"),
        "pause before the second round, twice as long before each further one",
    ] = _RECOVERY.backoff_s
    recovery_silence_s: Annotated[
        float,
        seconds().watched('index_recovery_attempts_total{outcome="timeout"}'),
        "longest wait for a connection to a peer, and for the next piece of its dump",
    ] = _RECOVERY.silence_s
    recovery_timeout_s: Annotated[
        float,
        seconds().watched('index_recovery_attempts_total{outcome="timeout"}'),
        "longest fetch from one peer altogether",
    ] = _RECOVERY.timeout_s
    recovery_bytes_max: Annotated[
        int,
        size().watched("index_recovery_bytes_total"),
        "longest dump taken from a peer, unpacked",
    ] = _RECOVERY.bytes_max
    recovery_hold_s: Annotated[
        float,
        seconds(zero=True).watched("waiting_for"),
        "the HTTP port opens when the index is recovered, or after this long",
    ] = 10.0  # start-up probes are more patient than that
    recovery_unclaimed_s: Annotated[
        float,
        seconds().watched("index_recovered_ranks_dropped_total"),
        "recovered ranks that no worker is registered for leave the index after this long",
    ] = _CORE.recovery_unclaimed_s
    ready_timeout_s: Annotated[
        float,
        seconds(zero=True).watched("ready_given_up"),
        "/ready waits this long for what is being recovered, then no longer",
    ] = 120.0
    ready_past_events_s: Annotated[
        float,
        seconds(zero=True).watched('ready_given_up{name="past_events"}'),
        "/ready waits this long after the start for what the engines known by then replay of "
        "their past; 0 = not at all",
    ] = 5.0
