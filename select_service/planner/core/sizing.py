"""What is promised to a model's users, and what a role needs for it.

`prefill_sizing.py` and `decode_sizing.py` compute the need of each role. If no number of engines
meets a target, this is reported, and the pool is sized to keep up with its traffic instead: an
absurd count would not meet it either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

KEEP_UP: Final = 0.85
"""The utilization of engines if their target cannot be met anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goals:
    """The targets promised to one model's users."""

    ttft_ms: float = 500.0
    itl_ms: float = 50.0
    attainment: float | None = None
    """Share of requests for which both hold; None: on average."""
    pooled: bool = True
    """Requests go to whichever engine has the least work, as the selector sends them."""


class Need(NamedTuple):
    """The need of one role."""

    engines: float
    """A fraction, unless they are pooled prefill engines."""
    terms: dict[str, float]
    """Numbers it comes from, by name."""
    infeasible: str = ""
    """Why the target cannot be met, as text."""
