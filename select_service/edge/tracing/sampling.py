"""Decides which requests are traced: mostly by a look at a header, or by one random number."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

_UNSAMPLED: Final = re.compile(
    rb"\r\n(?i:traceparent):[ \t]*00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f][02468ace](?=\r\n|\Z)"
)
_LOW: Final = (1 << 64) - 1


class TraceSampler(NamedTuple):
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

    def takes(self, parent: SpanContext) -> bool:
        """Return whether the child of this parent is traced."""
        if self.asks_parent:
            return parent.trace_flags.sampled
        return parent.trace_id & _LOW < self.below


def sampler(name: str, ratio: float) -> TraceSampler:
    """Return a sampler by name; the ratio, from 0 to 1, is for those that have one."""
    kind = name.removeprefix("parentbased_")
    share = {"always_on": 1.0, "always_off": 0.0, "traceidratio": ratio}[kind]
    return TraceSampler(round(share * (_LOW + 1)), name != kind)
