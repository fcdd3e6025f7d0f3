"""How fast a partition drains, and when requests refused for its queue should ask again.

Every partition has one, with or without a gate; a gate reads the same meter and makes its own
promises (`retry_after.py`). Nothing is promised here: requests refused together are only given
successive times, as places come free. Requests pay nothing for it; housekeeping calls `follow`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from select_service.core.ledger.drain_meter import PRIOR_TOKENS_PER_S, DrainMeter

if TYPE_CHECKING:
    from select_service.core.ledger.slot_loads import SlotLoads

RETURN_MAX_S: Final = 300.0
"""The longest return time, like `--return-horizon-s` for gates."""


class DrainRate:
    """The measured rate, and until when it is spoken for.

    `prior_tokens_per_s` is that of one rank, until it is measured.
    """

    def __init__(self, loads: SlotLoads, *, prior_tokens_per_s: float = PRIOR_TOKENS_PER_S) -> None:
        self.meter = DrainMeter(loads.work, prior_tokens_per_s=prior_tokens_per_s)
        self._speeds = loads.speeds
        self._spoken_for = 0.0

    def follow(self) -> None:
        """Update the rate; a meter that is rarely updated returns an old average."""
        self.meter.follow()

    def retry_after_s(self, one: float, everybody: float, ranks: int, now: float) -> float:
        """Return the seconds until asking again. O(1).

        A place is free once `one`, the prefill tokens per request, are computed; after
        `everybody`, those of all computing and waiting requests, there is room in any case.
        """
        rate = self._speeds.of_pool(max(1, ranks), self.meter.tokens_per_s).tokens_per_s
        latest = now + min(everybody / rate, RETURN_MAX_S)
        self._spoken_for = min(max(now, self._spoken_for) + one / rate, latest)
        return max(0.0, self._spoken_for - now)
