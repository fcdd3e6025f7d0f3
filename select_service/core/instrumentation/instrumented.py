"""The observers of a service, and the kinds of rooms to build for them.

`core/service.py` calls this before it builds. The observing rooms are in `traced.py` and
`recorder.py`, which are imported only for tracing or recording.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from select_service.core.batches.batch_plan import BatchPlan
from select_service.core.decisions.decision_log import DecisionLog
from select_service.core.operations.selection import SelectionCalls
from select_service.core.reservations.lifecycle import Lifecycle
from select_service.core.routing.place import Placer

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
    """The rooms to build: plain ones, or observed ones."""

    desk: type[Lifecycle] = Lifecycle
    placing: type[Placer] = Placer
    selecting: type[SelectionCalls] = SelectionCalls
    decisions: type[DecisionLog] = DecisionLog
    plan: type[BatchPlan] = BatchPlan
    draws: list[float | int] | None = None
    """The random draws for a decision, where they are noted."""


def kinds_for(watch: Watch) -> Kinds:
    """Return the rooms to build for these observers."""
    recorder, witness, kinds = watch.recorder, watch.witness, Kinds()
    if recorder is not None:
        from select_service.core.instrumentation import traced  # only when tracing

        kinds = Kinds(*traced.rooms_for(recorder))
    if witness is not None:
        from select_service.core.instrumentation.recorder import rooms_for  # only when recording

        rooms = rooms_for(witness, kinds.desk, kinds.placing)
        kinds = Kinds(
            *(rooms.desk, rooms.placing, kinds.selecting, rooms.decisions, rooms.plan),
            witness.sink.draws,
        )
    return kinds
