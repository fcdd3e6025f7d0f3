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


class ClaimNames:
    """Claims by their other names, dead ones too."""

    def __init__(self) -> None:
        self.by_name: dict[str, dict[Claim, None]] = {}

    def add(self, claim: Claim) -> None:
        """Add a claim that an owner has stated. O(1)."""
        for name in (claim.record.selection_id, claim.record.pair):
            if name is not None:
                self.by_name.setdefault(name, {})[claim] = None

    def remove(self, claim: Claim) -> None:
        """Remove a claim; idempotent. O(1)."""
        for name in (claim.record.selection_id, claim.record.pair):
            named = None if name is None else self.by_name.get(name)
            if named is not None and name is not None:
                named.pop(claim, None)
                if not named:
                    del self.by_name[name]

    def legs(self, pair: str) -> list[Claim]:
        """Return the claims on the legs of a pair."""
        return [one for one in self.by_name.get(pair, ()) if one.record.pair == pair]

    def selected(self, selection_id: str) -> list[Claim]:
        """Return the claims made with a selection_id, oldest first."""
        named = self.by_name.get(selection_id, ())
        return [one for one in named if one.record.selection_id == selection_id]

    def check(self, claims: set[Claim]) -> None:
        """Assert all invariants, given all claims of others."""
        named = {claim for some in self.by_name.values() for claim in some}
        assert all(self.by_name.values()), "a name ends with its last claim"
        assert named == {
            one for one in claims if (one.record.selection_id, one.record.pair) != (None, None)
        }
