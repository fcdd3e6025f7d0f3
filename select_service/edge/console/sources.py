"""Decisions and findings, which other parts of the service keep, for the console.

Rendered in slices, in the browser's format; a feature that is off says so, and why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
from msgspec import UNSET

from select_service.edge.console.browser import for_browser, for_browser_rows
from select_service.edge.cooperative import TimeSlices
from select_service.edge.decision_report import Wanted
from select_service.errors import DecisionsOff

if TYPE_CHECKING:
    from select_service.edge.driver.driver import Driver
    from select_service.types.decisions import Decision


async def decisions(service: Driver, wanted: Wanted) -> bytes:
    """Return the newest decisions, with the fields that a list shows."""
    try:
        records = await service.decision_reports.matching(wanted)
    except DecisionsOff as off:
        return orjson.dumps({"available": False, "why": str(off), "decisions": []})
    rows = [_row(one) async for one in service.decision_reports.each(records, candidates=False)]
    return orjson.dumps({"available": True, "why": None, "decisions": rows})


def _row(one: Decision) -> dict[str, Any]:
    row: dict[str, Any] = for_browser(
        {
            "decision_id": one.decision_id,
            "route": one.route,
            "at_ms": one.at_ms,
            "model_name": one.model_name,
            "tenant_id": one.tenant_id,
            "outcome": one.outcome,
            "refusal": one.refusal,
            "chosen": one.chosen,
        }
    )
    return row


async def decision(service: Driver, name: str) -> bytes:
    """Return one decision by the id of its selection or reservation.

    Raises:
        DecisionsOff: no decisions are kept.
        DecisionNotFound: none has this id.
    """
    shown = await service.decision_reports.report(service.decision_reports.find(name))
    candidates = [] if shown.candidates is UNSET else shown.candidates
    shown.candidates = UNSET
    rows = await for_browser_rows(candidates, TimeSlices())
    head = orjson.dumps(for_browser(shown))
    return head[:-1] + b',"candidates":' + rows + b"}"


async def findings(service: Driver) -> bytes:
    """Return the doctor's findings, and what becomes one if it lasts."""
    report = await service.doctor().report()
    members = {"available": True, "why": None, "left_out": report.left_out}
    slices = TimeSlices()
    rows = await for_browser_rows(report.findings, slices)
    suspected = await for_browser_rows(report.suspected, slices)
    head = orjson.dumps(members)[:-1]
    return b"".join((head, b',"findings":', rows, b',"suspected":', suspected, b"}"))
