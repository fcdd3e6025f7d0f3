"""How many examples a long test takes: all of them in `make test-long`, a share of them before.

Chance finds what it finds in either; a submission is not to wait half an hour for it.
"""

from __future__ import annotations

import os
from typing import Final

__all__ = ["share_of"]

SHARE: Final = 1.0 if os.environ.get("TEST_EFFORT") == "long" else 0.05


def share_of(examples: int) -> int:
    """Return how many of so many examples this run takes."""
    return max(1, round(SHARE * examples))
