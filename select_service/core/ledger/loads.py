"""The loads of a partition as one byte string: the input of a decision, cheap to keep.

The ledger and the kernel create them; `decisions/explained_terms.py` and replays read them.
"""

from __future__ import annotations

import math
from struct import Struct as Layout
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from select_service.core.columns import Floats, Slots

COLUMNS: Final = 4
"""Columns by slot, as doubles: P, D, the churn, and the context."""

TOTALS: Final = Layout("=dd")
"""After them: the number of prompts not computed yet, and the turnover, which no column has."""

QUEUE_COLUMNS: Final = 3
"""With queues, three more columns follow: the time of each queue's last report, `ahead`, and the
live requests, ..."""

PACE: Final = Layout("=d")
"""... then the tokens a rank computes per second, and zeros up to a multiple of four numbers: the
length shows which form it is. Recordings of before have neither requests nor zeros."""

WORN_COLUMNS: Final = QUEUE_COLUMNS + 1
WORN_MARK: Final = PACE.pack(-1.0)
"""Where ranks are worn one more column follows the queues, and this the pace, in place of zeros: no
other number there is below 0."""

_FORM: Final = 4
_OF_PLAIN: Final = 2  # what remains of 4 columns and 2 totals

_VALUE: Final = 8


class PackedLoads(NamedTuple):
    """The content of `SlotLoads.pack`."""

    prefill: Floats  # tokens by slot
    decode: Floats  # blocks
    churn: Floats  # tokens computed lately
    context: Floats  # blocks, fixed weights of requests, and waits; `SlotLoads.context`
    prefilling: float  # requests of all slots whose prefill is not complete
    turnover: float  # tokens, of all slots; `RecentActivity.turnover`
    queue_updated_at: Floats | None = None  # monotonic seconds; None: no queues included
    ahead: Floats | None = None  # tokens that a rank may have computed since
    pace: float = 0.0  # tokens per second of one rank
    requests: Floats | Slots | None = None  # live ones; None: not included
    slowness: Floats | None = None  # how many times longer than others, less one; None: no rank is


def worked_off(updated_at: Floats, ahead: Floats, pace: float, now: float) -> Floats:
    """Return the tokens of each queue that count as computed before a rank has reported it.

    A rank reports a prompt when all of it is computed, and several at the end of a step; until then
    its queue stands still. (now - updated_at) · pace tokens of it are gone, and at most `ahead`.
    """
    worked: Floats = np.minimum(np.maximum((now - updated_at) * pace, 0.0), ahead)
    return worked


def padding(ranks: int) -> int:
    """Return how many zeros follow the queues of so many ranks."""
    return -((COLUMNS + QUEUE_COLUMNS) * ranks + 3) % _FORM


def ranks_in(packed: bytes) -> int:
    """Return the number of slots in packed loads.

    Raises:
        ValueError: the bytes are not packed loads.
    """
    return _form_of(packed)[0]


def _form_of(packed: bytes) -> tuple[int, int]:
    """Return the number of slots, and how many columns follow the totals."""
    numbers, rest = divmod(len(packed), _VALUE)
    form = numbers % _FORM
    if not rest and form == _OF_PLAIN:
        return numbers // COLUMNS, 0  # 4 columns and 2 totals
    if not rest and form:  # an odd number: 6 columns and 3 totals
        ranks, rest = divmod(numbers - 3, COLUMNS + 2)
        if ranks >= 0 and not rest:
            return ranks, 2
    elif not rest and packed.endswith(WORN_MARK):
        return (numbers - _FORM) // (COLUMNS + WORN_COLUMNS), WORN_COLUMNS
    elif not rest and numbers:
        ranks = (numbers - 3) // (COLUMNS + QUEUE_COLUMNS)
        if (COLUMNS + QUEUE_COLUMNS) * ranks + 3 + padding(ranks) == numbers:
            return ranks, QUEUE_COLUMNS
    raise ValueError(f"loads of {len(packed)} bytes")


def unpacked(packed: bytes) -> PackedLoads:
    """Return the unpacked loads; the columns are views.

    Raises:
        ValueError: the bytes are not packed loads.
    """
    ranks, more = _form_of(packed)
    columns = np.frombuffer(packed, count=COLUMNS * ranks).reshape(COLUMNS, ranks)
    end = COLUMNS * ranks * _VALUE
    loads = PackedLoads(*columns, *TOTALS.unpack_from(packed, end))
    if not more:
        return loads
    end += TOTALS.size
    queues = np.frombuffer(packed, count=more * ranks, offset=end).reshape(more, ranks)
    (pace,) = PACE.unpack_from(packed, end + more * ranks * _VALUE)
    requests = queues[2] if more >= QUEUE_COLUMNS else None
    slowness = queues[3] if more == WORN_COLUMNS else None
    return loads._replace(
        queue_updated_at=queues[0],
        ahead=queues[1],
        pace=pace,
        requests=requests,
        slowness=slowness,
    )


def with_worn(packed: bytes, slowness: Floats) -> bytes:
    """Return packed loads with queues, and the column of worn ranks with them."""
    end = (COLUMNS + QUEUE_COLUMNS) * len(slowness) * _VALUE + TOTALS.size
    return packed[:end] + slowness.tobytes() + packed[end : end + PACE.size] + WORN_MARK


# Which slots may have become busy or full, or free again, since the last check. Only more load can
# make a rank busy, and only beyond the lowest of all limits; only less load can free a busy one.
# The ledger has the numbers for both at hand, so nearly every booking and end costs three
# comparisons and leaves nothing behind.


class LoadChanges:
    """A notebook; the ledger writes it, `PartitionAdmission` reads it.

    `PartitionAdmission` maintains the sets of busy and of full slots.
    """

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
