"""What other parts of the service know and the console only shows: decisions, findings, trust.

Each may be absent from this build or switched off; then it says so, and why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from select_service.edge.driver import Driver

__all__ = ["decision", "decisions", "findings"]

_ABSENT: Final = "this version keeps no decision records"


def decisions(service: Driver, wishes: dict[str, str], limit: int) -> dict[str, Any]:
    """Return the newest decisions, without their candidates."""
    return {"available": False, "why": _ABSENT, "decisions": []}


def decision(service: Driver, name: str) -> dict[str, Any] | None:
    """Return one decision by the name of its selection or reservation; None: not here."""
    return None


def findings(service: Driver) -> dict[str, Any]:
    """Return what the doctor finds."""
    return {"available": False, "why": "this version has no doctor", "findings": []}
