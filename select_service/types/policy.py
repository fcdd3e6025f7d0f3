"""How ranks are priced, by name."""

from __future__ import annotations

from typing import Literal

__all__ = ["Policy"]

Policy = Literal["kv-cost", "first-token"]
"""By the contract's formula, or by when first tokens come (`core/pricing/cost.py`)."""
