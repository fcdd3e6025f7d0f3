"""The policy that refuses every request: for tests, and to close a fleet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from select_service.core.admission.policy_api import AdmissionVerdict

if TYPE_CHECKING:
    from select_service.core.admission.policy_api import AdmissionPool, AdmissionRequest

_CLOSED: Final = AdmissionVerdict("refuse", "reject-all", "reject-all")


class RejectAll:
    """Refuses every request."""

    name: Final = "reject-all"
    charges: Final = False

    def judge(self, ask: AdmissionRequest, pool: AdmissionPool, now: float) -> AdmissionVerdict:
        """Refuse it."""
        return _CLOSED

    def charge(self, ask: AdmissionRequest, now: float) -> None:
        """Charge nothing; only requests promised earlier get here."""

    def hold(self, ask: AdmissionRequest, now: float) -> None:
        """Hold nothing."""

    def refill(self, ask: AdmissionRequest, pool: AdmissionPool) -> tuple[str, float]:
        """Return no rate: nothing would change the answer."""
        return "", 0.0
