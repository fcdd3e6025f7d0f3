"""Substitutes for index, ledger and trust on a stage, which answer as recorded.

They implement what `Partition` uses on the way from candidates to a choice, and no more;
`decision_replay.py` installs them, and sets their answers before each decision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

import numpy as np

from indexer.core.tiers import Matches
from select_service.core.ledger.loads import COLUMNS, ranks_in, unpacked
from select_service.core.ledger.slot_loads import SlotLoads
from select_service.core.pricing.cost import Pulls
from select_service.core.pricing.kv_sources import TIERS
from select_service.core.recording.decoder import BadRecording, slots_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from numpy.typing import NDArray

    from indexer.core.tiers import SlotTable
    from select_service.core.columns import Floats, Slots
    from select_service.core.ledger.slot_loads import RecentActivity
    from select_service.core.recording.items import RecordedMatches

_NUMBER_MAX: Final = float(1 << 53)
"""Limit of loads and of times: beyond it whole numbers are no longer exact."""


class _Found:
    """Replaces the slot table of an index: masks are positions in the recording."""

    def __init__(self) -> None:
        self._slots: list[Slots] = []

    def add(self, recorded: list[tuple[int, bytes]], ranks: int) -> list[tuple[int, int]]:
        groups = []
        for blocks, slots in recorded:
            groups.append((blocks, len(self._slots)))
            self._slots.append(slots_of(slots, ranks))
        return groups

    def slots(self, mask: int) -> NDArray[np.int64]:
        return self._slots[mask]


class RecordedIndex:
    """Replaces the index: finds what was recorded."""

    is_eagle = False

    def __init__(self, block_size: int, capacity: int) -> None:
        self.block_size = block_size
        self.capacity = capacity
        self.found = _nothing()

    def find_matches(self, block_hashes: bytes, isl_tokens: int | None = None) -> Matches:
        """Return the recorded matches, whatever the prompt."""
        return self.found


class _AnyBlock:
    """Replaces the first blocks of active chains: `shared_groups` says what was recorded."""

    def __contains__(self, first_hash: object) -> bool:
        return True


class _Recent:
    """Replaces the recent history of a pool."""

    def __init__(self) -> None:
        self.pace = self.turnover = 0.0


class RecordedLedger:
    """Replaces the ledger: carries the recorded loads."""

    def __init__(self, capacity: int) -> None:
        self.loads = SlotLoads()
        self.loads.ensure(capacity)
        self._recent = _Recent()
        self.loads.recent = cast("RecentActivity", self._recent)
        # added by a batch's requests; booked ones are already in the context
        self.sequence_blocks = 0
        self.first_blocks = _AnyBlock()
        self._shared: list[tuple[int, Slots]] | None = None

    def ensure(self, capacity: int) -> None:
        """Check the size; it is fixed."""
        assert capacity == len(self.loads.prefill), "a stage is built as long as its columns"

    def load(self, packed: bytes | None) -> None:
        """Carry these loads from now on.

        Raises:
            BadRecording: they are those of other ranks, or beyond all numbers.
        """
        loads = self.loads
        if packed is None or ranks_in(packed) != len(loads.prefill):
            raise BadRecording("loads of other ranks than there are")
        recorded = unpacked(packed)
        numbers = np.frombuffer(packed)
        beyond = np.flatnonzero(~(np.abs(numbers) <= _NUMBER_MAX))
        # the turnover, where nothing was asked for yet
        endless = COLUMNS * len(recorded.prefill) + 1
        if any(at != endless or numbers[at] != np.inf for at in beyond):
            raise BadRecording("loads that no ledger counts")
        loads.prefill[:], loads.decode[:] = recorded.prefill, recorded.decode
        loads.churn[:], loads.context[:] = recorded.churn, recorded.context
        loads.prefilling = cast("int", recorded.prefilling)
        self._recent.turnover = recorded.turnover
        self._recent.pace = recorded.pace  # 0 without information on queues
        loads.queue_updated_at[:] = (
            0.0 if recorded.queue_updated_at is None else recorded.queue_updated_at
        )
        loads.ahead[:] = 0.0 if recorded.ahead is None else recorded.ahead
        loads.requests[:] = 0 if recorded.requests is None else recorded.requests
        loads.slowness[:] = 0.0 if recorded.slowness is None else recorded.slowness

    def share(self, shared: list[tuple[int, Slots]] | None) -> None:
        """Set the slots booked with the beginning of the prompt; None: there are none."""
        self._shared = shared

    def shared_groups(self, hashes: bytes) -> list[tuple[int, Slots]] | None:
        """Return those, as blocks and the slots with that many."""
        return self._shared


class RecordedTrust:
    """Replaces trust: returns the recorded factors."""

    def __init__(self) -> None:
        self.column: Floats | None = None

    def ensure(self, rows: int) -> None:
        """Do nothing: the size is fixed."""


class RecordedSources:
    """Replaces the sources of blocks to pull: offers what was recorded."""

    def __init__(self, recorded: bytes, attached: Collection[int], capacity: int) -> None:
        """Take the offers.

        Raises:
            BadRecording: they are of other ranks than there are, or no numbers.
        """
        if len(recorded) != capacity * len(Pulls._fields) * 8:
            raise BadRecording("pulls of other ranks than there are")
        numbers = np.frombuffer(recorded, "<f8").reshape(-1, capacity)
        if not (np.abs(numbers) <= _NUMBER_MAX).all():  # false for nan, too
            raise BadRecording("pulls that are no numbers")
        blocks, cost = numbers[:2]
        source, tier = numbers[2:].astype(np.int64)
        if not ((tier >= 0) & (tier < len(TIERS))).all():
            raise BadRecording("pulls from a tier that is none")
        if not {*source[blocks != 0.0].tolist()} <= {*attached}:
            raise BadRecording("pulls from a slot without a worker")
        self._pulls = Pulls(blocks, cost, source, tier)

    def pulls(self, *_: object) -> Pulls:
        """Return the recorded offers, whatever the prompt."""
        return self._pulls


def _nothing() -> Matches:
    return Matches(cast("SlotTable", _Found()), [], [], [])


def matches(recorded: RecordedMatches | None, ranks: int) -> Matches:
    """Return the index's recorded answer; None: it found nothing."""
    if recorded is None:
        return _nothing()
    table = _Found()
    tiers = (recorded.device, recorded.host, recorded.disk)
    device, host, disk = (table.add(tier, ranks) for tier in tiers)
    return Matches(cast("SlotTable", table), device, host, disk)
