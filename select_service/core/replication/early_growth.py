"""The growth of claims that we have not heard of yet: messages may overtake each other."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from select_service.core.replication.messages import OUTPUT_TELLERS_MAX, ClaimGrowth

if TYPE_CHECKING:
    from select_service.core.replication.messages import Key


class EarlyGrowth:
    """By claim name, in the order last heard. All operations O(1).

    Attributes:
        lost: forgotten because of the limit.
    """

    def __init__(self, count_max: int) -> None:
        self.lost = 0
        self._count_max = count_max
        self._known: OrderedDict[Key, tuple[ClaimGrowth, float, set[int]]] = OrderedDict()

    def keep(self, key: Key, growth: ClaimGrowth, teller: int, now: float) -> None:
        """Keep what a replica has told of a claim."""
        before = self._known.pop(key, None)
        tellers = {teller}
        if before is not None:
            growth = _joined(before[0], growth)
            tellers |= before[2]
        self._known[key] = (growth, now, tellers)
        if len(self._known) > self._count_max:
            self._known.popitem(last=False)
            self.lost += 1

    def take(self, key: Key) -> tuple[ClaimGrowth, set[int]] | None:
        """Return the growth of a claim that was heard now, and who told us of it; forget both."""
        entry = self._known.pop(key, None)
        return None if entry is None else (entry[0], entry[2])

    def purge(self, horizon: float, limit: int) -> None:
        """Forget up to `limit` entries last heard before `horizon`."""
        for _ in range(limit):
            if not self._known or next(iter(self._known.values()))[1] > horizon:
                break
            self._known.popitem(last=False)

    def check(self) -> None:
        """Assert all invariants."""
        assert len(self._known) <= self._count_max


def _joined(one: ClaimGrowth, other: ClaimGrowth) -> ClaimGrowth:
    outputs = dict(one.outputs)
    for router_id, count in other.outputs.items():
        if router_id in outputs or len(outputs) < OUTPUT_TELLERS_MAX:
            outputs[router_id] = max(outputs.get(router_id, 0), count)
    faded_at, minus = max((one.faded_at, -one.fraction), (other.faded_at, -other.fraction))
    is_done, is_kept = one.prefill_done or other.prefill_done, one.kept or other.kept
    return ClaimGrowth(is_done, outputs, faded_at, -minus, is_kept)
