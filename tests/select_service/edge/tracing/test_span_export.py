"""The queue to the collector: bounded, counted, and never in anybody's way."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from select_service.edge.tracing.span_export import FinishedRequest, SpanExport

ONE = FinishedRequest("GET /x", 1, 2, None, 10**18, 5, 9, [("match", 6), ("pick", 7)], 200, b"", {})


def export(exporter: SpanExporter, queue_max: int = 100, batch_max: int = 10) -> SpanExport:
    return SpanExport(exporter, queue_max=queue_max, batch_max=batch_max, interval_s=60.0)


def test_what_waits_is_exported_at_the_end() -> None:
    memory = InMemorySpanExporter()
    queue = export(memory)
    for _ in range(5):
        queue.put(ONE)
    queue.close(10.0)
    queue.close(10.0)  # again does no harm
    spans = memory.get_finished_spans()
    assert [span.name for span in spans[:3]] == ["GET /x", "match", "pick"]
    assert [(span.start_time, span.end_time) for span in spans[:3]] == [
        (10**18, 10**18 + 4),
        (10**18 + 1, 10**18 + 2),
        (10**18 + 2, 10**18 + 4),
    ]
    assert (queue.exported, queue.dropped, queue.failed, queue.queued) == (15, 0, 0, 0)
    queue.put(ONE)
    assert queue.dropped == 3


class Broken(InMemorySpanExporter):
    """Fails in all the ways there are, then works."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.calls += 1
        if self.calls < 4:
            logging.getLogger("opentelemetry.exporter.some").error("why")
        if self.calls == 1:
            return SpanExportResult.FAILURE
        if self.calls == 2:
            raise OSError("no network")
        if self.calls == 3:
            return SpanExportResult.FAILURE
        return super().export(spans)


def test_failures_are_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    queue = export(Broken(), batch_max=3)
    for _ in range(5):
        queue.put(ONE)
    queue.close(10.0)
    assert (queue.exported, queue.failed) == (6, 9)
    ours = [one for one in caplog.records if ".otlp." not in one.name]
    assert [record.message for record in ours] == [  # an exporter of another test may yet give up
        "why",
        "spans cannot be exported",
        "spans are exported again",
    ]


def test_attributes_are_what_otlp_can_say() -> None:
    memory = InMemorySpanExporter()
    queue = export(memory)
    odd = {"big": 2**63, "small": -5, "long": "x" * 999, "odd": "\ud800", "true": True, "f": 0.5}
    body = b'{"error":"no","code":"c","gate":7}'
    for refusal in (b'{"error":"no","code":"c","gate":"g"}', body, b"\xff", b"{", b"\x81\xa1"):
        queue.put(ONE._replace(facts=odd, refusal=refusal, status=503, steps=[]))
    queue.close(10.0)
    first, *others = memory.get_finished_spans()
    assert first.attributes is not None
    assert first.attributes["big"] == str(2**63)
    assert first.attributes["odd"] == "?"
    assert len(str(first.attributes["long"])) == 257
    assert first.attributes["select.refusal.gate"] == "g"
    assert first.attributes["error.type"] == "c"
    assert [one.attributes["error.type"] for one in others if one.attributes] == ["503"] * 4
