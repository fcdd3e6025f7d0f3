"""Pending lifecycle calls: merged per reservation, sent together, safe to send again.

It keeps the resulting state of a reservation rather than a list of calls: how many output blocks it
has in total, whether its prompt is computed, whether it is over. So any number of calls make one
entry, and it may be sent twice: `total` counts from the start, the rest is idempotent. `upkeep.py`
sends the batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from select_service.types import Outcome


class ReportEntry:
    """What is still to be reported about one reservation."""

    __slots__ = (
        "blocks",
        "cached_tokens",
        "decay_fraction",
        "is_freed",
        "is_prefilled",
        "is_question",
        "outcome",
    )

    def __init__(self) -> None:
        self.is_prefilled = False
        self.cached_tokens: int | None = None
        self.blocks = 0  # total output blocks; 0: nothing to report
        self.decay_fraction: float | None = None
        self.is_freed = False
        self.outcome: Outcome | None = None  # of the freed one
        self.is_question = False  # ask whether it is known, by its current blocks

    def merge(self, later: ReportEntry) -> None:
        """Merge a later entry into this one."""
        self.is_prefilled |= later.is_prefilled
        if later.cached_tokens is not None:
            self.cached_tokens = later.cached_tokens
        self.blocks = max(self.blocks, later.blocks)
        if later.blocks:
            self.decay_fraction = later.decay_fraction
        self.is_freed |= later.is_freed
        self.outcome = later.outcome or self.outcome
        self.is_question |= later.is_question

    def operations(self, reservation_id: str) -> list[dict[str, object]]:
        """Return the calls to make, in order; a freed reservation needs no blocks."""
        found: list[dict[str, object]] = []
        if self.is_prefilled and (not self.is_freed or self.cached_tokens is not None):
            done: dict[str, object] = {"op": "prefill_complete", "reservation_id": reservation_id}
            if self.cached_tokens is not None:
                done["cached_tokens"] = self.cached_tokens
            found.append(done)
        if self.is_freed:
            end: dict[str, object] = {"op": "free", "reservation_id": reservation_id}
            if self.cached_tokens is not None and not self.is_prefilled:
                end["cached_tokens"] = self.cached_tokens  # a repeat, for the sake of it
            if self.outcome is not None:
                end["outcome"] = self.outcome
            found.append(end)
        elif self.blocks or self.is_question:
            filled: dict[str, object] = {
                "op": "output_block",
                "reservation_id": reservation_id,
                "total": self.blocks,
            }
            if self.decay_fraction is not None:
                filled["decay_fraction"] = self.decay_fraction
            found.append(filled)
        return found


class ReportOutbox:
    """Entries that wait, and entries that were sent and are not confirmed yet."""

    def __init__(self, on_work: Callable[[], None], batch_max: int) -> None:
        self._on_work = on_work
        self._batch_max = batch_max
        self._waiting: dict[str, ReportEntry] = {}
        self._sent: dict[str, ReportEntry] = {}
        self._most = batch_max  # operations of the next batch
        self.since: float | None = None  # when the oldest waiting entry was added

    def __len__(self) -> int:
        return len(self._waiting) + len(self._sent)

    @property
    def is_full(self) -> bool:
        """Whether a whole batch waits."""
        return len(self._waiting) >= self._batch_max

    def entry(self, reservation_id: str, now: float) -> ReportEntry:
        """Return the entry to write into; notifies the sender when sending is worthwhile."""
        entry = self._waiting.get(reservation_id)
        if entry is None:
            entry = self._waiting[reservation_id] = ReportEntry()
            if self.since is None:
                self.since = now
                self._on_work()
            elif len(self._waiting) == self._batch_max:
                self._on_work()
        return entry

    def has(self, reservation_id: str) -> bool:
        """Whether something about a reservation is still to be reported."""
        return reservation_id in self._waiting or reservation_id in self._sent

    def is_waiting(self, reservation_id: str) -> bool:
        """Whether something about a reservation has not been sent yet."""
        return reservation_id in self._waiting

    def take(self, held: Container[str]) -> list[dict[str, object]]:
        """Return the operations of a batch; those of `held` reservations wait.

        It is the only batch in flight until `settle` or `put_back`, so that nothing overtakes it.
        """
        assert not self._sent
        operations: list[dict[str, object]] = []
        for name in list(self._waiting):
            if name in held:
                continue
            found = self._waiting[name].operations(name)
            if operations and len(operations) + len(found) > self._most:
                break
            self._sent[name] = self._waiting.pop(name)
            operations += found
        if not self._waiting:
            self.since = None
        return operations

    def settle(self) -> None:
        """Note that the batch has been accepted."""
        self._sent.clear()
        self._most = self._batch_max

    def refused(self, now: float) -> int:
        """Note that the batch was refused as a whole; bisect to find the offending entry.

        Returns:
            How many calls are given up: those of one reservation, except its end.
        """
        if len(self._sent) > 1:
            self._most = max(1, len(self._sent) // 2)
            self.put_back(now)
            return 0
        [(name, entry)] = self._sent.items()
        dropped = len(entry.operations(name))
        self.settle()
        if entry.is_freed and dropped > 1:
            end = self.entry(name, now)
            end.is_freed, end.outcome = True, entry.outcome
            dropped -= 1
        return dropped

    def put_back(self, now: float) -> None:
        """Queue the batch again, before entries added since."""
        for name, entry in self._sent.items():
            later = self._waiting.get(name)
            if later is not None:
                entry.merge(later)
            self._waiting[name] = entry
        self._sent.clear()
        if self._waiting and self.since is None:
            self.since = now

    def put_back_one(self, reservation_id: str, now: float) -> None:
        """Queue one entry of the batch again."""
        entry = self._sent.pop(reservation_id, None)
        if entry is None:
            return
        later = self._waiting.get(reservation_id)
        if later is not None:
            entry.merge(later)
        self._waiting[reservation_id] = entry
        if self.since is None:
            self.since = now

    def rename(self, old: str, new: str) -> None:
        """Move an entry of a reservation that was booked again under another id."""
        entry = self._waiting.pop(old, None)
        if entry is not None:
            self._waiting[new] = entry

    def drop(self, reservation_id: str) -> None:
        """Drop what is still to be reported about a reservation."""
        self._waiting.pop(reservation_id, None)
        if not self._waiting:
            self.since = None

    def check(self) -> None:
        """Assert all invariants."""
        assert (self.since is None) <= (not self._waiting)
        for name, entry in (*self._waiting.items(), *self._sent.items()):
            assert entry.is_freed or entry.is_prefilled or entry.blocks or entry.is_question, name
