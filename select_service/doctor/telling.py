"""Findings as text for people: plain, wrapped, the gravest first."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Final

from msgspec import UNSET

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from select_service.doctor.asking import Answer
    from select_service.doctor_types import Finding, Subject

__all__ = ["tell"]

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
)


def tell(who: str, answer: Answer, findings: Sequence[Finding], width: int) -> str:
    """Return the whole report, of lines about so wide."""
    return "\n".join(_lines(who, answer, findings, width)) + "\n"


def _lines(who: str, answer: Answer, findings: Sequence[Finding], width: int) -> Iterator[str]:
    state = "ready" if answer.ready else f"not ready, waits for {', '.join(answer.waiting_for)}"
    workers = f"{answer.schedulable_workers} of {len(answer.workers)} workers schedulable"
    yield f"{who}: {state}; {workers}"
    if not findings:
        yield "nothing found"
    for finding in findings:
        yield ""
        yield f"{finding.severity.upper():<8}{finding.code}  {_about(finding.subject)}".rstrip()
        since = f" (for {_span(finding.since_s)})" if finding.since_s else ""
        for name, text in (
            ("what", finding.what + since),
            ("why", finding.why),
            ("remedy", finding.remedy),
        ):
            yield textwrap.fill(
                text,
                max(width, 40),
                initial_indent=f"  {name:<8}",
                subsequent_indent=_INDENT,
                break_on_hyphens=False,
                break_long_words=False,
            )
    if answer.findings_left_out:
        yield f"\nand {answer.findings_left_out} more (--doctor-findings-max)"


def _about(subject: Subject) -> str:
    said = []
    for field, name in _NAMES:
        value = getattr(subject, field)
        if value is not UNSET:
            said.append(f"{name} {value}".strip())
    return ", ".join(said)


def _span(seconds: float) -> str:
    if seconds < _MINUTE_S:
        return f"{seconds:.0f} s"
    if seconds < _HOUR_S:
        return f"{seconds / _MINUTE_S:.0f} min"
    return f"{seconds / _HOUR_S:.1f} h"
