"""How many files the process may have open, and whether one more leaves enough for others.

The kernel hands out the lowest number that is free, so a number tells how many are open at least:
nobody has to count, and whoever has opened something knows at once whether that was too many.
"""

from __future__ import annotations

import os
import sys

__all__ = ["descriptors_end", "descriptors_left"]


def descriptors_end(kept: int) -> int:
    """Return the first number that is too high for who leaves so many to others.

    Half of what there is may be had by all: of few descriptors none would be left otherwise.
    """
    if sys.platform == "win32":
        return sys.maxsize
    import resource  # not on every system

    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if most == resource.RLIM_INFINITY else max(most - kept, most // 2)


def descriptors_left(kept: int) -> int:
    """Return how many may be opened, about, by who leaves so many to others."""
    try:
        number = os.open(os.devnull, os.O_RDONLY)
    except OSError:
        return 0
    os.close(number)
    return max(0, descriptors_end(kept) - number)
