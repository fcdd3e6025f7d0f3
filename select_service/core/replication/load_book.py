"""What the replica plane needs of the store of workers' load reports; shapes only.

Admission keeps them (`core/admission/load_reports.py`), and is above the replica plane.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from select_service.core.partition import Partition
    from select_service.core.replication.messages import RankLoad


class LoadBook(Protocol):
    """Load reports, received here or by replicas."""

    touched: dict[Partition, None]
    """Partitions that replicas' reports may have relieved."""

    def untold(self, now: float, limit: int) -> list[RankLoad]:
        """Take up to `limit` reports received here that replicas have not been told."""
        ...

    def tell_all(self) -> None:
        """Tell replicas every report received here that still counts."""
        ...

    def heard(self, load: RankLoad, now: float) -> None:
        """Store what a worker reported to a replica."""
        ...
