"""Reads the parent of a request from its headers, with OpenTelemetry's W3C propagator.

An invalid header begins a new trace, as the recommendation requires. Loaded only if tracing is on.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Final

from opentelemetry.context import Context
from opentelemetry.propagators.textmap import Getter
from opentelemetry.trace import TraceState, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opentelemetry.trace import SpanContext

STATE_BYTES_MAX: Final = 512
"""Of tracestate: what everybody must pass on at least; a longer one is omitted."""

_SAID: Final = re.compile(
    rb"\r\n(traceparent|tracestate):[ \t]*+([\t -~]*+)(?=\r\n|\Z)", re.IGNORECASE
)
"""Never backtracks (`*+`): a line of blanks would hold the loop for most of a second."""
_NOTHING: Final = Context()

logging.getLogger("opentelemetry.trace").setLevel(logging.ERROR)
"""The propagator warns of what is invalid: clients would write our log."""


class _Headers(Getter["Sequence[tuple[bytes, bytes]]"]):
    """The headers of a request, names in lower case, as the propagator reads them."""

    @override
    def get(self, carrier: Sequence[tuple[bytes, bytes]], key: str) -> list[str] | None:
        name = key.encode()
        values = [value.decode("latin-1") for header, value in carrier if header == name]
        if key != "tracestate":
            return values if len(values) == 1 else None  # duplicates are invalid
        text = ",".join(values)
        if len(text) > STATE_BYTES_MAX:
            return None
        members = (member.strip(" \t").partition("=") for member in text.split(","))
        valid = TraceState([(member, value) for member, _, value in members])  # leaves out others
        return [valid.to_header()]

    @override
    def keys(self, carrier: Sequence[tuple[bytes, bytes]]) -> list[str]:
        return [name.decode("latin-1") for name, _ in carrier]


_HEADERS: Final = _Headers()
_extract: Final = TraceContextTextMapPropagator().extract


def read_parent(headers: Sequence[tuple[bytes, bytes]]) -> SpanContext | None:
    """Return the parent of a request; None: it has none.

    Args:
        headers: names in lower case.
    """
    parent = get_current_span(_extract(headers, _NOTHING, _HEADERS)).get_span_context()
    return parent if parent.is_valid else None


def parent_in(lines: bytes) -> SpanContext | None:
    """Return the parent of a request, from the lines of its head as sent."""
    found = _SAID.findall(lines)
    return read_parent([(name.lower(), value) for name, value in found]) if found else None
