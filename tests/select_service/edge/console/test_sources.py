"""What is long is written in slices."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from select_service.edge import cooperative
from select_service.edge.console import sources

FINDINGS = [{"code": "events-refused", "worker_id": number} for number in range(40)]


async def test_findings_let_others_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred of them held the loop for 4 ms."""
    monkeypatch.setattr(cooperative, "SLICE_S", 0.0)

    async def report() -> Any:
        return SimpleNamespace(findings=FINDINGS, left_out=3, suspected=FINDINGS[:2])

    service: Any = SimpleNamespace(doctor=lambda: SimpleNamespace(report=report))
    asking = asyncio.ensure_future(sources.findings(service))
    turns = 0
    while not asking.done():
        turns += 1
        await asyncio.sleep(0)
    findings = json.loads(await asking)
    assert (findings["available"], findings["why"], findings["left_out"]) == (True, None, 3)
    assert [one["worker_id"] for one in findings["findings"]] == [str(n) for n in range(40)]
    assert [one["worker_id"] for one in findings["suspected"]] == ["0", "1"]
    assert turns >= len(FINDINGS)
