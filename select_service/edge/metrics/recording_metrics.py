"""Metrics of the recording, read from counters at scrape time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.metrics_core import Metric
from typing_extensions import override

from select_service.edge.metrics.families import Collector, counter, counters, gauge

if TYPE_CHECKING:
    from collections.abc import Iterator

    from select_service.edge.driver.driver import Driver

__all__ = ["RecordingMetrics"]


class RecordingMetrics(Collector):
    """Families of a service that records nothing stay empty."""

    def __init__(self, service: Driver) -> None:
        self._service = service

    @override
    def collect(self) -> Iterator[Metric]:
        recording = self._service.recording
        yield counters(
            "recording_notes",
            "Notes for the recording: written, or left out because the queue or the disk was full,"
            " or by a fault.",
            "outcome",
            {} if recording is None else recording.notes,
        )
        amounts = [
            (counter(f"recording_{name}", text), attribute)
            for name, text, attribute in (
                ("bytes", "Bytes written to the recording, compressed.", "bytes_written"),
                ("raw_bytes", "Bytes written to the recording, before compression.", "raw_bytes"),
                ("files", "Files begun.", "files"),
                ("failures", "Writes that failed.", "failures"),
            )
        ]
        queue = gauge("recording_queue_bytes", "What waits to be written, about.")
        refused = gauge("recording_refused", "1 while the disk refuses what is recorded.")
        if recording is not None:
            for family, attribute in amounts:
                family.add_metric((), getattr(recording, attribute))
            queue.add_metric((), recording.queue_bytes)
            refused.add_metric((), int(recording.is_refused))
        yield from (*(family for family, _ in amounts), queue, refused)
