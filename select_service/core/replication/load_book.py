"""What the replica plane needs of the stores of reports that it tells and hears; shapes only.

Workers' load reports are kept in `core/admission/load_reports.py`, engines' reports of cached
tokens in `core/decisions/cached_tokens.py`, sessions in `core/reservations/sessions.py`, all above
the replica plane.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    from select_service.core.partition import Partition
    from select_service.core.replication.messages import RankLoad, SessionRank


class LoadBook(Protocol):
    """Load reports, received here or by replicas."""

    touched: dict[Partition, None]
    """Partitions that replicas' reports may have relieved."""

    def take_unsent(self, now: float, limit: int) -> list[RankLoad]:
        """Take up to `limit` reports received here that were not sent to the replicas."""
        ...

    def queue_all(self) -> None:
        """Queue for the replicas every report received here that still counts."""
        ...

    def apply(self, load: RankLoad, now: float) -> None:
        """Store what a worker reported to a replica."""
        ...


class CachedTokensBook(Protocol):
    """Reports of cached tokens, received here or by replicas."""

    def take_unsent(self, limit: int) -> list[tuple[str, int]]:
        """Take up to `limit` reports to be sent to the replicas: (id, cached tokens)."""
        ...

    def apply(self, name: str, cached_tokens: int, now: float) -> None:
        """Apply a report that a caller made at a replica, if it concerns us."""
        ...


class SessionBook(Protocol):
    """The ranks of sessions, chosen here or by replicas."""

    def take_unsent(self, limit: int) -> list[SessionRank]:
        """Take up to `limit` sessions to be sent to the replicas."""
        ...

    def apply(
        self,
        partition: Partition,
        session_id: str,
        slot: int,
        now: float,
        *,
        version: int,
        sender: int,
        is_new: bool,
    ) -> bool:
        """Note where a replica sent a request of a session; False: a later rank is known here."""
        ...

    def queue(self, partition: Partition, session_id: str) -> None:
        """Queue a session's rank for the replicas: one of them knows an earlier one."""
        ...

    def queue_all(self, alive: Container[int], now: float) -> Iterator[None]:
        """Queue, for a replica that starts, sessions that no other one of `alive` sends."""
        ...
