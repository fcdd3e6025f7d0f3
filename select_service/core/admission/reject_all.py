"""The policy that refuses every request: for tests, and to close a fleet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from select_service.core.admission.policy_api import Verdict

if TYPE_CHECKING:
    from select_service.core.admission.policy_api import Ask, Pool

_CLOSED: Final = Verdict("refuse", "reject-all", "reject-all")


class RejectAll:
    """Refuses every request."""

    name: Final = "reject-all"
    charges: Final = False

    def judge(self, ask: Ask, pool: Pool, now: float) -> Verdict:
        """Refuse it."""
        return _CLOSED

    def charge(self, ask: Ask, now: float) -> None:
        """Charge nothing; only requests promised earlier get here."""

    def hold(self, ask: Ask, now: float) -> None:
        """Hold nothing."""

    def refill(self, ask: Ask, pool: Pool) -> tuple[str, float]:
        """Return no rate: nothing would change the answer."""
        return "", 0.0
