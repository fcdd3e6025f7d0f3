"""What a shadow policy chose, priced by both sides, and the sums of it in one partition.

Plain numbers: `decisions/shadow.py` makes them, records keep them, the edge reads them.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from select_service.types.shadow import REGRET_BOUNDS

if TYPE_CHECKING:
    from select_service.core.pricing.weights import Weights


class Side(NamedTuple):
    """What the rank of one side's choice means for the prompt."""

    slot: int
    cost_live: float  # blocks, by the live weights
    cost_shadow: float  # by the shadow's
    prefill_tokens: int  # of the prompt, to compute
    cached_tokens: int
    queued_prefill_tokens: float  # of others, before it
    decode_blocks: float  # with the prompt's


class Sighting(Struct, frozen=True, gc=False):
    """One decision as both sides would make it."""

    weights: Weights  # the shadow's, as they were at that moment
    live: Side
    shadow: Side

    @property
    def agrees(self) -> bool:
        """Whether both chose the same rank."""
        return self.live.slot == self.shadow.slot

    @property
    def regret_live(self) -> float:
        """What the shadow's choice costs more, by the live weights."""
        return self.shadow.cost_live - self.live.cost_live

    @property
    def regret_shadow(self) -> float:
        """What the live choice costs more, by the shadow's weights."""
        return self.live.cost_shadow - self.shadow.cost_shadow


class RegretTally:
    """Regrets: their sum, and how many by class."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.total = 0.0
        self.counts = [0] * (len(REGRET_BOUNDS) + 1)

    def note(self, regret: float) -> None:
        """One more."""
        self.total += regret
        self.counts[bisect_left(REGRET_BOUNDS, regret)] += 1

    def add(self, other: RegretTally) -> None:
        """All of another's."""
        self.total += other.total
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]


class SideTally:
    """Sums over one side's choices."""

    __slots__ = ("cached_tokens", "decode_blocks", "prefill_tokens", "queued_prefill_tokens")

    def __init__(self) -> None:
        self.prefill_tokens = 0
        self.cached_tokens = 0
        self.queued_prefill_tokens = 0.0
        self.decode_blocks = 0.0

    def add(self, other: Side | SideTally) -> None:
        """One more choice, or all of another's."""
        self.prefill_tokens += other.prefill_tokens
        self.cached_tokens += other.cached_tokens
        self.queued_prefill_tokens += other.queued_prefill_tokens
        self.decode_blocks += other.decode_blocks


class ShadowTally:
    """What came of decisions: scored, and skipped by reason; together all that were made."""

    __slots__ = (
        "agreed",
        "live",
        "passed",
        "regret_live",
        "regret_shadow",
        "scored",
        "shadow",
        "undrawn",
    )

    def __init__(self) -> None:
        self.scored = 0
        self.agreed = 0
        self.undrawn = 0  # by far the most
        self.passed: dict[str, int] = {}  # though drawn, by why
        self.regret_live = RegretTally()
        self.regret_shadow = RegretTally()
        self.live = SideTally()
        self.shadow = SideTally()

    def note(self, seen: Sighting) -> None:
        """One more was scored."""
        self.scored += 1
        self.agreed += seen.agrees
        self.regret_live.note(seen.regret_live)
        self.regret_shadow.note(seen.regret_shadow)
        self.live.add(seen.live)
        self.shadow.add(seen.shadow)

    def skip(self, why: str) -> None:
        """One more was not."""
        self.passed[why] = self.passed.get(why, 0) + 1

    @property
    def skipped(self) -> dict[str, int]:
        """How many were not scored, by reason."""
        return {"sample": self.undrawn, **self.passed} if self.undrawn else dict(self.passed)

    def add(self, other: ShadowTally) -> None:
        """All of another's."""
        self.scored += other.scored
        self.agreed += other.agreed
        self.undrawn += other.undrawn
        for why, count in other.passed.items():
            self.passed[why] = self.passed.get(why, 0) + count
        self.regret_live.add(other.regret_live)
        self.regret_shadow.add(other.regret_shadow)
        self.live.add(other.live)
        self.shadow.add(other.shadow)
