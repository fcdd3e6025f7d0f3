"""The nouns of the index: tiers, ranks, scopes, namespaces.

Plain values only; nothing here computes. Everything else in `indexer` and in `select_service`
may import this file, and this file imports nothing of the project.
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
    """Where a worker keeps a block; cumulative in this order when a prompt is matched."""

    DEVICE = 0
    HOST_PINNED = 1
    DISK = 2
    EXTERNAL = 3  # reported together with disk

    @property
    def wire_name(self) -> str:
        """Name in /dump: device, host_pinned, disk or external."""
        return self.name.lower()


class WorkerRank(NamedTuple):
    """One data-parallel rank of one worker: what load and blocks belong to."""

    worker_id: int  # u64
    dp_rank: int  # u32


class Scope(NamedTuple):
    """Key of a partition."""

    model_name: str
    tenant_id: str


class Namespace(NamedTuple):
    """What colours every block hash of a prompt besides its tokens; "" means none."""

    lora_name: str = ""
    cache_salt: str = ""


BASE_NAMESPACE: Final = Namespace()


class LinkState(Struct, frozen=True):
    """How it stands with the connection to a publisher."""

    is_connected: bool
    since: float  # when that last changed, or when listening began; monotonic seconds
    connections: int  # made so far
    load_reports: int  # messages that told of load and not of blocks
    is_refused: bool = False  # somebody is there, and hung up on our handshake


class EventLossPolicy(Enum):
    """What becomes of a rank's blocks when lost events cannot be recovered (`--on-event-loss`)."""

    KEEP = "keep"  # keep crediting what is known, mark the rank uncertain
    DROP = "drop"  # strict truth: forget the rank's blocks


class StreamLimits(Struct, kw_only=True):
    """Budgets of the event streams; the defaults suit engines with their own default settings.

    One object that everybody reads each time; its owner may change it while it is in use.
    """

    replay_silence_s: float = 1.0
    """Longest wait for the next useful reply. The publishing thread answers between two messages,
    after at most 100 ms when idle; a second leaves room for a busy machine."""

    replay_deadline_s: float = 30.0
    """Longest replay altogether. 10,000 batches, a default buffer, take about one second."""

    replay_attempts_max: int = 2
    """Requests in a row that may bring nothing new before the missing batches count as lost."""

    replay_replies_max: int = 200_000
    """Replies to one replay, twenty default buffers."""

    replay_bytes_max: int = 1 << 30
    """Bytes of replies to one replay."""

    replay_useless_max: int = 2_000
    """Replies that are garbled or out of place: twice what an old reply socket can hold."""

    replay_backoff_s: float = 5.0
    replay_backoff_max_s: float = 60.0
    """A mute endpoint is left alone for that long, doubled each time up to the second number."""

    backlog_batches_max: int = 20_000
    backlog_bytes_max: int = 64 << 20
    """Live batches that wait for a replay to finish; when they are more, it is given up."""

    orphan_blocks_max: int = 65_536
    """Blocks of a partition that wait for a parent nobody has announced yet."""

    source_blocks_max: int = 16 << 20
    """Blocks held of one rank; what it stores beyond is left out until it has removed some."""

    index_bytes_max: int = 8 << 30
    """Estimate for all indexes together. Who has more than its share stores no more then, and of
    those the largest is forgotten if it does not help."""

    poll_after_s: float = 10.0
    """Silence after which a replay is asked for, in case the last batches got lost; 0: never."""

    blocks_per_turn: int = 512
    """Blocks applied before others get their turn, about a quarter of a millisecond."""

    messages_per_turn: int = 64
    """Messages taken from one socket before the next socket's turn."""

    turn_s: float = 0.0005
    """Time for all sockets together before the event loop may serve requests again."""

    pause_s: float = 0.002
    """Time that messages may gather in once some were read. Waking up costs as much as a dozen of
    them; two milliseconds are nothing beside an engine's step."""

    receive_messages_max: int = 200_000
    """Live messages libzmq holds for us; its own default of 1,000 loses bursts. A message of
    one block takes 0.3 KB, so a full queue is some 60 MB, and only of a worker that floods."""

    descriptors_kept: int = 64
    """File descriptors that new sources leave half of to others, and connections all of them: to
    engines that come back, files that begin, replays, and whoever looks whether we are alive."""

    message_bytes_max: int = 8 << 20
    """Longest message; a million tokens make 5 MB, and a step of an engine has some ten thousand.
    It is read in one go, 2 ms a megabyte. libzmq drops the connection of a longer one."""

    recall_wait_s: float = 600.0
    """Blocks of an earlier life wait that long for the next batch of an engine that cannot be
    asked; an idle engine says nothing, and waiting costs memory only."""

    polls_max: int = 64
    """Replays at one time that only look for lost last batches; each takes a socket."""

    tick_s: float = 0.25
    """How often silence is looked for: the grain of every wait above."""


DENIED: Final = (
    *("169.254.0.0/16", "fe80::/10"),  # link-local, and with it most clouds' metadata
    *(
        "fd00:ec2::/32",
        "fd20:ce::254",
        "100.100.100.200",
        "192.0.0.192",
        "168.63.129.16",
    ),  # metadata of the others
    *("0.0.0.0/8", "::", "224.0.0.0/4", "255.255.255.255", "ff00::/8"),  # nobody in particular
)
"""Denied unless another list is given."""


class ReachSettings(Struct, frozen=True, kw_only=True):
    """Where connections may lead."""

    schemes: tuple[str, ...] = ("tcp",)
    """Of ZMQ endpoints. `ipc` opens files of this machine, `inproc` sockets of this process."""

    allow: tuple[str, ...] = ()
    """Hosts and networks; empty: all that are not denied."""

    deny: tuple[str, ...] = DENIED
    """Hosts and networks; whatever is in here is denied, allowed or not."""

    loopback: bool = True
    """Whether this machine itself may be reached."""

    lookup_timeout_s: float = 5.0
    """Longest wait for the addresses of a name."""

    lookup_cache_s: float = 5.0
    """So long an answer is good for; also how often a name that leads nowhere is asked for."""

    lookups_max: int = 1024
    """Names being resolved, or remembered."""


class RecoveryLimits(Struct, frozen=True, kw_only=True):
    """Budgets of start-up recovery from peers."""

    attempts_max: int = 3
    """Rounds over all peers before the service starts empty."""

    backoff_s: float = 0.5
    """Wait before the second round, twice as long before each further one."""

    silence_s: float = 10.0
    """Longest wait for a connection, and for the next piece of a dump; the reference's number."""

    timeout_s: float = 120.0
    """Longest fetch from one peer. Two million blocks a minute are applied beside other work."""

    bytes_max: int = 4 << 30
    """Longest dump, unpacked: some fifty million blocks."""


class SnapshotLimits(Struct, frozen=True, kw_only=True):
    """Budgets of the index snapshot on disk."""

    interval_s: float = 60.0
    """Between two. What an engine has said since the last one is asked of it again, and its
    buffer of 10,000 batches covers minutes."""

    bytes_max: int = 1 << 30
    """Longest file, some sixty million blocks; ranks beyond are left out."""

    hold_s: float = 2.0
    """Longest time that a rank's events wait while its nodes are noted down; a rank that takes
    longer is left out. A million blocks take some tenths of a second."""

    shutdown_s: float = 5.0
    """Longest wait for the last one at the end; without it the one before counts."""

    unclaimed_s: float = 600.0
    """How long ranks of an earlier life wait for their worker to be registered again."""
