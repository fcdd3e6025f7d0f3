"""Reads W3C Trace Context from headers, and decides which requests are traced.

An invalid header begins a new trace, as the recommendation requires. Most requests are not traced:
for them this costs one look at a header, or one random number.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Parent", "Sampler", "parent_in", "read_parent", "sampler"]

_TRACEPARENT: Final = re.compile(
    rb"[ \t]*(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})"
    rb"(-[^ \t]*)?[ \t]*"
)
_UNSAMPLED: Final = re.compile(
    rb"\r\n(?i:traceparent):[ \t]*00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f][02468ace](?=\r\n|\Z)"
)
_SAID: Final = re.compile(
    rb"\r\n(traceparent|tracestate):[ \t]*+([\t -~]*+)(?=\r\n|\Z)", re.IGNORECASE
)
"""Never backtracks (`*+`): a line of blanks would hold the loop for most of a second."""
STATE_BYTES_MAX: Final = 512
"""Of tracestate: what everybody must pass on at least; a longer one is omitted."""

_SAMPLED: Final = 1
_LOW: Final = (1 << 64) - 1


class Parent(NamedTuple):
    """The parent of a request."""

    trace_id: int
    span_id: int
    is_sampled: bool
    state: bytes  # tracestate; opaque to us


def read_parent(headers: Iterable[tuple[bytes, bytes]]) -> Parent | None:
    """Return the parent of a request; None: it has none.

    Args:
        headers: names in lower case.
    """
    said: bytes | None = None
    states: list[bytes] = []
    for name, value in headers:
        if name == b"traceparent":
            if said is not None:
                return None  # duplicates are invalid
            said = value
        elif name == b"tracestate":
            states.append(value)
    if said is None:
        return None
    found = _TRACEPARENT.fullmatch(said)
    if found is None or (found[1] == b"00" and found[5] is not None):
        return None
    state = b",".join(states)
    return Parent(
        int(found[2], 16),
        int(found[3], 16),
        bool(int(found[4], 16) & _SAMPLED),
        state if len(state) <= STATE_BYTES_MAX else b"",
    )


def parent_in(lines: bytes) -> Parent | None:
    """Return the parent of a request, from the lines of its head as sent."""
    return read_parent([(name.lower(), value) for name, value in _SAID.findall(lines)])


class Sampler(NamedTuple):
    """Samples a share of the requests without a parent, the others as the parent says."""

    below: int
    """Trace ids are sampled if their lower 64 bits are below this."""
    asks_parent: bool
    """Otherwise parents are ignored."""

    def passes_over(self, lines: bytes) -> bool:
        """Return whether these lines certainly mean no trace, for a tenth of the cost of parsing.

        True of most requests if the caller samples.
        """
        return self.asks_parent and _UNSAMPLED.search(lines) is not None

    def takes(self, parent: Parent) -> bool:
        """Return whether the child of this parent is traced."""
        if self.asks_parent:
            return parent.is_sampled
        return parent.trace_id & _LOW < self.below


def sampler(name: str, ratio: float) -> Sampler:
    """Return a sampler by name; the ratio, from 0 to 1, is for those that have one."""
    kind = name.removeprefix("parentbased_")
    share = {"always_on": 1.0, "always_off": 0.0, "traceidratio": ratio}[kind]
    return Sampler(round(share * (_LOW + 1)), name != kind)
