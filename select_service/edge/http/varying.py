"""Header lines that differ from request to request and change nothing in its answer.

They are for tracing, ours (`trace_context.py`) or others'. What stands in a head besides them is
the same again and again, which is what `fast_lane.py` lives on.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["VARYING", "VARYING_LINES"]

VARYING: Final = frozenset(
    (
        *(b"traceparent", b"tracestate", b"baggage", b"x-request-id"),
        *(b"b3", b"x-b3-traceid", b"x-b3-spanid", b"x-b3-parentspanid", b"x-b3-sampled"),
    )
)
"""Headers whose value is another one with every request, and which change nothing in its answer."""

VARYING_LINES: Final = re.compile(
    rb"\r\n("
    + rb"|".join(sorted(VARYING, reverse=True))
    + rb"):[ \t]*+([\t -~]{0,512}+)(?=\r\n|\Z)",
    re.IGNORECASE,
)
"""Each as a whole line of a head. What has been read is never tried again (`*+`): a line of blanks
would hold the loop for most of a second."""
