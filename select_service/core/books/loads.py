"""The loads of a partition as one string of bytes: what a decision met, cheap to keep.

The ledger and the kernel make them, `decisions/explained_terms.py` and replays read them.
"""

from __future__ import annotations

from struct import Struct as Layout
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from select_service.core.columns import Floats

__all__ = ["COLUMNS", "PACE", "TOTALS", "Loads", "ranks_in", "unpacked", "worked_off"]

COLUMNS: Final = 4
"""By slot, doubles: P, D, the churn, and the context."""

TOTALS: Final = Layout("=dd")
"""Behind them: prompts not computed yet, and the turnover, which no column tells."""

QUEUE_COLUMNS: Final = 2
"""Where queues are told of, behind those: since when each is as it is, and `ahead`, ..."""

PACE: Final = Layout("=d")
"""... and what a rank computes in a second. Whether they are there is told by the length."""

_VALUE: Final = 8


class Loads(NamedTuple):
    """What `SlotLoads.pack` tells."""

    prefill: Floats  # tokens by slot
    decode: Floats  # blocks
    churn: Floats  # tokens computed lately
    context: Floats  # blocks, what requests weigh, and waits for seats; `SlotLoads.context`
    prefilling: float  # requests of all slots whose prefill is not complete
    turnover: float  # tokens, of all slots; `Recent.turnover`
    heard: Floats | None = None  # monotonic seconds; None: nothing was told of queues
    ahead: Floats | None = None  # tokens that a rank may have computed since
    pace: float = 0.0  # tokens a second of one rank


def worked_off(heard: Floats, ahead: Floats, pace: float, now: float) -> Floats:
    """Return the tokens of each queue that count as computed though nobody has said so yet.

    A rank tells of a prompt when all of it is computed, and of several at the end of a step: until
    then its queue stands still. (now - heard) · pace of it is gone, and at most `ahead`.

    Args:
        heard: when the queue was known last, in monotonic seconds.
        ahead: tokens, at most.
        pace: tokens a second.
        now: monotonic seconds.
    """
    worked: Floats = np.minimum(np.maximum((now - heard) * pace, 0.0), ahead)
    return worked


def ranks_in(packed: bytes) -> int:
    """Return of how many slots these are.

    Raises:
        ValueError: they are no loads.
    """
    ranks, rest = divmod(len(packed) - TOTALS.size, COLUMNS * _VALUE)
    if ranks >= 0 and not rest:
        return ranks
    more = len(packed) - TOTALS.size - PACE.size  # never a multiple of the other, so one of both
    ranks, rest = divmod(more, (COLUMNS + QUEUE_COLUMNS) * _VALUE)
    if ranks < 0 or rest:
        raise ValueError(f"loads of {len(packed)} bytes")
    return ranks


def unpacked(packed: bytes) -> Loads:
    """Return what they say; the columns are views.

    Raises:
        ValueError: they are no loads.
    """
    ranks = ranks_in(packed)
    columns = np.frombuffer(packed, count=COLUMNS * ranks).reshape(COLUMNS, ranks)
    end = COLUMNS * ranks * _VALUE
    loads = Loads(*columns, *TOTALS.unpack_from(packed, end))
    end += TOTALS.size
    if end == len(packed):
        return loads
    heard, ahead = np.frombuffer(packed, count=2 * ranks, offset=end).reshape(2, ranks)
    (pace,) = PACE.unpack_from(packed, end + QUEUE_COLUMNS * ranks * _VALUE)
    return loads._replace(heard=heard, ahead=ahead, pace=pace)
