"""Ranks whose engines seem to be dead: they are passed over while others may take a prompt.

Envoy calls this outlier detection. A rank is ejected if its reservations fail several times in a
row, or if its event publisher was connected before and has been out of reach for a while. When its
backoff is over it is a candidate again; the next request that goes there is the probe, and begins
the next backoff, twice as long up to a bound. A sign of life ends it all: a success of what was
booked since or, where only the publisher is gone, its return. A suspicion alone refuses none: if
all candidates are ejected, none is. `partition.py` asks; nothing here looks at loads or costs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, overload

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from select_service.core.columns import Rows, Slots
    from select_service.types import CoreLimits

EjectionReason: TypeAlias = Literal["failing", "unreachable"]
"""Why a rank is passed over; part of the API."""


class OutlierTally:
    """What all scopes together have seen."""

    def __init__(self) -> None:
        self.ranks = 0
        """Ranks with anything to remember; 0, as nearly always: no sign of life is of interest."""
        self.ejections: dict[EjectionReason, int] = {"failing": 0, "unreachable": 0}


class EjectionChange(NamedTuple):
    """A slot that is passed over from now on, or no longer."""

    slot: int
    reason: EjectionReason
    failures: int
    is_ejected: bool
    is_alive: bool  # a sign of life was seen; else it is only time for a probe


class RankHealth:
    """What is known of one rank that has failed or cannot be reached."""

    __slots__ = ("backoff_s", "failures", "is_excused", "lost_at", "reason", "since", "until")

    def __init__(self) -> None:
        self.failures = 0  # in a row
        self.reason: EjectionReason | None = None  # None: it is a candidate like others
        self.since = 0.0  # what was booked later may prove that it lives
        self.until = 0.0  # the end of this backoff
        self.backoff_s = 0.0
        self.lost_at: float | None = None  # since when its publisher is out of reach
        self.is_excused = False  # it has proved to live since then


class Outliers:
    """The ranks of one scope that are suspected, by slot.

    Attributes:
        ejected: slots passed over now, with the reason; replaced, never changed.
        ranks: by slot, all with anything to remember.
    """

    def __init__(self, limits: CoreLimits, tally: OutlierTally) -> None:
        self.ejected: Mapping[int, EjectionReason] = {}
        self._limits = limits
        self._tally = tally
        self.ranks: dict[int, RankHealth] = {}
        self._slots: Slots = np.empty(0, dtype=np.int64)
        self._changes: list[EjectionChange] = []

    @overload
    def among(self, rows: Slots) -> Slots: ...
    @overload
    def among(self, rows: Rows) -> Rows: ...
    def among(self, rows: Rows) -> Rows:
        """Return the candidates without those passed over; all of them if none would be left."""
        if not self.ejected:
            return rows
        slots = np.arange(rows.stop) if isinstance(rows, slice) else rows
        kept: Slots = slots[~np.isin(slots, self._slots)]
        return kept if 0 < len(kept) < len(slots) else rows

    def suspected(self) -> Mapping[int, RankHealth]:
        """Return the ranks that are passed over or due for a probe."""
        return {slot: one for slot, one in self.ranks.items() if one.reason is not None}

    # -- evidence ------------------------------------------------------------------------------

    def failed(self, slot: int, now: float) -> None:
        """Count a reservation whose engine failed."""
        most = self._limits.outlier_failures
        if not most:
            return
        one = self._rank(slot)
        if one.reason is None:  # else its probe has begun the next backoff already
            one.failures += 1
            if one.failures >= most:
                self._eject(slot, one, "failing", now, now)

    def answered(self, slot: int, booked_at: float) -> None:
        """Note a sign of life: a prompt is computed, or there is output. It may yet fail.

        What was booked before a rank was ejected says nothing about it.
        """
        one = self.ranks.get(slot)
        if one is not None and one.lost_at is not None and booked_at > one.lost_at:
            one.is_excused = True
            if one.reason == "unreachable":
                self._readmit(slot, one)

    def succeeded(self, slot: int, booked_at: float) -> None:
        """Note that a reservation has ended, and not failed, as far as is known."""
        one = self.ranks.get(slot)
        if one is None:
            return
        if one.reason is None:
            one.failures = 0
        elif one.reason == "failing" and booked_at > one.since:
            self._readmit(slot, one)
        self._tidy(slot, one)

    def follow_publisher(self, slot: int, lost_at: float | None, now: float) -> None:
        """Note whether the rank's publisher can be reached.

        `lost_at`: since when it cannot, although it was connected before; None: it can, or
        never was.
        """
        one = self.ranks.get(slot)
        if lost_at is None:
            if one is not None and one.lost_at is not None:
                one.lost_at, one.is_excused = None, False
                if one.reason == "unreachable":
                    self._readmit(slot, one)
                self._tidy(slot, one)
            return
        least_s = self._limits.outlier_unreachable_s
        if not least_s or now - lost_at < least_s:
            return
        one = self._rank(slot)
        one.is_excused = one.is_excused and one.lost_at == lost_at
        one.lost_at = lost_at
        if one.reason is None and not one.is_excused:
            self._eject(slot, one, "unreachable", lost_at, now)

    def chosen(self, slot: int, now: float) -> None:
        """Note that a request goes to a rank: if that was due for a probe, this is the probe."""
        one = self.ranks.get(slot)
        if one is not None and one.reason is not None and slot not in self.ejected:
            self._back_off(slot, one, now)

    def forget(self, slot: int) -> None:
        """Forget a rank that has gone, or whose events come from elsewhere now."""
        if self.ranks.pop(slot, None) is not None:
            self._tally.ranks -= 1
            self._show({at: why for at, why in self.ejected.items() if at != slot})

    # -- time ----------------------------------------------------------------------------------

    def advance(self, now: float) -> list[EjectionChange]:
        """End the backoffs that are over; return what has changed since the last call."""
        if not self.ranks and not self._changes:
            return []
        for slot, one in list(self.ranks.items()):
            if one.reason is not None and not self._is_watched(one.reason):
                self._readmit(slot, one)
            if not self._is_watched("unreachable"):
                one.lost_at, one.is_excused = None, False
            self._tidy(slot, one)
        due = [slot for slot in self.ejected if self.ranks[slot].until <= now]
        if due:
            self._show({slot: why for slot, why in self.ejected.items() if slot not in due})
            for slot in due:
                self._note(slot, self.ranks[slot], is_ejected=False, is_alive=False)
        changes, self._changes = self._changes, []
        return changes

    def _is_watched(self, reason: EjectionReason) -> bool:
        limits = self._limits
        watched = limits.outlier_failures if reason == "failing" else limits.outlier_unreachable_s
        return bool(watched)

    # -- states --------------------------------------------------------------------------------

    def _rank(self, slot: int) -> RankHealth:
        one = self.ranks.get(slot)
        if one is None:
            one = self.ranks[slot] = RankHealth()
            self._tally.ranks += 1
        return one

    def _tidy(self, slot: int, one: RankHealth) -> None:
        """Forget a rank of which there is nothing to remember."""
        if one.reason is None and not one.failures and one.lost_at is None:
            del self.ranks[slot]
            self._tally.ranks -= 1

    def _eject(
        self, slot: int, one: RankHealth, reason: EjectionReason, since: float, now: float
    ) -> None:
        one.reason, one.since, one.backoff_s = reason, since, 0.0
        self._tally.ejections[reason] += 1
        self._back_off(slot, one, now)
        self._note(slot, one, is_ejected=True, is_alive=False)

    def _back_off(self, slot: int, one: RankHealth, now: float) -> None:
        limits = self._limits
        doubled = max(2 * one.backoff_s, limits.outlier_ejection_s)
        one.backoff_s = min(doubled, limits.outlier_ejection_max_s)
        one.until = now + one.backoff_s
        assert one.reason is not None
        self._show({**self.ejected, slot: one.reason})

    def _readmit(self, slot: int, one: RankHealth) -> None:
        self._note(slot, one, is_ejected=False, is_alive=True)
        one.reason, one.failures, one.backoff_s = None, 0, 0.0
        self._show({at: why for at, why in self.ejected.items() if at != slot})

    def _note(self, slot: int, one: RankHealth, *, is_ejected: bool, is_alive: bool) -> None:
        assert one.reason is not None
        self._changes.append(EjectionChange(slot, one.reason, one.failures, is_ejected, is_alive))

    def _show(self, ejected: Mapping[int, EjectionReason]) -> None:
        self.ejected = ejected
        self._slots = np.array(sorted(ejected), dtype=np.int64)

    def check(self) -> None:
        """Assert all invariants."""
        assert self._slots.tolist() == sorted(self.ejected)
        for slot, reason in self.ejected.items():
            assert self.ranks[slot].reason == reason
        for one in self.ranks.values():
            assert one.reason or one.failures or one.lost_at is not None, "nothing to remember"
            assert one.backoff_s <= self._limits.outlier_ejection_max_s or one.reason is None
            assert one.lost_at is not None or not one.is_excused
