"""Trust factors of ranks, from the accuracy of their index's predictions and its freshness.

Each slot of a partition has a factor from 0 to 1 by which its overlap credit is multiplied; it is
exactly 1.0 without a reason to doubt. Pure arithmetic: `cached_tokens.py` reports finished prompts,
`trust_monitor.py` event streams, and has doubtful indexes reread; `pricing/cost.py` and the pricer
read the factors.

Only tokens predicted and not found count. Tokens found but not predicted are no reason to predict
less: others may have computed them meanwhile, and less credit would be further from the truth.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import numpy as np

from select_service.core.columns import grown

if TYPE_CHECKING:
    from select_service.core.columns import Floats, Slots
    from select_service.types import TrustSettings

Reason: TypeAlias = Literal["prediction", "lag", "gaps"]
"""Why credit is reduced; part of the API."""

OUTLIER: Final = 4.0
"""The weight of one prompt, in average ones, at most: one long evicted prompt proves little."""

HOPELESS: Final = 0.8
"""The missing share from which a rank's blocks are not worth keeping if they cannot be reread."""


class RankTrust:
    """The state of one rank."""

    def __init__(self) -> None:
        self.reports = 0  # prompts with a report of their cached tokens
        self.mean_error_tokens = 0.0  # over those: predicted - actual
        self.samples = 0  # those with a prediction above 0
        self._count = 0.0  # the same, with older ones fading
        self._weight = 0.0  # predicted tokens, fading likewise
        self._missing = 0.0  # of those, the ones not found
        self.is_distrusted = False
        self.freshness = 1.0
        self.stale: tuple[Reason, ...] = ()
        self.rereads = 0
        self.clearings = 0  # of its stream, as of the last check
        # earlier predictions were of an index that no longer exists
        self.void_before = float("-inf")
        self.reread_after = 0.0  # no reread before this time
        self.reread_wait_s = 0.0
        self.reread_samples = 0  # samples at the last reread

    @property
    def missing_share(self) -> float:
        """The share of recently predicted tokens that were not found, 0 to 1."""
        return self._missing / self._weight if self._weight else 0.0

    @property
    def factor(self) -> float:
        """The factor on the credit: the share of predicted tokens expected to be there.

        Exactly 1.0 without a reason.
        """
        return self.believed * self.freshness

    @property
    def believed(self) -> float:
        """The part of the factor that does not depend on events."""
        return 1.0 - self.missing_share if self.is_distrusted else 1.0

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Why the factor is below 1."""
        return ("prediction", *self.stale) if self.is_distrusted else self.stale

    def record(self, predicted: int, actual: int, window: int) -> None:
        """Record one prompt."""
        self.reports += 1
        self.mean_error_tokens += (predicted - actual - self.mean_error_tokens) / min(
            self.reports, window
        )

    def count(self, predicted: int, actual: int, window: int) -> None:
        """Weigh one prompt with a prediction; older ones fade."""
        kept = 1.0 - 1.0 / window
        weight = float(predicted)
        if self._count:
            weight = min(weight, OUTLIER * self._weight / self._count)
        self.samples += 1
        self._count = self._count * kept + 1.0
        self._weight = self._weight * kept + weight
        self._missing = self._missing * kept + weight * (max(0, predicted - actual) / predicted)


class Trust:
    """The ranks of one partition, by slot.

    Attributes:
        column: factors by slot; None: all are 1.0, as nearly always.
        changed: slots whose reasons changed since the last look, with the reasons before.
    """

    def __init__(self, settings: TrustSettings) -> None:
        self.column: Floats | None = None
        self.changed: dict[int, tuple[Reason, ...]] = {}
        self._settings = settings
        self._factors: Floats = np.ones(0)
        self._below: set[int] = set()  # slots whose factor is not 1
        self._ranks: dict[int, RankTrust] = {}
        self._has_found = False  # whether any engine ever reported more than 0
        self._compared = 0  # ranks with samples
        self._doubted = 0  # the distrusted ones among them

    def ensure(self, rows: int) -> None:
        """Make room for slots below `rows`; never shrinks."""
        self._factors = grown(self._factors, rows, 1.0)
        self._show()

    def factor(self, slot: int) -> float:
        """Return the factor on the overlap credit of a slot."""
        return 1.0 if self.column is None else float(self.column[slot])

    def stale(self) -> dict[int, float]:
        """Return how fresh the events of slots are, where they are not."""
        return {slot: self._ranks[slot].freshness for slot in self._below}

    def without_freshness(self, slots: Slots) -> Floats:
        """Return the column with the factors of some slots as if their events were fresh."""
        factors = self._factors.copy()
        for slot in self._below.intersection(slots.tolist()):
            factors[slot] = self._ranks[slot].believed
        return factors

    def find(self, slot: int) -> RankTrust | None:
        """Return the state of a slot, if there is any."""
        return self._ranks.get(slot)

    def distrusted(self) -> list[int]:
        """Return the slots whose predictions were wrong."""
        if not self._doubted:
            return []
        return [slot for slot in self._below if self._ranks[slot].is_distrusted]

    def forget(self, slot: int) -> None:
        """Forget a rank that has gone; the next one on its slot starts trusted."""
        gone = self._ranks.pop(slot, None)
        if gone is not None and gone.samples:
            self._compared -= 1
            self._doubted -= gone.is_distrusted
        self.changed.pop(slot, None)
        if slot in self._below:
            self._below.discard(slot)
            self._factors[slot] = 1.0
            self._show()

    # -- reasons ---------------------------------------------------------------------------------

    def void(self, slot: int, clearings: int, now: float) -> None:
        """Void earlier predictions if the rank's index was cleared since the last call."""
        rank = self._rank(slot)
        if clearings != rank.clearings:
            rank.clearings, rank.void_before = clearings, now

    def compare(self, slot: int, predicted: int, actual: int, since: float) -> None:
        """Compare an engine's report on a prompt with the prediction.

        `predicted` are cached tokens according to its index, of those an engine can find at
        all; `since` is when that was predicted.
        """
        rank = self._rank(slot)
        window = self._settings.samples
        rank.record(predicted, actual, window)
        self._has_found |= actual > 0
        if predicted <= 0 or since <= rank.void_before:
            return
        rank.count(predicted, actual, window)
        self._compared += rank.samples == 1
        before, was_distrusted = rank.reasons, rank.is_distrusted
        if rank.is_distrusted:
            rank.is_distrusted = rank.missing_share >= self._settings.error_clear
            if not rank.is_distrusted:
                rank.reread_after = rank.reread_wait_s = 0.0
        # engines that do not count their hits report 0 for all prompts, for ever
        elif self._has_found and rank.samples >= self._settings.samples / 2:
            rank.is_distrusted = rank.missing_share > self._settings.error_max
        self._doubted += rank.is_distrusted - was_distrusted
        self._apply(slot, rank, before)

    def note_freshness(self, slot: int, factor: float, stale: tuple[Reason, ...]) -> None:
        """Set the freshness of the events of a slot's rank; (1.0, ()): fresh."""
        rank = self._ranks.get(slot)
        if rank is None:
            if not stale:
                return
            rank = self._rank(slot)
        before = rank.reasons
        rank.freshness, rank.stale = factor, stale
        self._apply(slot, rank, before)

    @property
    def most_are_accurate(self) -> bool:
        """Whether most compared ranks are accurate; otherwise the reports may be at fault."""
        return 2 * self._doubted < self._compared

    def _rank(self, slot: int) -> RankTrust:
        rank = self._ranks.get(slot)
        if rank is None:
            rank = self._ranks[slot] = RankTrust()
        return rank

    def _apply(self, slot: int, rank: RankTrust, before: tuple[Reason, ...]) -> None:
        if rank.reasons != before:
            self.changed.setdefault(slot, before)
        factor = rank.factor
        if not rank.reasons and slot not in self._below:
            return
        self._factors[slot] = factor
        if rank.reasons:
            self._below.add(slot)
        else:
            self._below.discard(slot)
        self._show()

    def _show(self) -> None:
        self.column = self._factors if self._below else None

    def check(self) -> None:
        """Assert all invariants."""
        assert (self.column is None) == (not self._below), "no column where all are believed"
        assert self._compared == sum(rank.samples > 0 for rank in self._ranks.values())
        assert self._doubted == sum(rank.is_distrusted for rank in self._ranks.values())
        for slot, rank in self._ranks.items():
            assert 0.0 <= rank.factor <= 1.0
            assert self._factors[slot] == rank.factor
            assert (slot in self._below) == bool(rank.reasons)
            assert rank.reasons or rank.factor == 1.0, "a rank without reasons counts in full"
        assert set(np.flatnonzero(self._factors != 1.0).tolist()) <= self._below
