"""What the index will have of a prompt once a rank has computed a prefix for another of its batch.

`routing/place.py` prices the samples of a batch with it (`batches/batch_plan.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from indexer.core.tiers import Matches

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from indexer.core.tiers import SlotTable


class _OneSlotMore:
    """The slots of masks without one slot, which has a mask of its own."""

    def __init__(self, matches: Matches, slot: int) -> None:
        self._matches = matches
        self._slot = slot
        self._alone = np.array([slot], dtype=np.int64)

    def slots(self, mask: int) -> NDArray[np.int64]:
        """Return the slots of a mask; -1 is the mask of the one slot."""
        if mask == _ALONE:
            return self._alone
        slots = self._matches.slots(mask)
        others: NDArray[np.int64] = slots[slots != self._slot]
        return others


_ALONE = -1


def expecting(matches: Matches, slot: int, blocks: int) -> Matches:
    """Return the matches once a slot holds the prompt's first blocks; at least the present ones."""
    if sum(matches.rows().get(slot, (0,))) >= blocks:
        return matches
    table = _OneSlotMore(matches, slot)
    groups = [*matches.groups, (blocks, _ALONE)]
    told = [] if matches.estimated is None else matches.estimated.tolist()
    return Matches(
        cast("SlotTable", table),
        groups,
        [*matches.host],
        [*matches.disk],
        external=matches.external,
        estimated=np.array([*told, slot], dtype=np.int64),
    )
