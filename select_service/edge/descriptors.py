"""Raises the limit on open files to what the system allows.

A worker takes five or six descriptors and a client one, so the usual soft limit of 1,024 allows 170
workers. `app.py` calls this before anything is opened; /metrics shows the limit (`process_max_fds`)
and the use (`process_open_fds`).
"""

from __future__ import annotations

import logging
import sys
from typing import Final

_log = logging.getLogger("select_service")

ENOUGH: Final = 1 << 20
"""Requested when there is no hard limit; libzmq's own bound on sockets is a sixteenth of it."""


def raise_limit() -> int | None:
    """Raise the soft limit to the hard one; return the limit in force, None if unknown."""
    if sys.platform == "win32":
        return None
    import resource  # POSIX only

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else hard
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:
        _log.warning("open files stay limited to %d: %s", soft, error)
        return soft
    _log.info("open files", extra={"limit": wanted, "before": soft})
    return wanted
