"""How far a rank's index is believed, where this version weighs that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from select_service.core.partition import Partition

__all__ = ["trust_in"]


def trust_in(partition: Partition, slot: int) -> float:
    """Return by what the overlap credit of a slot is multiplied; 1: in full."""
    trust: Any = getattr(partition, "trust", None)
    return 1.0 if trust is None else round(float(trust.factor(slot)), 4)
