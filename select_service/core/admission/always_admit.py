"""The policy that admits every request; it is the default, and `reject_all.py` is its opposite."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from select_service.core.admission.policy_api import ADMIT, AdmissionVerdict

if TYPE_CHECKING:
    from select_service.core.admission.policy_api import AdmissionPool, AdmissionRequest


class AlwaysAdmit:
    """Admits every request."""

    name: Final = "always-admit"
    charges: Final = False

    def judge(self, ask: AdmissionRequest, pool: AdmissionPool, now: float) -> AdmissionVerdict:
        """Admit it."""
        return ADMIT

    def charge(self, ask: AdmissionRequest, now: float) -> None:
        """Charge nothing."""

    def hold(self, ask: AdmissionRequest, now: float) -> None:
        """Hold nothing."""

    def refill(self, ask: AdmissionRequest, pool: AdmissionPool) -> tuple[str, float]:
        """Return no rate: it never refuses."""
        return "", 0.0
