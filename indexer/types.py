"""The nouns of the index: tiers, ranks, scopes, namespaces, and the limits its parts obey.

Plain values only; nothing here computes. Every file of `indexer` and `select_service` may import
this one, and it imports nothing from the project.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Final, NamedTuple

from msgspec import Struct

U64_MASK: Final = (1 << 64) - 1

PackedHashes = bytes
"""A run of 64-bit hashes, 8 bytes each, little-endian, in prompt order."""

HASH_BYTES: Final = 8


class Tier(IntEnum):
    """Where a worker keeps a block. Matching a prompt goes down the tiers in this order."""

    DEVICE = 0
    HOST_PINNED = 1
    DISK = 2
    EXTERNAL = 3  # reported together with disk


class WorkerRank(NamedTuple):
    """One data-parallel rank of one worker: the unit that owns load and blocks."""

    worker_id: int  # u64
    dp_rank: int  # u32


class Scope(NamedTuple):
    """Key of a partition."""

    model_name: str
    tenant_id: str


class Namespace(NamedTuple):
    """What goes into every block hash of a prompt besides its tokens; "" means none."""

    lora_name: str = ""
    cache_salt: str = ""


BASE_NAMESPACE: Final = Namespace()


class LinkState(Struct, frozen=True):
    """State of the connection to one publisher."""

    is_connected: bool
    since: float  # time of the last change, or when listening began; monotonic seconds
    connections: int  # made so far
    load_reports: int  # messages that reported load rather than blocks
    is_refused: bool = False  # a publisher is there but rejected our handshake


class EventLossPolicy(Enum):
    """What to do with a rank's blocks when lost events cannot be recovered (`--on-event-loss`)."""

    KEEP = "keep"  # keep crediting the known blocks, mark the rank uncertain
    DROP = "drop"  # never credit a stale block: forget the rank's blocks


SOCKET_BYTES_FACTOR: Final = 2
"""Messages up to this many times `StreamLimits.message_bytes_max` are received, to be refused by
their size; a longer one breaks the connection, because libzmq does not skip what it will not
hold."""


class StreamLimits(Struct, kw_only=True):
    """Budgets of the event streams; the defaults fit engines that run with their own defaults.

    One shared object, read afresh on every use; its owner may change it at run time.
    """

    replay_silence_s: float = 1.0
    """Longest wait for the next useful reply. A publisher answers between two messages, after at
    most 100 ms when idle; one second leaves room for a busy machine."""

    replay_deadline_s: float = 30.0
    """Longest total replay time. 10,000 batches, a default buffer, take about one second."""

    replay_attempts_max: int = 2
    """Consecutive requests that may bring nothing new before the missing batches count as lost."""

    replay_replies_max: int = 200_000
    """Replies to one replay, twenty default buffers."""

    replay_bytes_max: int = 1 << 30
    """Bytes of replies to one replay."""

    rebuild_bytes_max: int = 128 << 20
    """Bytes of replies kept while a rank's blocks are rebuilt from batch 0: nothing that is held
    goes before they reach the last batch that is known. A default buffer takes 10 to 50 MB."""

    replay_useless_max: int = 2_000
    """Replies that may be garbled or out of place: twice what a stale reply socket can hold."""

    replay_backoff_s: float = 5.0
    replay_backoff_max_s: float = 60.0
    """Pause after an endpoint did not answer; doubles each time up to the maximum."""

    backlog_batches_max: int = 20_000
    backlog_bytes_max: int = 128 << 20
    """Live batches that may wait for a replay to finish, among them one of the longest; beyond that
    the replay is abandoned."""

    orphan_blocks_max: int = 65_536
    """Blocks of one partition that may wait for a parent that has not been announced."""

    source_blocks_max: int = 16 << 20
    """Blocks held for one rank; further stores are dropped until the rank has removed some."""

    index_bytes_max: int = 8 << 30
    """Estimated size of all indexes together. Above it, a source with more than its share stores
    nothing more; if that is not enough, the largest source is forgotten."""

    poll_after_s: float = 10.0
    """Silence after which a replay is requested, in case the last batches were lost; 0: never."""

    blocks_per_turn: int = 512
    """Blocks applied before yielding to other work, about a quarter of a millisecond."""

    messages_per_turn: int = 64
    """Messages read from one socket before moving on to the next."""

    turn_s: float = 0.0005
    """Time for all sockets together before the event loop may serve requests again."""

    pause_s: float = 0.002
    """Pause after a read, during which messages accumulate. One wake-up costs as much as a dozen
    messages; two milliseconds are negligible beside an engine's step."""

    receive_messages_max: int = 200_000
    """Live messages that libzmq queues for us; its default of 1,000 loses bursts. A message with
    one block takes 0.3 KB, so a full queue is about 60 MB, and only for a worker that floods.
    libzmq counts messages, not bytes. The number is not changed while a socket is connected: where
    a short queue was full when its engine broke off, libzmq aborted the process (`!_io_error`)."""

    descriptors_kept: int = 64
    """File descriptors held back: new sources leave half of them free, connections all of them, for
    engines that reconnect, new files, replays and health checks."""

    message_bytes_max: int = 96 << 20
    """Longest batch. A removal of a million blocks takes 9 MB with numbers and 34 MB with digests
    of 32 bytes, or up to 89 MB as a million removals of one each. A longer one is refused unread
    and costs itself; libzmq drops the connection beyond `SOCKET_BYTES_FACTOR` times as much."""

    recall_wait_s: float = 600.0
    """How long blocks from before a restart wait for the next batch of an engine that offers no
    replay. An idle engine sends nothing, and waiting costs only memory."""

    polls_max: int = 64
    """Concurrent replays that only check for lost last batches; each takes a socket."""

    tick_s: float = 0.25
    """How often silence is checked: the resolution of every wait above."""


DENIED: Final = (
    "169.254.0.0/16",
    "fe80::/10",  # link-local, which covers most clouds' metadata services
    "fd00:ec2::/32",
    "fd20:ce::254",
    "100.100.100.200",
    "192.0.0.192",
    "168.63.129.16",  # metadata services of the other clouds
    "0.0.0.0/8",
    "::",
    "224.0.0.0/4",
    "255.255.255.255",
    "ff00::/8",  # no single host
)
"""Denied unless another list is configured."""


class EgressSettings(Struct, frozen=True, kw_only=True):
    """Which addresses connections may reach."""

    schemes: tuple[str, ...] = ("tcp",)
    """Schemes of ZMQ endpoints. `ipc` opens files of this machine, `inproc` sockets of this
    process."""

    allow: tuple[str, ...] = ()
    """Hosts and networks; empty allows everything that is not denied."""

    deny: tuple[str, ...] = DENIED
    """Hosts and networks; denial wins over `allow`."""

    loopback: bool = True
    """Whether loopback addresses of this machine may be reached."""

    lookup_timeout_s: float = 5.0
    """Longest wait for the addresses of a name."""

    lookup_cache_s: float = 5.0
    """Lifetime of a cached answer; also the retry interval for a name that does not resolve."""

    lookups_max: int = 1024
    """Names being resolved, or cached."""


class RecoveryLimits(Struct, frozen=True, kw_only=True):
    """Budgets of start-up recovery from peers."""

    attempts_max: int = 3
    """Rounds over all peers before the service starts empty."""

    backoff_s: float = 0.5
    """Wait before the second round; doubles before each further one."""

    silence_s: float = 10.0
    """Longest wait for a connection, and for the next chunk of a dump; the reference's number."""

    timeout_s: float = 120.0
    """Longest fetch from one peer. About two million blocks a minute are applied beside other
    work."""

    bytes_max: int = 4 << 30
    """Longest dump, uncompressed: some fifty million blocks."""


class SnapshotLimits(Struct, frozen=True, kw_only=True):
    """Budgets of the index snapshot on disk."""

    interval_s: float = 60.0
    """Time between two snapshots. After a restart the engine replays what it sent since the last
    one; its buffer of 10,000 batches covers minutes."""

    bytes_max: int = 1 << 30
    """Longest file, some sixty million blocks; further ranks are left out."""

    hold_s: float = 2.0
    """Longest time that a rank's events wait while its nodes are copied; a rank that takes longer
    is left out. A million blocks take a few tenths of a second."""

    shutdown_s: float = 5.0
    """Longest wait for the last snapshot at shutdown; without it the previous one is used."""

    unclaimed_s: float = 600.0
    """How long restored ranks wait for their worker to be registered again."""
