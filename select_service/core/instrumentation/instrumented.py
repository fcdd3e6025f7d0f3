"""The observers of a service; `core/observers.py` lists what they receive."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Callable

    from select_service.core.instrumentation.marks import MarkRecorder
    from select_service.core.instrumentation.recorder import Recorder


class CoreObservers(Struct, frozen=True):
    """The observers of a core."""

    tracer: MarkRecorder | None = None
    """Takes the marks of traced requests; None: nothing is traced."""
    decision_recorder: Recorder | None = None
    """Notes events for a recording; None: nothing is recorded."""
    stopwatch: Callable[[], float] | None = None
    """Seconds, to measure the time of a shadow policy; None: it is not limited."""
    trace_decisions: bool = False
    """Whether every placement is reported in `Effects.decided`."""
