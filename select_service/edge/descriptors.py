"""How many files the process may have open: as many as the system lets it have.

A worker takes five or six descriptors and a client one; the usual soft limit of 1,024 is a fleet of
170 workers. `app.py` raises it before anything is opened; /metrics prints what is in force
(`process_max_fds`) and in use (`process_open_fds`).
"""

from __future__ import annotations

import logging
import sys
from typing import Final

__all__ = ["raise_limit"]

_log = logging.getLogger("select_service")

ENOUGH: Final = 1 << 20
"""Asked for where the hard limit is none: libzmq's own bound on sockets is a sixteenth of it."""


def raise_limit() -> int | None:
    """Raise the soft limit to the hard one; return what is in force, None where nobody knows."""
    if sys.platform == "win32":
        return None
    import resource  # not on every system

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
