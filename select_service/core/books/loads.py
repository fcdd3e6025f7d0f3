"""The loads of a partition as one string of bytes: what a decision met, cheap to keep.

The ledger and the kernel make them, `decisions/explained_terms.py` and replays read them.
"""

from __future__ import annotations

from struct import Struct as Layout
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from select_service.core.columns import Floats

__all__ = ["COLUMNS", "TOTALS", "Loads", "ranks_in", "unpacked"]

COLUMNS: Final = 4
"""By slot, doubles: P, D, the churn, and the context."""

TOTALS: Final = Layout("=dd")
"""Behind them: prompts not computed yet, and the turnover, which no column tells."""

_VALUE: Final = 8


class Loads(NamedTuple):
    """What `Ledger.columns` tells."""

    prefill: Floats  # tokens by slot
    decode: Floats  # blocks
    churn: Floats  # tokens computed lately
    context: Floats  # blocks that requests attend to, once for each
    prefilling: float  # requests of all slots whose prefill is not complete
    turnover: float  # tokens, of all slots; `Ledger.turnover`


def ranks_in(packed: bytes) -> int:
    """Return of how many slots these are.

    Raises:
        ValueError: they are no loads.
    """
    ranks, rest = divmod(len(packed) - TOTALS.size, COLUMNS * _VALUE)
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
    return Loads(*columns, *TOTALS.unpack_from(packed, COLUMNS * ranks * _VALUE))
