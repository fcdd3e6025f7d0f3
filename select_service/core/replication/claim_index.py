"""Claims by keys that several of them may share, such as the worker that they wait for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from select_service.core.replication.claim import Claim

K = TypeVar("K")


class ClaimIndex(Generic[K]):
    """Claims by key, those of a key in the order added. All operations O(keys of the claim).

    `keys_of` must say the same for a claim until that is removed.
    """

    def __init__(self, keys_of: Callable[[Claim], Iterable[K]]) -> None:
        self.by_key: dict[K, dict[Claim, None]] = {}
        self._keys_of = keys_of

    def __iter__(self) -> Iterator[Claim]:
        """Yield the claims, once for each of their keys."""
        return (claim for some in self.by_key.values() for claim in some)

    def at(self, key: K) -> list[Claim]:
        """Return the claims with this key, oldest first."""
        return [*self.by_key.get(key, ())]

    def add(self, claim: Claim) -> None:
        """Add a claim under all its keys."""
        for key in self._keys_of(claim):
            self.by_key.setdefault(key, {})[claim] = None

    def remove(self, claim: Claim) -> None:
        """Remove a claim; idempotent."""
        for key in self._keys_of(claim):
            claims = self.by_key.get(key)
            if claims is not None:
                claims.pop(claim, None)
                if not claims:
                    del self.by_key[key]

    def check(self) -> None:
        """Assert all invariants."""
        assert all(self.by_key.values()), "a key ends with its last claim"
        for key, claims in self.by_key.items():
            assert all(key in self._keys_of(claim) for claim in claims)
