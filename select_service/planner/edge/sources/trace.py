"""Windows from a file of requests, interval by interval, to try a planner on the past."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from select_service.planner.core.lengths import from_values
from select_service.planner.core.warm_up import TracedRequest
from select_service.planner.errors import TraceError
from select_service.planner.types import IDLE, Load, Missing, Value, Window
from select_service.simulator.trace_lines import BadTrace, decoded, numbered

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from select_service.planner.types import ModelKey

TOKENS_MAX: Final = 1 << 32
"""The longest prompt or output; more is no realistic length, and a replay would process it all."""

_Tokens = Annotated[float, msgspec.Meta(ge=0.0, le=TOKENS_MAX)]


class _Line(msgspec.Struct):
    timestamp: float
    """Milliseconds."""
    input_length: _Tokens
    output_length: _Tokens


def read_trace(path: Path) -> list[TracedRequest]:
    """Read JSON lines with `timestamp` (ms), `input_length` and `output_length`, sorted by time.

    Raises:
        TraceError: a line is invalid; its number is given.
    """
    decoder = msgspec.json.Decoder(_Line)
    try:
        with path.open("rb") as file:
            lines = [decoded(decoder, line, number) for number, line in numbered(file)]
    except BadTrace as error:
        raise TraceError(f"{path}, {error}") from error
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error
    return sorted(
        TracedRequest(one.timestamp / 1e3, one.input_length, one.output_length) for one in lines
    )


class TraceSource:
    """Returns one interval of the trace per call, the same for every model."""

    def __init__(self, requests: Sequence[TracedRequest]) -> None:
        self._requests = list(requests)
        self._start = requests[0].at_s if requests else 0.0

    @property
    def warnings(self) -> Sequence[str]:
        """Nothing: it has been recorded."""
        return ()

    async def begin(self, models: Sequence[ModelKey]) -> None:
        """Do nothing: the trace begins with its first request."""

    async def windows(self, models: Sequence[ModelKey], seconds: float) -> dict[ModelKey, Window]:
        """Return the next interval; from the one in which it ends everything is missing."""
        window = self._next(seconds)
        return dict.fromkeys(models, window)

    async def loads(self, models: Sequence[ModelKey]) -> dict[ModelKey, Load]:
        """Return empty loads: a trace has no engines."""
        return dict.fromkeys(models, Load())

    async def close(self) -> None:
        """Nothing to close."""

    def _next(self, seconds: float) -> Window:
        end = self._start + seconds
        count = sum(one.at_s < end for one in self._requests)
        if count == len(self._requests):  # it is not known what would have come in the rest of it
            self._requests = []
            return Window(seconds=seconds, requests=Missing("the trace has ended"))
        seen, self._requests = self._requests[:count], self._requests[count:]
        self._start = end
        if not seen:
            return Window(seconds=seconds, requests=IDLE)
        return Window(
            seconds=seconds,
            requests=Value(float(len(seen))),
            isl=Value(sum(one.isl for one in seen) / len(seen)),
            osl=Value(sum(one.osl for one in seen) / len(seen)),
            isl_mix=from_values(one.isl for one in seen),
        )
