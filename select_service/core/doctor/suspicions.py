"""What looks wrong, since when, and whether for long enough to be told.

The rooms beside say in each round what they suspect; what is not said again is over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from select_service.core.doctor.causes import CAUSES
from select_service.doctor_types import Finding, Report, Subject

if TYPE_CHECKING:
    from select_service.core.doctor.causes import Cause

_GRAVITY: Final = {"error": 0, "warning": 1, "info": 2}
_PLACE: Final = {cause.code: place for place, cause in enumerate(CAUSES)}


class _Suspicion(NamedTuple):
    cause: Cause
    subject: Subject
    what: str
    since: float


class Change(NamedTuple):
    """A finding that has come, or gone."""

    code: str
    severity: str
    subject: Subject
    what: str
    is_there: bool


class Suspicions:
    """Kept from round to round; as many at most as workers, ranks and replicas times causes."""

    def __init__(self, findings_max: int) -> None:
        self._findings_max = findings_max
        self._before: dict[tuple[str, Subject], _Suspicion] = {}
        self._now: dict[tuple[str, Subject], _Suspicion] = {}
        self._told: dict[tuple[str, Subject], _Suspicion] = {}
        self.left_out = 0  # findings not told, ever

    def begin(self) -> None:
        """Begin a round; what one that was broken off has said does not count."""
        self._now = {}

    def suspect(self, cause: Cause, subject: Subject, what: str, now: float) -> None:
        """Say that a cause seems to apply to a subject."""
        key = (cause.code, subject)
        before = self._before.get(key)
        self._now[key] = _Suspicion(cause, subject, what, now if before is None else before.since)

    def conclude(self, now: float) -> list[Change]:
        """End a round; what has come and gone by it."""
        told = {key: one for key, one in self._now.items() if now - one.since >= one.cause.after_s}
        changes = [
            _change(one, is_there=True) for key, one in told.items() if key not in self._told
        ]
        changes += [
            _change(one, is_there=False) for key, one in self._told.items() if key not in told
        ]
        self.left_out += max(0, len(told) - self._findings_max)
        self._before, self._now, self._told = self._now, {}, told
        return changes

    def report(self, now: float) -> Report:
        """What the last round has found, the gravest first."""
        told = sorted(self._told.values(), key=_rank)
        return Report(
            [_finding(one, now) for one in told[: self._findings_max]],
            max(0, len(told) - self._findings_max),
        )

    def counts(self) -> dict[str, int]:
        """How many findings of each code there are, also those left out."""
        counts = dict.fromkeys(_PLACE, 0)
        for code, _ in self._told:
            counts[code] += 1
        return counts


def _rank(one: _Suspicion) -> tuple[int, int, float]:
    return _GRAVITY[one.cause.severity], _PLACE[one.cause.code], one.since


def _change(one: _Suspicion, *, is_there: bool) -> Change:
    return Change(one.cause.code, one.cause.severity, one.subject, one.what, is_there)


def _finding(one: _Suspicion, now: float) -> Finding:
    cause = one.cause
    since_s = round(max(0.0, now - one.since), 3)
    return Finding(
        *(cause.code, cause.severity, one.subject, one.what, cause.why, cause.remedy), since_s
    )
