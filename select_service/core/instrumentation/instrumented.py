"""The observers of a service, and the kinds of objects to build for them.

`core/service.py` calls this before it builds. `recorder.py` is imported only for recording.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from select_service.core.batches.batch_plan import BatchPlan
from select_service.core.reservations.lifecycle import Lifecycle

if TYPE_CHECKING:
    from collections.abc import Callable

    from select_service.core.instrumentation.marks import MarkRecorder
    from select_service.core.instrumentation.recorder import Recorder

__all__ = ["Kinds", "Watch", "kinds_for"]


class Watch(Struct, frozen=True):
    """The observers of a core."""

    recorder: MarkRecorder | None = None
    """Takes the marks of traced requests; None: nothing is traced."""
    witness: Recorder | None = None
    """Notes events for a recording; None: nothing is recorded."""
    stopwatch: Callable[[], float] | None = None
    """Seconds, to measure the time of a shadow policy; None: it is not limited."""
    trace_decisions: bool = False
    """Whether every placement is reported in `Effects.decided`."""


class Kinds(NamedTuple):
    """The kinds to build: plain ones, or recorded ones."""

    lifecycle: type[Lifecycle] = Lifecycle
    plan: type[BatchPlan] = BatchPlan


def kinds_for(watch: Watch) -> Kinds:
    """Return the kinds to build for these observers."""
    if watch.witness is None:
        return Kinds()
    from select_service.core.instrumentation import recorder  # only when recording

    return Kinds(*recorder.kinds_for(watch.witness))
