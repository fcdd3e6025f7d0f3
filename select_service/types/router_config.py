"""The weights and switches in force, and the limits of core and edge.

One limit, one name: the rows of `settings/table` set them, and take their defaults from here.
"""

from typing import Literal

from msgspec import Struct

from select_service.types.workers import KvEventsDefault

Policy = Literal["kv-cost", "first-token"]
"""By the contract's formula, or by when first tokens come (`core/pricing/cost.py`)."""


class RouterConfig(Struct, frozen=True, kw_only=True):
    """The weights and switches in force; defaults are the reference's."""

    policy: Policy = "kv-cost"
    overlap_score_credit: float = 1.0
    overlap_score_credit_decay: float = 0.0
    prefill_load_scale: float = 1.0
    temperature: float = 0.0
    host_cache_hit_weight: float = 0.75
    disk_cache_hit_weight: float = 0.25
    use_kv_events: bool = True  # False: as `kv_events_default="none"`
    kv_events_default: KvEventsDefault = "auto"  # of workers whose record does not say
    track_prefill_tokens: bool = True
    assume_kv_reuse: bool = True  # blocks that prompts share on a rank are counted once
    queue_threshold: float = 16.0
    kv_transfer_cost_per_block: float = 0.1  # of prefill: moving a block costs a tenth of it
    kv_transfer_cost_by_domain: dict[str, float] = {}  # between workers in the same place of it
    kv_pull: bool = False  # whether ranks may pull blocks of prompts from others
    kv_pull_costs: Literal["set", "learnt"] = "learnt"  # what that is taken to cost
    # terms of `first-token` (`weights.py`); None: as the policy has them
    decode_load_scale: float | None = None
    delay_scale: float | None = None
    eviction_scale: float | None = None
    expects_booked: bool | None = None
    context_load_scale: float | None = None
    pace_scale: float | None = None
    interference_scale: float | None = None
    slowness_scale: float | None = None
    decode_active_request_weight: float = 0.0  # of each request of a rank, in blocks
    overtaking_s: float | None = None  # of the queue, where no policy file orders it
    overtaking_share: float | None = None


class TrustSettings(Struct, frozen=True, kw_only=True):
    """When what a rank's index says counts for less."""

    samples: int = 16  # prompts over which errors are kept; half of them before anything follows
    error_max: float = 0.3  # share of predicted tokens that were not found; 1: never too many
    error_clear: float = 0.15  # below that the rank counts in full again
    reread_s: float = 30.0  # between two readings of a doubtful index, doubled up to the next
    reread_max_s: float = 3600.0
    rereads_max: int = 4  # at one time; each takes a second of the event loop, in slices
    weigh_freshness: bool = True
    lag_grace_s: float = 5.0  # events may be late by so much, and a gap open for so long
    lag_half_s: float = 10.0  # beyond, half of the credit goes in so many seconds
    estimate_after_s: float = 10.0  # without events where some are due; 0: never

    def check(self) -> None:
        """Refuse what makes no sense.

        Raises:
            ValueError: naming it.
        """
        if not 0.0 < self.error_clear <= self.error_max:
            raise ValueError("trust: error_clear must be above 0 and at most error_max")
        if self.samples < 1 or not (self.reread_s > 0.0 and self.lag_half_s > 0.0):
            raise ValueError("trust: samples, reread_s and lag_half_s must be above 0")


class CoreLimits(Struct, kw_only=True):
    """Bounds of the core's own memory and of one turn of housekeeping.

    One object that all code reads each time: `edge/config_reload.py` writes it.
    """

    data_parallel_size_max: int = 1024
    workers_max: int = 10_000
    worker_bytes_max: int = 256 << 10  # of a record; a thousand ranks with an endpoint each: 50 KB
    scopes_max: int = 4_096  # some 20 KB each while empty
    unserved_scopes_max: int = 64  # counted by name; as many again that never had a worker
    event_sources_max: int = 65_535  # ranks listened to; a socket, and four open files each
    scope_linger_s: float = 600.0  # without workers, before a scope is given up
    kv_estimate_blocks_max: int = 1 << 22  # of all ranks without KV events; some 60 bytes each
    kv_estimate_rank_blocks: int = 1 << 15  # of one whose record has no `total_kv_blocks`
    kv_estimate_ttl_s: float = 1800.0  # since a prompt was last computed there
    reservations_max: int = 1_000_000  # 2 to 3 KB each
    tokens_per_request_max: int = 1 << 21  # of a prompt; in blocks of one 130 bytes each if booked
    id_length_max: int = 256  # characters of reservation_id, selection_id
    name_length_max: int = 256  # characters of a model, tenant, adapter, who shares fairly
    freed_ids_max: int = 200_000  # remembered ids; ten minutes of 300 ends a second
    cached_token_reports_max: int = 1024  # awaited after the end, and to be sent; 3 KB each
    reservation_ttl_s: float = 300.0  # since the last lifecycle call; 0 = never
    reservation_ttl_max_s: float = 86400.0  # most a request may ask for
    tenant_share: float = 0.5  # of every bound here, kept for the tenants of the token file
    leases_max: int = 10_000  # one a client process; 1 KiB each
    ended_leases_max: int = 10_000  # remembered, for ten minutes
    lease_reopen_s: float = 30.0  # after it was closed; longer than a request is under way
    lease_copies_max: int = 100_000  # known through replicas; beyond, their orphans age singly
    lease_ttl_min_s: float = 1.0  # housekeeping is no finer
    lease_ttl_max_s: float = 3600.0
    lease_name_length_max: int = 256  # characters of lease_id and of owner
    batch_operations_max: int = 1_000  # their member names are read in one go, 5 µs each
    batch_samples_max: int = 1_024  # they are sorted in one go, half a µs each
    session_ttl_s: float = 0.0  # of silence, then a session may go anywhere; 0: sessions are off
    session_gap_factor: float = 8.0  # of its own gaps it may be silent for; 0: session_ttl_s
    sessions_max: int = 100_000  # 0.5 KB each
    queue_recheck_s: float = 60.0
    outlier_failures: int = 5  # of a rank's reservations in a row, then it is ejected; 0: never
    outlier_unreachable_s: float = 5.0  # without its publisher, that was there before; 0: never
    outlier_ejection_s: float = 5.0  # the first time, doubled with every probe up to the next
    outlier_ejection_max_s: float = 60.0
    recovery_unclaimed_s: float = 600.0  # ranks out of a dump that are not registered
    scopes_per_turn_max: int = 16  # 5 µs each while they rest, 40 to close one
    sources_weighed_per_turn_max: int = 64  # ranks; 2 to 4 µs each
    expired_per_turn_max: int = 64  # reservations; 5 µs each: a turn takes a third of a ms
    let_in_per_turn_max: int = 16  # waiting requests, when load goes; some 30 µs each
    judged_per_turn_max: int = 16  # waiting requests, when the policy changes; some 50 µs each
    dropped_per_turn_max: int = 32  # the same of ranks that went, with blocks of their own
    swept_nodes_per_turn_max: int = 64
    streams_watched_per_turn_max: int = 32  # for lag and gaps; 3 to 6 µs each
    replica_heartbeat_s: float = 1.0
    replica_output_interval_s: float = 3.0  # output blocks are sent together, this often
    replica_timeout_s: float = 10.0  # silent for longer: gone, its claims age or are adopted
    replica_pull_retry_s: float = 2.0  # between two pulls from one publisher
    replica_pull_timeout_s: float = 30.0  # a pull that was not ended
    replica_gap_grace_s: float = 0.5  # how long a missing statement may be late
    replica_claims_max: int = 1_000_000  # of one publisher
    replica_ended_max: int = 200_000  # ends of claims remembered
    replica_missing_max: int = 1024  # lost statements known one by one; beyond: all is pulled
    replica_orphan_ttl_s: float = 300.0  # of reservations whose owner is gone, since last touched
    replica_ended_s: float = 600.0  # how long what has ended is remembered
    replica_publishers_max: int = 256
    replica_items_per_message_max: int = 32  # statements under one number
    replica_resolved_per_turn_max: int = 64  # claims looked at again; some µs each
    decision_ring: int = 1024  # records of decisions; 0: none
    decision_ring_bytes: int = 16 << 20  # a thousand of 256 ranks under changing load: 6 MB


class ReplicaLimits(Struct, kw_only=True):
    """Bounds of the replica plane's edge: what peers may cost, and how long they may take.

    Written as `CoreLimits` is.
    """

    peers_max: int = 256  # a SUB socket and two file descriptors each
    message_bytes_max: int = 32 << 20  # two million tokens in blocks of one make 19 MB
    receive_messages_max: int = 10_000  # held per peer until they are read
    send_messages_max: int = 10_000  # held per slow peer; what it loses it pulls later
    pulls_max: int = 4  # snapshots fetched at one time
    pull_timeout_s: float = 30.0  # one snapshot altogether
    pull_bytes_max: int = 1 << 30  # one snapshot; a million reservations of 100 blocks
    pull_backoff_s: float = 0.2  # after a pull that failed, doubled each time up to the next
    pull_backoff_max_s: float = 10.0
    snapshots_max: int = 8  # given out at one time, 503 beyond


class StateLimits(Struct, frozen=True, kw_only=True):
    """How long the state directory's disk is waited for, and by how many."""

    stall_s: float = 10.0  # one commit; what clients wait for an answer at the most, about
    waiting_max: int = 16_384  # answers, twice `--connections-max`; some 3 KB each


class DumpLimits(Struct, kw_only=True):
    """Bounds of GET /dump. Written as `CoreLimits` is."""

    at_once_max: int = 8  # 503 beyond; each keeps the index from tidying up
    timeout_s: float = 600.0  # one dump altogether: ten million blocks at 1.5 MB a second


class BodyLimits(Struct, frozen=True, kw_only=True):
    """How much a body may hold; each a flag of the same name behind `--body-`, but for the depth.

    All of a body is read in one go, which no client may draw out: a prompt of a million tokens,
    thousands of media items and records of workers with thousands of endpoints find room.
    """

    depth_max: int = 128  # `--json-depth-max`; the reference's parser stops there as well
    parts_max: int = 16_384  # strings, objects, arrays: one or two µs each
    numbers_max: int = 1_100_000  # not packed: 40 ms of JSON where they are no array of a prompt
    short_bytes_max: int = 1 << 21  # of a body without a prompt: a worker has 8,000 endpoints
    unknown_bytes_max: int = 1 << 18  # of an unknown member: up to half a second a megabyte
    media_bytes_max: int = 1 << 20  # of an array of objects in MessagePack


class PickerLimits(Struct, frozen=True, kw_only=True):
    """Bounds of `edge/epp`; the flags begin with `--epp-`."""

    streams_max: int = 8192  # as many as there may be connections over HTTP
    body_bytes_max: int = 8 << 20
    buffered_bytes_max: int = 256 << 20  # of all streams together
    tokenize_timeout_s: float = 0.25  # 0: no engine is asked
    tokenize_calls_max: int = 64
    tokenize_cache_bytes: int = 32 << 20
