"""Tables at the end of a run of pytest, of what suites have measured.

Rows travel with the reports of their tests, so that runners side by side give one table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

Record = Callable[[str, object], None]
"""pytest's `record_property`."""


@dataclass(frozen=True)
class Table:
    """One suite's table."""

    property: str
    title: str
    headings: str

    def add(self, record: Record, row: object) -> None:
        """Add a row, one line of text, to the report of the test that runs."""
        record(self.property, msgspec.json.encode(str(row)).decode())

    def rows(self, properties: Iterable[tuple[str, object]]) -> list[str]:
        """The rows among a report's properties."""
        return [msgspec.json.decode(str(row)) for name, row in properties if name == self.property]


FAULTS = Table(
    "fault",
    "faults: /health in milliseconds, seen from outside",
    "fault                                  s  asked fail  p50   p99   max  slept"
    "   MB: before  peak  after  fds  statuses",
)
ENGINES = Table(
    "engine",
    "engines: requests whose cached tokens were foretold",
    f"{'model':<10} {'what':<28} {'engines':<36} asked  equal much      by  few      by  why",
)
TABLES = (FAULTS, ENGINES)
