"""Log records name the request, and its trace, that they are about."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import threading
from typing import Any

from select_service.edge import logs
from select_service.edge.tracing.spans import HERE
from tests.live.collector import Collector
from tests.select_service.edge.serving import PROMPT
from tests.select_service.edge.tracing.test_tracing import TRACE, TRACEPARENT
from tests.select_service.edge.tracing.traced import traced


async def test_a_crash_is_logged_with_its_trace(collector: Collector, monkeypatch: Any) -> None:
    async def fail(*_: object) -> None:
        await asyncio.sleep(0)
        raise ZeroDivisionError

    said: list[tuple[str, object]] = []
    log = logging.getLogger("select_service.http")
    monkeypatch.setattr(
        log, "error", lambda message, **_: said.append((message, dict(HERE.get() or {})))
    )
    async with traced() as (wire, service):
        monkeypatch.setattr(service, "load_scopes", lambda *_: 1 / 0)
        assert await wire.status("GET", "/loads", None, TRACEPARENT) == 500
        monkeypatch.setattr(service, "clear_lease", fail)
        monkeypatch.setattr(service, "close_lease_now", lambda *_: object())
        assert await wire.status("DELETE", "/leases/x", None, TRACEPARENT) == 500
        assert HERE.get() is None
    assert [
        ("request failed", {"trace_id": TRACE, "span_id": span.span_id})
        for span in collector.servers()
    ] == said
    assert [span.failed for span in collector.servers()] == [True, True]


async def test_log_records_name_the_request(collector: Collector) -> None:
    stream = io.StringIO()
    root, access = logging.getLogger(), logging.getLogger("select_service.access")
    handlers, level = root.handlers[:], root.level
    logs.configure("json", "debug", access_log=True, stream=stream, ids=HERE.get)
    try:
        async with traced(access_log=True) as (wire, _):
            body = {**PROMPT, "selection_id": "s1", "reservation_id": "r1"}
            await wire.status("POST", "/select_and_reserve", body, TRACEPARENT)
            await wire.status("DELETE", "/reservations/r1", None, TRACEPARENT.replace("-01", "-00"))
            await wire.status("POST", "/select", PROMPT)
    finally:
        root.handlers[:], root.level = handlers, level
        access.disabled = False
        for name in logs._LIBRARIES:
            logging.getLogger(name).setLevel(logging.NOTSET)
    records = [json.loads(line) for line in stream.getvalue().splitlines()]
    booked, freed, selected = [one for one in records if one["event"] == "request"]
    chosen, _ = [one for one in records if one["event"] == "Selected worker"]
    span, other = collector.servers()
    ids = {"trace_id": TRACE, "span_id": span.span_id}
    names = {"selection_id": "s1", "reservation_id": "r1"}
    assert booked.items() >= (ids | names).items()
    assert chosen.items() >= (ids | names).items()
    assert (freed["trace_id"], freed["reservation_id"], "span_id" in freed) == (TRACE, "r1", False)
    assert (selected["trace_id"], selected["span_id"]) == (other.trace_id, other.span_id)


async def test_what_threads_log_is_about_no_request(collector: Collector) -> None:
    seen: list[object] = []
    async with traced():
        HERE.ids = {"trace_id": TRACE}
        try:
            thread = threading.Thread(target=lambda: seen.append(HERE.get()))
            thread.start()
            thread.join()
            seen.append(HERE.get())
        finally:
            HERE.ids = None
    assert seen == [None, {"trace_id": TRACE}]
