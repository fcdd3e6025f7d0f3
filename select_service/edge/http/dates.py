"""The time of an answer's `Date` line.

The standard library's `email.utils.formatdate` asks its time zone for daylight saving by a name
made for that call, and Python's cache of attributes keeps such a name: one small object a second,
each in the middle of whatever comes and goes at that moment. After a load 40 of 80 megabytes that
could not be given back had nothing in them but these.
"""

from __future__ import annotations

import time
from typing import Final

__all__ = ["http_date"]

_DAYS: Final = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_MONTHS: Final = (
    *("Jan", "Feb", "Mar", "Apr", "May", "Jun"),
    *("Jul", "Aug", "Sep", "Oct", "Nov", "Dec"),
)


def http_date(at: int) -> bytes:
    """Return a moment, in seconds since 1970, as RFC 9110 5.6.7 writes it, whatever the locale."""
    of = time.gmtime(at)
    day, month = _DAYS[of.tm_wday], _MONTHS[of.tm_mon - 1]
    clock = f"{of.tm_hour:02}:{of.tm_min:02}:{of.tm_sec:02}"
    return f"{day}, {of.tm_mday:02} {month} {of.tm_year:04} {clock} GMT".encode()
