"""The timestamp of an answer's `Date` header.

The standard library's `email.utils.formatdate` looks up daylight saving by an attribute name
created for that call, and Python's attribute cache retains each one: one small object a second,
scattered among the allocations of that moment. After a load they alone pinned 40 of the 80
megabytes that could not be returned.
"""

from __future__ import annotations

import time
from typing import Final

_DAYS: Final = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_MONTHS: Final = (
    "Jan",
    "Feb",
    "Mar",
    "Apr",
    "May",
    "Jun",
    "Jul",
    "Aug",
    "Sep",
    "Oct",
    "Nov",
    "Dec",
)


def http_date(at: int) -> bytes:
    """Format seconds since 1970 per RFC 9110 5.6.7, whatever the locale."""
    of = time.gmtime(at)
    day, month = _DAYS[of.tm_wday], _MONTHS[of.tm_mon - 1]
    clock = f"{of.tm_hour:02}:{of.tm_min:02}:{of.tm_sec:02}"
    return f"{day}, {of.tm_mday:02} {month} {of.tm_year:04} {clock} GMT".encode()
