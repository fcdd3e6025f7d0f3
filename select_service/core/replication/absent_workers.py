"""Claims whose worker is not here: they are booked when it comes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from indexer.types import Scope
    from select_service.core.replication.claim import Claim


class AbsentWorkers:
    """The claims that wait, by worker."""

    def __init__(self) -> None:
        self._claims: dict[tuple[Scope, int], dict[Claim, None]] = {}

    def __iter__(self) -> Iterator[Claim]:
        return (claim for some in self._claims.values() for claim in some)

    def add(self, claim: Claim) -> None:
        """Let a claim wait for its worker, until `came` or until it is removed. O(1)."""
        where = claim.scope, claim.record.worker_id
        self._claims.setdefault(where, {})[claim] = None

    def came(self, scope: Scope, worker_id: int) -> list[str]:
        """Return the ids of the claims that waited for this worker; they wait no more."""
        return [claim.reservation_id for claim in self._claims.pop((scope, worker_id), ())]

    def remove(self, claim: Claim) -> None:
        """Remove a claim; idempotent. O(1)."""
        where = claim.scope, claim.record.worker_id
        waiting = self._claims.get(where)
        if waiting is not None:
            waiting.pop(claim, None)
            if not waiting:
                del self._claims[where]

    def check(self) -> None:
        """Assert all invariants."""
        assert all(self._claims.values()), "nobody waits for nothing"
