"""Nobody is let in: for tests, and to close a fleet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from select_service.core.admission.asks import Verdict

if TYPE_CHECKING:
    from select_service.core.admission.asks import Ask, Pool

_CLOSED: Final = Verdict("refuse", "reject-all", "reject-all")


class RejectAll:
    """Nobody is let in."""

    name: Final = "reject-all"
    charges: Final = False

    def judge(self, ask: Ask, pool: Pool, now: float) -> Verdict:
        """Refuse it."""
        return _CLOSED

    def charge(self, ask: Ask, now: float) -> None:
        """Only what was promised earlier is ever charged; there is nothing to take."""

    def hold(self, ask: Ask, now: float) -> None:
        """Likewise."""

    def refill(self, ask: Ask, pool: Pool) -> tuple[str, float]:
        """Nothing that passes would change the answer."""
        return "", 0.0
