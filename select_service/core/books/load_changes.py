"""Which slots may have become busy or full, or free again, since somebody looked.

Kept only for a partition with a gate (`gatekeeping.py`), which reads and clears it when the next
request asks. Only more load can make a rank busy, and only beyond the lowest limit of all; only
less can make a busy one free. What the ledger has at hand tells both, so nearly every booking and
every end costs three comparisons and is forgotten.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet


class LoadChanges:
    """A notebook; the ledger writes, the gate's keeper reads.

    Args:
        busy: slots that are, kept up by those who judge them.
        full: the same.
    """

    __slots__ = (
        "begun",
        "busy",
        "decode_alarm",
        "ended",
        "full",
        "look",
        "names_wanted",
        "prefill_alarm",
        "requests_alarm",
        "slots",
    )

    def __init__(self, busy: AbstractSet[int], full: AbstractSet[int]) -> None:
        self.look = True
        """Whether anything is to be looked at before the next request is judged: a change, a slot
        that is busy or full, names, or that there are no slots."""
        self.slots: set[int] = set()
        self.busy = busy
        self.full = full
        self.prefill_alarm = math.inf
        """No slot is busy that has no more prefill tokens than that."""
        self.decode_alarm = math.inf
        """Nor with no more blocks than that."""
        self.requests_alarm = math.inf
        """No worker is full while a slot has fewer requests than that."""
        self.names_wanted = False  # whether somebody asks whose requests begin and end
        self.begun: list[str] = []  # then, fairness ids
        self.ended: list[str] = []

    def note(self, slot: int) -> None:
        """A slot may be busy or full now, or no more."""
        self.slots.add(slot)
        self.look = True
