"""The policy that admits every request; it is the default, and `reject_all.py` is its opposite."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from select_service.core.admission.policy_api import ADMIT, Verdict

if TYPE_CHECKING:
    from select_service.core.admission.policy_api import Ask, Pool


class AlwaysAdmit:
    """Admits every request."""

    name: Final = "always-admit"
    charges: Final = False

    def judge(self, ask: Ask, pool: Pool, now: float) -> Verdict:
        """Admit it."""
        return ADMIT

    def charge(self, ask: Ask, now: float) -> None:
        """Charge nothing."""

    def hold(self, ask: Ask, now: float) -> None:
        """Hold nothing."""

    def refill(self, ask: Ask, pool: Pool) -> tuple[str, float]:
        """Return no rate: it never refuses."""
        return "", 0.0
