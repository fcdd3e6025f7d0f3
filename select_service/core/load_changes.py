"""What the ledger has done since somebody looked: slots changed, tokens computed, who ended.

Kept only for a partition with a gate (`gatekeeping.py`), which reads and clears it when the next
request asks: a slot that changed three times is looked at once.
"""

from __future__ import annotations


class LoadChanges:
    """A notebook; the ledger writes, the gate's keeper reads."""

    __slots__ = ("at", "begun", "computed", "ended", "ends", "names_wanted", "slots")

    def __init__(self) -> None:
        self.slots: set[int] = set()
        self.at = 0.0  # of the last booking or computed prompt
        self.computed = 0  # prefill tokens; what was given up is not computed
        self.ends = 0  # reservations
        self.names_wanted = False  # whether somebody asks whose they are
        self.begun: list[str] = []  # then, fairness ids
        self.ended: list[str] = []
