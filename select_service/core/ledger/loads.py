"""The loads of a partition as one byte string: the input of a decision, cheap to keep.

The ledger and the kernel create them; `decisions/explained_terms.py` and replays read them.
"""

from __future__ import annotations

from struct import Struct as Layout
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from select_service.core.columns import Floats

__all__ = ["COLUMNS", "PACE", "TOTALS", "PackedLoads", "ranks_in", "unpacked", "worked_off"]

COLUMNS: Final = 4
"""Columns by slot, as doubles: P, D, the churn, and the context."""

TOTALS: Final = Layout("=dd")
"""After them: the number of prompts not computed yet, and the turnover, which no column has."""

QUEUE_COLUMNS: Final = 2
"""With queues, two more columns follow: the time of each queue's last report, and `ahead`, ..."""

PACE: Final = Layout("=d")
"""... and the tokens a rank computes per second. The length tells whether they are present."""

_VALUE: Final = 8


class PackedLoads(NamedTuple):
    """The content of `SlotLoads.pack`."""

    prefill: Floats  # tokens by slot
    decode: Floats  # blocks
    churn: Floats  # tokens computed lately
    context: Floats  # blocks, fixed weights of requests, and waits for seats; `SlotLoads.context`
    prefilling: float  # requests of all slots whose prefill is not complete
    turnover: float  # tokens, of all slots; `Recent.turnover`
    heard: Floats | None = None  # monotonic seconds; None: no queues included
    ahead: Floats | None = None  # tokens that a rank may have computed since
    pace: float = 0.0  # tokens per second of one rank


def worked_off(heard: Floats, ahead: Floats, pace: float, now: float) -> Floats:
    """Return the tokens of each queue that count as computed before a rank has reported it.

    A rank reports a prompt when all of it is computed, and several at the end of a step; until then
    its queue stands still. (now - heard) · pace tokens of it are gone, and at most `ahead`.

    Args:
        heard: when the queue was last known, in monotonic seconds.
        ahead: upper bound in tokens.
        pace: tokens per second.
        now: monotonic seconds.
    """
    worked: Floats = np.minimum(np.maximum((now - heard) * pace, 0.0), ahead)
    return worked


def ranks_in(packed: bytes) -> int:
    """Return the number of slots in packed loads.

    Raises:
        ValueError: the bytes are not packed loads.
    """
    ranks, rest = divmod(len(packed) - TOTALS.size, COLUMNS * _VALUE)
    if ranks >= 0 and not rest:
        return ranks
    # never a multiple of the other, so the two forms cannot be confused
    more = len(packed) - TOTALS.size - PACE.size
    ranks, rest = divmod(more, (COLUMNS + QUEUE_COLUMNS) * _VALUE)
    if ranks < 0 or rest:
        raise ValueError(f"loads of {len(packed)} bytes")
    return ranks


def unpacked(packed: bytes) -> PackedLoads:
    """Return the unpacked loads; the columns are views.

    Raises:
        ValueError: the bytes are not packed loads.
    """
    ranks = ranks_in(packed)
    columns = np.frombuffer(packed, count=COLUMNS * ranks).reshape(COLUMNS, ranks)
    end = COLUMNS * ranks * _VALUE
    loads = PackedLoads(*columns, *TOTALS.unpack_from(packed, end))
    end += TOTALS.size
    if end == len(packed):
        return loads
    heard, ahead = np.frombuffer(packed, count=2 * ranks, offset=end).reshape(2, ranks)
    (pace,) = PACE.unpack_from(packed, end + QUEUE_COLUMNS * ranks * _VALUE)
    return loads._replace(heard=heard, ahead=ahead, pace=pace)
