"""Answers that are worked out in slices, all at once: tests have nobody else to let in between."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from select_service.core.effects import Effects
    from select_service.core.service import SelectionCore
    from select_service.types.admission import AdmissionChange

__all__ = ["answer_of", "put_in_force"]

T = TypeVar("T")


def answer_of(asked: Generator[None, None, T]) -> T:
    while True:
        try:
            next(asked)
        except StopIteration as ended:
            answer: T = ended.value
            return answer


def put_in_force(core: SelectionCore, change: AdmissionChange, now: float) -> list[Effects]:
    """Put another admission policy in force, all at once; returns the effects of the steps."""
    steps = core.admission.change(change)
    effects = [next(steps)]
    with suppress(StopIteration):
        while True:
            effects.append(steps.send(now))
    return effects
