"""Suspicions: since when each is held, and whether for long enough to be reported.

The neighbouring modules name their suspicions in each round; one that is not named again is over.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec.structs import replace

from select_service.core.diagnostics.causes import CAUSES
from select_service.types.doctor import Finding, Report, Subject

if TYPE_CHECKING:
    from collections.abc import Generator

    from select_service.core.diagnostics.causes import Cause

_GRAVITY: Final = ("error", "warning", "info")
_ORDER: Final = [c.code for c in sorted(CAUSES, key=lambda c: _GRAVITY.index(c.severity))]


class _Suspicion(NamedTuple):
    cause: Cause
    subject: Subject
    what: str
    since: float


class FindingChange(NamedTuple):
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
        self._findings: dict[str, dict[Subject, _Suspicion]] = {}  # by code
        self.left_out = 0  # findings not reported, ever

    def begin(self) -> None:
        """Begin a round; what one that was broken off has found does not count."""
        self._now = {}

    def suspect(self, cause: Cause, subject: Subject, what: str, now: float) -> None:
        """Say that a cause seems to apply to a subject."""
        key = (cause.code, subject)
        before = self._before.get(key)
        self._now[key] = _Suspicion(cause, subject, what, now if before is None else before.since)

    def conclude(self, now: float) -> Generator[None, None, list[FindingChange]]:
        """End a round, with a pause after each suspicion; return what has come and gone by it."""
        findings: dict[str, dict[Subject, _Suspicion]] = {}
        changes: list[FindingChange] = []
        for one in self._now.values():
            code, subject = one.cause.code, one.subject
            if now - one.since >= one.cause.after_s:
                findings.setdefault(code, {})[subject] = one
                if subject not in self._findings.get(code, ()):
                    changes.append(_change(one, is_there=True))
            yield
        for code, ones in self._findings.items():
            for subject, one in ones.items():
                if subject not in findings.get(code, ()):
                    changes.append(_change(one, is_there=False))
                yield
        self._before, self._now, self._findings = self._now, {}, findings
        self.left_out += max(0, len(self) - self._findings_max)
        return changes

    def __len__(self) -> int:
        return sum(map(len, self._findings.values()))

    def report(self, now: float) -> Report:
        """What the last round has found, the gravest first; of each kind some. O(findings_max)."""
        findings = [
            _finding(one, now)
            for code, places in self._places().items()
            for one in islice(self._findings[code].values(), places)
        ]
        return Report(findings, len(self) - len(findings), self._suspected(now))

    def _suspected(self, now: float) -> list[Finding]:
        """What the last round has seen that has not lasted yet, the gravest first."""
        young = [
            one
            for (code, subject), one in self._before.items()
            if subject not in self._findings.get(code, ())
        ]
        young.sort(key=lambda one: _GRAVITY.index(one.cause.severity))
        return [_suspected(one, now) for one in young[: self._findings_max]]

    def _places(self) -> dict[str, int]:
        """How many of each code are shown: as evenly as may be, or the commonest hid all others."""
        waiting = [code for code in _ORDER if self._findings.get(code)]
        places = dict.fromkeys(waiting, 0)
        left = self._findings_max
        while waiting and left > 0:
            for code in waiting[:left]:
                places[code] += 1
            left -= len(waiting)
            waiting = [code for code in waiting if places[code] < len(self._findings[code])]
        return places

    def counts(self) -> dict[str, int]:
        """How many findings of each code there are, also those left out."""
        return {code: len(self._findings.get(code, ())) for code in _ORDER}


def _change(one: _Suspicion, *, is_there: bool) -> FindingChange:
    return FindingChange(one.cause.code, one.cause.severity, one.subject, one.what, is_there)


def _suspected(one: _Suspicion, now: float) -> Finding:
    left_s = one.since + one.cause.after_s - now
    return replace(_finding(one, now), finding_in_s=round(max(0.0, left_s), 3))


def _finding(one: _Suspicion, now: float) -> Finding:
    cause = one.cause
    since_s = round(max(0.0, now - one.since), 3)
    return Finding(
        cause.code, cause.severity, one.subject, one.what, cause.why, cause.remedy, since_s
    )
