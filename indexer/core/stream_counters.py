"""Plain counters of event streams, read at scrape time.

Only increasing numbers live here; labels come from fixed sets, so their number is bounded. Metrics
add up the streams of a partition and what closed streams left behind. The layers of `stream` and
`writer` count, `registry` collects.
"""

from __future__ import annotations

from collections import Counter
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
    events: Counter[Labels] = field(default_factory=Counter)
    # frames | sequence | payload | replay | oversized | breach
    bad_messages: Counter[str] = field(default_factory=Counter)
    replays: Counter[str] = field(default_factory=Counter)  # that ended, by outcome
    # credited, or why blocks from before a restart were not
    recalls: Counter[str] = field(default_factory=Counter)

    def add(self, other: StreamCounters) -> None:
        """Add another stream's counters to these."""
        for one in fields(self):
            mine, more = getattr(self, one.name), getattr(other, one.name)
            if isinstance(mine, Counter):
                mine.update(more)
            elif one.name not in _NOT_ADDED:
                setattr(self, one.name, mine + more)

    def count_event(self, kind: str, form: str, outcome: str, number: int = 1) -> None:
        """Count events of this kind, dialect and outcome."""
        self.events[kind, form, outcome] += number

    def count_oversized(self, size: int) -> None:
        """Count a message refused for its size, in bytes."""
        self.bad_messages["oversized"] += 1
        self.oversized_bytes = max(self.oversized_bytes, size)
