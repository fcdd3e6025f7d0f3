"""How far a short prompt may overtake a long one in a queue ordered by arrival.

The queues of `admission` apply it; the settings come from the router config.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from select_service.types import RouterConfig


class Overtaking(NamedTuple):
    """How much later a prompt with 1,000 fewer tokens to compute may arrive and still go first."""

    seconds: float = 0.0
    share: float = 0.0  # of the time that the first in line has waited

    def after(self, waited_s: float) -> float:
        """Return the head start in seconds for a wait of the first in line: the larger of both."""
        return max(self.seconds, self.share * waited_s)


NO_OVERTAKING: Final = Overtaking()

OVERTAKING: Final = Overtaking(seconds=0.6, share=0.015)
"""For `first-token`: it bounds what a long prompt can lose to short ones. With waits of minutes,
seconds alone would change nothing; with short waits, a share would not be noticeable."""


def overtaking(config: RouterConfig) -> Overtaking:
    """Return the setting in force if no policy file orders the queues."""
    own = OVERTAKING if config.policy == "first-token" else NO_OVERTAKING
    return Overtaking(
        own.seconds if config.overtaking_s is None else config.overtaking_s,
        own.share if config.overtaking_share is None else config.overtaking_share,
    )
