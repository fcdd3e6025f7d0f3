"""How far who is short may go before who is long, in a queue that is ordered by arrival."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from select_service.types import RouterConfig

__all__ = ["NO_OVERTAKING", "OVERTAKING", "Overtaking", "overtaking"]


class Overtaking(NamedTuple):
    """By how much later who has 1,000 tokens less to compute may come, and go first."""

    seconds: float = 0.0
    share: float = 0.0  # of the time that the first in line has waited

    def after(self, waited_s: float) -> float:
        """Return the seconds where the first in line has waited for so long: the more of both."""
        return max(self.seconds, self.share * waited_s)


NO_OVERTAKING: Final = Overtaking()

OVERTAKING: Final = Overtaking(seconds=0.6, share=0.015)
"""Of `first-token`: it bounds what a long prompt can lose to short ones. Where everybody waits for
minutes seconds alone would change nothing, and a share of a short wait would not be seen."""


def overtaking(config: RouterConfig) -> Overtaking:
    """Return what is in force where no policy file orders the queues."""
    own = OVERTAKING if config.policy == "first-token" else NO_OVERTAKING
    return Overtaking(
        own.seconds if config.overtaking_s is None else config.overtaking_s,
        own.share if config.overtaking_share is None else config.overtaking_share,
    )
