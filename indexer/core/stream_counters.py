"""Plain counters of event streams, read at scrape time.

Only increasing numbers live here; labels come from fixed sets, so their number is bounded. Metrics
add up the streams of a partition and what closed streams left behind. The layers of `stream` and
`writer` count, `registry` collects.
"""

from __future__ import annotations

from typing import Final

Labels = tuple[str, str, str]
"""kind (stored, removed, …), dialect (array, map, mixed), outcome (applied, or the refusal)."""

_PLAIN: Final = (
    "messages",  # received live, good or bad
    "batches",  # applied, live or replayed
    "blocks_stored",  # blocks in the store events that were applied
    "blocks_removed",  # blocks in the removals that were applied
    "stale_batches",
    "conflicting_batches",  # live, under a number that had come with another content
    "conflicting_replies",  # repeated otherwise than they had been heard
    "gaps",
    "lost_batches",  # never recovered
    "unusable_batches",  # of these, the ones that a replay cannot bring: too long, or unreadable
    "restarts",  # noticed by the sequence number
    "hidden_restarts",  # noticed only because a replay did not repeat what had been applied
    "foreign_ranks",  # batches that named a rank the worker does not have
    "replays_asked",
    "replayed_batches",
)


class StreamCounters:
    """Counters of one stream, or the sum over several."""

    __slots__ = (
        "bad_messages",
        "events",
        "other_block_size",
        "oversized_bytes",
        "recalls",
        "replays",
        *_PLAIN,
    )

    messages: int
    batches: int
    blocks_stored: int
    blocks_removed: int
    stale_batches: int
    conflicting_batches: int
    conflicting_replies: int
    gaps: int
    lost_batches: int
    unusable_batches: int
    restarts: int
    hidden_restarts: int
    foreign_ranks: int
    replays_asked: int
    replayed_batches: int

    def __init__(self) -> None:
        for name in _PLAIN:
            setattr(self, name, 0)
        self.events: dict[Labels, int] = {}
        self.other_block_size = 0  # of the last store event refused for its block size
        self.oversized_bytes = 0  # of the longest message refused for its size; 0: unknown
        # frames | sequence | payload | replay | oversized | breach
        self.bad_messages: dict[str, int] = {}
        self.replays: dict[str, int] = {}  # outcome → number of replays that ended with it
        self.recalls: dict[str, int] = {}  # credited, or why blocks from before a restart were not

    def add(self, other: StreamCounters) -> None:
        """Add another stream's counters to these."""
        for name in _PLAIN:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for mine, theirs in (
            (self.bad_messages, other.bad_messages),
            (self.replays, other.replays),
            (self.recalls, other.recalls),
        ):
            for label, count in theirs.items():
                mine[label] = mine.get(label, 0) + count
        for labels, count in other.events.items():
            self.events[labels] = self.events.get(labels, 0) + count

    def count_event(self, kind: str, form: str, outcome: str, number: int = 1) -> None:
        """Count events of this kind, dialect and outcome."""
        labels = (kind, form, outcome)
        self.events[labels] = self.events.get(labels, 0) + number

    def count_bad_message(self, reason: str) -> None:
        """Count a message that is not a batch."""
        self.bad_messages[reason] = self.bad_messages.get(reason, 0) + 1

    def count_oversized(self, size: int) -> None:
        """Count a message refused for its size, in bytes."""
        self.count_bad_message("oversized")
        self.oversized_bytes = max(self.oversized_bytes, size)

    def count_replay(self, outcome: str) -> None:
        """Count a replay that ended."""
        self.replays[outcome] = self.replays.get(outcome, 0) + 1

    def count_recall(self, outcome: str) -> None:
        """Count a verdict on blocks from before a restart."""
        self.recalls[outcome] = self.recalls.get(outcome, 0) + 1
