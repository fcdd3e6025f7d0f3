"""How many files the process may have open, and whether one more leaves enough for others.

The kernel hands out the lowest free number, so a descriptor's number is a lower bound on how many
are open: nothing has to be counted, and the opener of a file knows at once whether it was one too
many. `sockets` and the service's HTTP server ask here after opening something.
"""

from __future__ import annotations

import os
import sys


def descriptors_end(kept: int) -> int:
    """Return the first descriptor number too high for a caller that must leave `kept` free.

    Half of the limit is always available; with a low limit nothing would be left otherwise.
    """
    if sys.platform == "win32":
        return sys.maxsize
    import resource  # not on every system

    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if most == resource.RLIM_INFINITY else max(most - kept, most // 2)


def descriptors_left(kept: int) -> int:
    """Return roughly how many files a caller that must leave `kept` free may open."""
    try:
        number = os.open(os.devnull, os.O_RDONLY)
    except OSError:
        return 0
    os.close(number)
    return max(0, descriptors_end(kept) - number)
