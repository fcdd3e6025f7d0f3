"""The booked load of ranks as columns by slot: what `pool_load.py` reads.

The ledger keeps them (`slot_loads.py`); `simulator/trial_pool.py` sets the same ones by hand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from select_service.core.columns import Floats
    from select_service.core.ledger.drain_meter import WorkDone
    from select_service.core.ledger.rank_speeds import RankSpeeds


class LoadColumns(Protocol):
    """Booked load by slot. Columns may be replaced by longer ones; empty slots hold 0."""

    @property
    def prefill(self) -> Floats:
        """Booked prefill tokens not computed yet."""
        ...

    @property
    def decode(self) -> Floats:
        """Active blocks."""
        ...

    @property
    def requests(self) -> NDArray[np.int64]:
        """Requests in flight."""
        ...

    @property
    def computing(self) -> NDArray[np.int64]:
        """Requests in flight whose prefill is not complete."""
        ...

    @property
    def prefilling(self) -> int:
        """The sum of `computing`."""
        ...

    @property
    def prefill_backlog(self) -> int:
        """The sum of `prefill`."""
        ...

    @property
    def speeds(self) -> RankSpeeds:
        """How fast the ranks are that were measured."""
        ...

    @property
    def work(self) -> WorkDone:
        """The work done so far."""
        ...
