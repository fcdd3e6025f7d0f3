"""What /metrics says of the recording, read from counters at scrape time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Iterator

    from select_service.edge.driver import Driver

__all__ = ["RecordingMetrics"]


class RecordingMetrics(Collector):
    """Families of a service that records nothing stay empty."""

    def __init__(self, service: Driver, prefix: str) -> None:
        self._service = service
        self._prefix = prefix + "recording_"

    @override
    def collect(self) -> Iterator[Metric]:
        notes = CounterMetricFamily(
            self._prefix + "notes",
            "Notes for the recording: written, or left out because the queue or the disk was full,"
            " or by a fault.",
            labels=("outcome",),
        )
        counters = [
            (CounterMetricFamily(self._prefix + name, text, labels=()), attribute)
            for name, text, attribute in (
                ("bytes", "Written to files, compressed.", "bytes_written"),
                ("raw_bytes", "The same before compression.", "raw_bytes"),
                ("files", "Files begun.", "files"),
                ("failures", "Writes that failed.", "failures"),
            )
        ]
        queue = GaugeMetricFamily(
            self._prefix + "queue_bytes", "What waits to be written, about.", labels=()
        )
        refused = GaugeMetricFamily(
            self._prefix + "refused", "1 while the disk refuses what is recorded.", labels=()
        )
        recording = self._service.recording
        if recording is not None:
            for outcome, count in recording.notes.items():
                notes.add_metric([outcome], count)
            for family, attribute in counters:
                family.add_metric((), getattr(recording, attribute))
            queue.add_metric((), recording.queue_bytes)
            refused.add_metric((), int(recording.is_refused))
        yield from (notes, *(family for family, _ in counters), queue, refused)
