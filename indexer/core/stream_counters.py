"""Plain counters of event streams, read at scrape time.

Only increasing numbers live here; labels come from fixed sets, so their number is bounded. Metrics
add up the streams of a partition and what closed streams left behind. The layers of `stream` and
`writer` count, `registry` collects.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Final

Labels = tuple[str, str, str]
"""kind (stored, removed, …), dialect (array, map, mixed), outcome (applied, or the refusal)."""

_NOT_ADDED: Final = frozenset({"other_block_size", "oversized_bytes"})


@dataclass(slots=True)
class StreamCounters:
    """Counters of one stream, or the sum over several."""

    messages: int = 0  # received live, good or bad
    batches: int = 0  # applied, live or replayed
    blocks_stored: int = 0  # blocks in the store events that were applied
    blocks_removed: int = 0  # blocks in the removals that were applied
    stale_batches: int = 0
    conflicting_batches: int = 0  # live, under a number that had come with another content
    conflicting_replies: int = 0  # repeated otherwise than they had been heard
    gaps: int = 0
    lost_batches: int = 0  # never recovered
    unusable_batches: int = 0  # of these, those a replay cannot bring: too long, or unreadable
    restarts: int = 0  # noticed by the sequence number
    hidden_restarts: int = 0  # noticed only because a replay did not repeat what had been applied
    foreign_ranks: int = 0  # batches that named a rank the worker does not have
    replays_asked: int = 0
    replayed_batches: int = 0
    other_block_size: int = 0  # of the last store event refused for its block size
    oversized_bytes: int = 0  # of the longest message refused for its size; 0: unknown
    events: dict[Labels, int] = field(default_factory=dict)
    # frames | sequence | payload | replay | oversized | breach
    bad_messages: dict[str, int] = field(default_factory=dict)
    replays: dict[str, int] = field(default_factory=dict)  # outcome → number that ended with it
    # credited, or why blocks from before a restart were not
    recalls: dict[str, int] = field(default_factory=dict)

    def add(self, other: StreamCounters) -> None:
        """Add another stream's counters to these."""
        for one in fields(self):
            mine, more = getattr(self, one.name), getattr(other, one.name)
            if isinstance(mine, dict):
                for label, count in more.items():
                    mine[label] = mine.get(label, 0) + count
            elif one.name not in _NOT_ADDED:
                setattr(self, one.name, mine + more)

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
