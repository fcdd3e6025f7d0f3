"""Which slots may have become busy or full, or free again, since the last check.

Kept only for a partition with a gate (`rank_limits.py`), which reads and clears it when the
next request arrives. Only more load can make a rank busy, and only beyond the lowest of all limits;
only less load can free a busy one. The ledger has the numbers for both at hand, so nearly every
booking and end costs three comparisons and leaves nothing behind.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet


class LoadChanges:
    """A notebook; the ledger writes it, `PartitionAdmission` reads it.

    Args:
        busy: the busy slots, maintained by it.
        full: the full slots, likewise.
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
        """Whether anything needs checking before the next request is judged: a change, a slot that
        is busy or full, names, or that there are no slots."""
        self.slots: set[int] = set()
        self.busy = busy
        self.full = full
        self.prefill_alarm = math.inf
        """No slot is busy with at most this many prefill tokens."""
        self.decode_alarm = math.inf
        """Nor with at most this many blocks."""
        self.requests_alarm = math.inf
        """No worker is full while a slot has fewer requests than this."""
        self.names_wanted = False  # whether to record whose requests begin and end
        self.begun: list[str] = []  # if so, fairness ids
        self.ended: list[str] = []

    def note(self, slot: int) -> None:
        """Note that a slot may have become busy or full, or no longer be so."""
        self.slots.add(slot)
        self.look = True

    def lighter(self, slot: int) -> None:
        """Note that a slot has less to carry: only one that is busy or full can be free again."""
        if slot in self.busy or slot in self.full:
            self.note(slot)

    def changed(self, slot: int, decode_blocks: float, prefill_tokens: int) -> None:
        """Note a change of a slot's blocks or tokens, to these, without more requests."""
        if decode_blocks > self.decode_alarm or prefill_tokens > self.prefill_alarm:
            self.note(slot)
        else:
            self.lighter(slot)
