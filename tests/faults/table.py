"""What the fault suite has measured, one line per fault, printed at the end of a run of pytest."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tests.faults.probe import Health
from tests.faults.vitals import Vitals
from tests.tables import FAULTS, Record


@dataclass
class Line:
    """One fault."""

    name: str
    lasted_s: float = 0.0
    health: Health | None = None
    before: Vitals | None = None
    after: Vitals | None = None
    statuses: Counter[int] = field(default_factory=Counter)
    note: str = ""

    def write(self, record: Record) -> None:
        """Hand it to pytest's `record_property`."""
        FAULTS.add(record, self)

    def __str__(self) -> str:
        text = f"{self.name[:36]:<36} {self.lasted_s:4.1f}"
        if (health := self.health) is not None:
            text += f" {health.asked:5} {health.failed:4} {health.p50_ms:5.1f} {health.p99_ms:5.1f}"
            text += f" {health.max_ms:6.0f} {health.overslept_p99_ms:5.1f} "
        if self.before is not None and self.after is not None:
            text += (
                f"  {self.before.rss_mb:9.0f} {self.after.peak_mb:6.0f} {self.after.rss_mb:6.0f}"
            )
            text += f" {self.before.fds}-{self.after.fds} "
        counts = " ".join(f"{status}:{count}" for status, count in sorted(self.statuses.items()))
        return f"{text} {counts} {self.note}".rstrip()
