"""The policies that answer every request alike: always-admit, the default, and reject-all.

reject-all is for tests, and to close a fleet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from select_service.core.admission.policy_api import ADMIT, AdmissionPolicy, AdmissionVerdict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from select_service.core.admission.policy_api import AdmissionRequest
    from select_service.core.admission.pool_load import PoolLoad

CONSTANT: Final[Mapping[str, AdmissionVerdict]] = {
    "always-admit": ADMIT,
    "reject-all": AdmissionVerdict("refuse", "reject-all", "reject-all"),
}
"""The verdict of each, by its name."""


class ConstantPolicy(AdmissionPolicy):
    """Gives every request the verdict of its name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._verdict = CONSTANT[name]

    def judge(self, ask: AdmissionRequest, pool: PoolLoad, now: float) -> AdmissionVerdict:
        """Return the verdict."""
        return self._verdict

    def refill(self, ask: AdmissionRequest, pool: PoolLoad) -> tuple[str, float]:
        """Return no rate: nothing changes the answer."""
        return "", 0.0
