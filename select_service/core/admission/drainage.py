"""How fast one partition drains, and when who was refused for what waits in it should ask again.

Every partition has one, with or without a gate; a gate reads the same meter and makes promises of
its own (`admission/returns.py`). Here nothing is promised: who is refused together is only told
one after another, as places come free. A request costs it nothing; `follow` belongs to
housekeeping.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from select_service.core.books.drain_meter import PRIOR_TOKENS_PER_S, DrainMeter

if TYPE_CHECKING:
    from select_service.core.books.work_done import WorkDone

RETURN_MAX_S: Final = 300.0
"""Nobody is sent away for longer, as `--return-horizon-s` has it for gates."""


class Drainage:
    """The measured rate, and until when it is spoken for.

    Args:
        work: what the partition's ledger has done.
        prior_tokens_per_s: what one rank computes, until it was measured.
    """

    def __init__(self, work: WorkDone, *, prior_tokens_per_s: float = PRIOR_TOKENS_PER_S) -> None:
        self.meter = DrainMeter(work, prior_tokens_per_s=prior_tokens_per_s)
        self._spoken_for = 0.0

    def follow(self) -> None:
        """Take in what was done since; a meter that looks seldom remembers an old average."""
        self.meter.follow()

    def return_s(self, one: float, everybody: float, ranks: int, now: float) -> float:
        """Return in how many seconds to ask again. O(1).

        Args:
            one: prefill tokens of a request: a place is free when so many are computed.
            everybody: those of all who are computed or wait; then there is room in any case.
            ranks: who computes.
            now: monotonic seconds.
        """
        rate = self.meter.tokens_per_s * max(1, ranks)
        latest = now + min(everybody / rate, RETURN_MAX_S)
        self._spoken_for = min(max(now, self._spoken_for) + one / rate, latest)
        return max(0.0, self._spoken_for - now)
