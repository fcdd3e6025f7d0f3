"""Who looks on while a service works, and which rooms it is built of for their sake.

`core/service.py` asks before it builds. What the rooms that tell somebody do is in `recording.py`
and `witness.py`, which nobody imports who neither traces nor records.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from select_service.core.booking.desk import Desk
from select_service.core.decisions.keeping import Decisions
from select_service.core.verbs.placing import Placing
from select_service.core.verbs.selecting import Selecting
from select_service.core.waves.plan import WavePlan

if TYPE_CHECKING:
    from collections.abc import Callable

    from select_service.core.watching.marks import Recorder
    from select_service.core.watching.witness import Witness

__all__ = ["Kinds", "Watch", "kinds_for"]


class Watch(Struct, frozen=True):
    """Who looks on while the core works."""

    recorder: Recorder | None = None
    """Takes the marks of requests that are traced; None: none is."""
    witness: Witness | None = None
    """Notes what happens, for a recording; None: nobody does."""
    stopwatch: Callable[[], float] | None = None
    """Seconds, to measure what a shadow policy costs; None: it is not bounded."""
    trace_decisions: bool = False
    """Whether every placement is reported in `Effects.decided`."""


class Kinds(NamedTuple):
    """Which rooms to build: plain ones, or those that tell somebody what they do."""

    desk: type[Desk] = Desk
    placing: type[Placing] = Placing
    selecting: type[Selecting] = Selecting
    decisions: type[Decisions] = Decisions
    plan: type[WavePlan] = WavePlan
    draws: list[float | int] | None = None
    """What was drawn for a decision, where that is noted."""
    has_shortcut: bool = True
    """Whether a request need not pass through every room."""


def kinds_for(watch: Watch) -> Kinds:
    """Return the rooms to build a service of where these look on."""
    recorder, witness, kinds = watch.recorder, watch.witness, Kinds()
    if recorder is not None:
        from select_service.core.watching import recording  # for who traces

        kinds = Kinds(*recording.rooms_for(recorder), has_shortcut=False)
    if witness is not None:
        from select_service.core.watching.witness import rooms_for  # for who records

        rooms = rooms_for(witness, kinds.desk, kinds.placing)
        kinds = Kinds(
            *(rooms.desk, rooms.placing, kinds.selecting, rooms.decisions, rooms.plan),
            *(witness.sink.draws, kinds.has_shortcut),
        )
    return kinds
