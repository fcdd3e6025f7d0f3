"""The policies without a question: everybody, nobody."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from select_service.core.admission.asks import ADMIT, Verdict

if TYPE_CHECKING:
    from select_service.core.admission.asks import Ask, Pool


class AlwaysAdmit:
    """Everybody is let in."""

    name: Final = "always-admit"
    charges: Final = False

    def judge(self, ask: Ask, pool: Pool, now: float) -> Verdict:
        """Let it in."""
        return ADMIT

    def charge(self, ask: Ask, now: float) -> None:
        """Nothing costs anything."""

    def hold(self, ask: Ask, now: float) -> None:
        """Likewise."""

    def refill(self, ask: Ask, pool: Pool) -> tuple[str, float]:
        """Nothing that passes would change the answer."""
        return "", 0.0
