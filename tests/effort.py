"""How many examples a test takes: all of them in `make test-long`, a share of them before.

Chance finds what it finds in either; a submission is not to wait half an hour for it, nor anybody
five minutes for `make test`. Where its tests are run once more, on other versions or without
kernels, chance takes fewer still (`TEST_EFFORT=brief`): what is looked for there does not hide.
"""

from __future__ import annotations

import os
from typing import Final

__all__ = ["LIGHT", "examples", "share_of"]

_EFFORT: Final = os.environ.get("TEST_EFFORT", "")
LIGHT: Final = {"long": 1.0, "brief": 0.2}.get(_EFFORT, 0.5)
SHARE: Final = 1.0 if _EFFORT == "long" else 0.03


def examples(count: int) -> int:
    """Return how many of so many examples a test takes that is run with every change."""
    return max(1, round(LIGHT * count))


def share_of(count: int) -> int:
    """Return how many of so many examples a long test takes."""
    return max(1, round(SHARE * count))
