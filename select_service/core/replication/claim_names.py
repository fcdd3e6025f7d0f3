"""The other names of other replicas' claims: their selection_id, and the pair they are a leg of.

Bookings are found by these names in `reservation_ids.py`; claims that cannot be booked here, as
their worker is absent, are found by them here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from select_service.core.replication.claim import Claim


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
