"""Renders findings as text for people: plain, wrapped, the most severe first."""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING, Final

from msgspec import UNSET

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from select_service.doctor.query import Answer
    from select_service.types.doctor import Finding, Subject

_INDENT: Final = "          "
_MINUTE_S: Final = 60
_HOUR_S: Final = 3600
_NAMES: Final = (
    ("worker_id", "worker"),
    ("dp_rank", "rank"),
    ("model_name", "model"),
    ("tenant_id", "tenant"),
    ("endpoint", ""),
    ("peer", "replica"),
    ("source", "source"),
)


def format_report(
    where: str, answer: Answer, findings: Sequence[Finding], width: int, probed: str = ""
) -> str:
    """Return the whole report, in lines of about `width` characters; `probed` is a line of it."""
    return "\n".join(_lines(where, answer, findings, width, probed)) + "\n"


def _lines(
    where: str, answer: Answer, findings: Sequence[Finding], width: int, probed: str
) -> Iterator[str]:
    state = "ready" if answer.ready else f"not ready, waiting for {', '.join(answer.waiting_for)}"
    workers = f"{answer.schedulable_workers} of {len(answer.workers)} workers schedulable"
    yield f"{where}: {state}; {workers}"
    if probed:
        yield probed
    if not findings:
        yield "No lasting problem found yet." if answer.suspected else "No problems found."
    for alike in _kinds(findings):
        yield ""
        yield from _kind(alike, max(width, 40))
    if answer.findings_left_out:
        yield f"\nand {answer.findings_left_out} more (--doctor-findings-max)"
    if answer.suspected:
        yield "\nSeen just now, and a problem if it lasts:"
    for alike in _kinds(answer.suspected):
        yield ""
        yield from _kind(alike, max(width, 40))


def _kinds(findings: Sequence[Finding]) -> Iterable[list[Finding]]:
    """Group findings with the same cause and remedy, which are then shown only once."""
    kinds: dict[tuple[str, ...], list[Finding]] = {}
    for one in findings:
        kinds.setdefault((one.severity, one.code, one.why, one.remedy), []).append(one)
    return kinds.values()


def _kind(alike: list[Finding], width: int) -> Iterator[str]:
    first = alike[0]
    about = _about(first.subject) if len(alike) == 1 else f"{len(alike)} findings"
    yield _visible(f"{first.severity.upper():<8}{first.code}  {about}".rstrip())
    if len(alike) == 1:
        yield _paragraph("what", first.what + _since(first), width)
    else:
        for one in alike:
            text = f"{_about(one.subject)}: {one.what}{_since(one)}"
            yield _paragraph("what" if one is first else "", text, width)
    yield _paragraph("why", first.why, width)
    yield _paragraph("remedy", first.remedy, width)


def _paragraph(name: str, text: str, width: int) -> str:
    return textwrap.fill(
        _visible(text),
        width,
        initial_indent=f"  {name:<8}",
        subsequent_indent=_INDENT,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _since(finding: Finding) -> str:
    remarks = [f"for {_span(finding.since_s)}"] if finding.since_s else []
    if finding.finding_in_s is not UNSET:
        remarks.append(f"a problem if it lasts {_span(math.ceil(finding.finding_in_s))} longer")
    return f" ({', '.join(remarks)})" if remarks else ""


def _visible(text: str) -> str:
    """Escape what a terminal would interpret or hide: names and endpoints come from clients."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _about(subject: Subject) -> str:
    parts = []
    for field, name in _NAMES:
        value = getattr(subject, field)
        if value is not UNSET:
            parts.append(f"{name} {value}".strip())
    return ", ".join(parts)


def _span(seconds: float) -> str:
    if seconds < _MINUTE_S:
        return f"{seconds:.0f} s"
    if seconds < _HOUR_S:
        return f"{seconds / _MINUTE_S:.0f} min"
    return f"{seconds / _HOUR_S:.1f} h"
