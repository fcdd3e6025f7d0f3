"""What each tenant may hold of a bound that all tenants have in common.

A tenant of the token file is promised a part of every such bound: `--tenant-share` of the bound,
divided by the number of those tenants. No other can use it up. The rest of the bound is for
the first to come, and so is what exceeds a tenant's part. All that is not such a tenant's counts
as one more, "the others", where unbound tokens may book or register.

With p promised to each of n, and `used` by each, a bound of M has room for one more of a tenant if
it holds less than its part, or if

    n * p + sum(max(0, used - p)) < M

so that a single tenant may use all that is not promised to others, and everything where no token is
bound. What was restored from disk, or allowed before a change of settings, counts and is not taken
away; what is promised is given even then, so that a bound may be exceeded by the promised parts.
All operations are O(1), except after a change of tenants or limits: O(tenants that hold something).
"""

from __future__ import annotations

from collections import Counter
from hashlib import sha256
from typing import TYPE_CHECKING, Final, TypeAlias

from select_service.errors import Crowded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from select_service.types import CoreLimits

Party: TypeAlias = str | None
"""A tenant of the token file; None: the others."""

_PREFIX_MAX: Final = 32
"""Characters of the tenant's name before its ids; of its hash, if it is longer: 128 bits."""

_PLAIN: Final = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-~")
"""The bytes of a name that stay as they are; others are quoted as in an address: `%20`."""

_COLON: Final = ":"


def prefix_of(tenant: str) -> str:
    """Return the prefix of a tenant's kept ids; prefixes of two tenants cannot be confused.

    A long name (quoting may take twelve characters per letter) would leave no room for ids: its
    hash is used instead, after a mark that quoting never produces.
    """
    text = tenant.encode()
    quoted = "".join([chr(byte) if byte in _PLAIN else f"%{byte:02X}" for byte in text])
    if len(quoted) > _PREFIX_MAX:
        quoted = "%%" + sha256(text).hexdigest()[:_PREFIX_MAX]
    return quoted + _COLON


def prefix_in(name: str) -> str:
    """Return the part of an id that may be a tenant's prefix; "": it has none."""
    return name[: name.find(_COLON) + 1]


class Shares:
    """The tenants that have a part of every bound, and the bounds.

    Attributes:
        bounds: by the name of their setting.
        parties: all to which a part is promised.
        by_tenant: a tenant of the token file, by its name.
        by_prefix: the same, by the prefix of the ids that are kept for it.
    """

    def __init__(self, limits: CoreLimits | None = None) -> None:
        """Promise nothing yet; `limits.tenant_share` is read each time."""
        self._limits = limits
        self.by_tenant: Mapping[Party, str] = {}
        self.by_prefix: Mapping[Party, str] = {}
        self.parties: Mapping[Party, None] = {}
        self.bounds: dict[str, Bound] = {}

    @property
    def share(self) -> float:
        """Share of every bound that is promised."""
        return 0.0 if self._limits is None else self._limits.tenant_share

    def bound(self, name: str, most: Callable[[], int], *, by_prefix: bool = False) -> Bound:
        """Create the account of a bound.

        `most` returns what all may hold together. `by_prefix`: holders are named by the
        prefix of their ids, not as tenants.
        """
        self.bounds[name] = made = Bound(self, name, most, by_prefix=by_prefix)
        return made

    def name(self, tenants: Iterable[str], *, others: bool) -> None:
        """Promise parts to these tenants, instead of those before. O(all that hold something).

        `others`: callers of no such tenant may hold anything.
        """
        self.by_tenant = {tenant: tenant for tenant in tenants}
        self.by_prefix = {prefix_of(tenant): tenant for tenant in self.by_tenant.values()}
        parties: dict[Party, None] = dict.fromkeys(self.by_tenant)
        if others and parties:
            parties[None] = None
        self.parties = parties
        for bound in self.bounds.values():
            if parties and bound.on_named is not None:
                bound.on_named()
            bound.measure()

    def part(self, most: int) -> int:
        """Return what is promised to each, of a bound."""
        count, share = len(self.parties), self.share
        if not count or share <= 0.0:
            return 0
        return max(int(most * share) // count, 1 if count <= most else 0)


class Bound:
    """What each tenant holds of one bound.

    Attributes:
        name: of its setting.
        total: what all hold together.
        part: what is promised to each.
        promised: what is promised to all together.
        refused: how often there was no room, by party.
        on_named: called when tenants have parts, if what is held was not counted here before.
    """

    def __init__(
        self, shares: Shares, name: str, most: Callable[[], int], *, by_prefix: bool
    ) -> None:
        self._shares, self.name, self._most, self._by_prefix = shares, name, most, by_prefix
        self._held: dict[Party, int] = {}  # by holder, whether in the token file or not
        self._others = 0  # what those not in the token file hold together
        self._over = 0  # what exceeds anybody's part
        self._beyond: dict[Party, None] = {}  # those that hold more than their part
        self._measured = -1, 0.0  # the bound and the share that all this is for
        self.part = self.promised = self.total = 0
        self.refused: dict[Party, int] = {}
        self.on_named: Callable[[], None] | None = None

    def take(self, holder: Party, count: int = 1) -> None:
        """Note that a holder has so much more; whether it may was asked before."""
        held = self._held.get(holder, 0) + count
        if held:
            self._held[holder] = held
        else:
            self._held.pop(holder, None)
        self.total += count
        party = self._party(holder)
        if party is None:
            self._others = held = self._others + count
        part = self._part_of(party)
        self._over += max(0, held - part) - max(0, held - count - part)
        if held > part:
            self._beyond[party] = None
        else:
            self._beyond.pop(party, None)

    def give(self, holder: Party, count: int = 1) -> None:
        """Note that a holder has so much less."""
        self.take(holder, -count)

    def has_room(self, holder: Party, count: int = 1) -> bool:
        """Whether a holder may have so much more; a refusal is not counted."""
        most = self._look()
        if self.total + self.promised + count <= most:  # the usual case
            return True
        party = self._party(holder)
        held, part = self.held(party), self._part_of(party)
        if held + count <= part:
            return True
        too_many = not self.part and len(self._shares.parties) > 1  # for a part each
        if too_many and held + count > most - int(most * self._shares.share):
            return False
        more = max(0, held + count - part) - max(0, held - part)
        return self.promised + self._over + more <= most

    def may_move(self, source: Party, left: int, holder: Party, count: int) -> bool:
        """Whether a holder may have so much more once another, or itself, has so much less."""
        if self._party(source) == self._party(holder):
            return count <= left or self.has_room(holder, count - left)
        self.give(source, left)  # while we look: it makes room itself
        has_room = self.has_room(holder, count)
        self.take(source, left)
        return has_room

    def refuse(self, holder: Party) -> Crowded | None:
        """Count a refusal; return why, None where no tenant is promised anything."""
        party = self._party(holder)
        self.refused[party] = self.refused.get(party, 0) + 1
        if not self._shares.parties:
            return None
        most, held = self._look(), self.held(party)
        return Crowded(self.name, most, party, held, self._part_of(party), self._shares.share)

    def crowding(self, holder: Party) -> Party:
        """Return whose oldest entry makes room for one that was taken beyond the bound.

        A holder of more than its part makes room itself; for others, one that has more does.

        Returns:
            The holder's name as it takes; None: those not in the token file.
        """
        self._look()
        party = self._party(holder)
        found = party if party in self._beyond else next(iter(self._beyond), party)
        return prefix_of(found) if self._by_prefix and found is not None else found

    def is_beyond(self, holder: Party) -> bool:
        """Whether the holder has more than is kept for it: only then may it have to give way."""
        self._look()
        return self._party(holder) in self._beyond

    def names(self, holder: Party) -> bool:
        """Whether the holder is a tenant of the token file."""
        return self._party(holder) is not None

    def recount(self, held: Mapping[Party, int]) -> None:
        """Start anew with what each holder has now."""
        self._held = {holder: count for holder, count in held.items() if count}
        self.measure()

    # -- reading -------------------------------------------------------------------------------

    @property
    def most(self) -> int:
        """What all may hold together."""
        return self._most()

    @property
    def kept(self) -> int:
        """What is promised to each, as the bound is now."""
        self._look()
        return self.part

    def held(self, party: Party) -> int:
        """Return what a party holds."""
        if party is None:
            return self._others
        return self._held.get(prefix_of(party) if self._by_prefix else party, 0)

    def rows(self) -> Iterator[tuple[Party, int]]:
        """Yield what each party holds. O(parties)."""
        return ((party, self.held(party)) for party in self._shares.parties)

    def _party(self, holder: Party) -> Party:
        shares = self._shares
        return (shares.by_prefix if self._by_prefix else shares.by_tenant).get(holder)

    def _part_of(self, party: Party) -> int:
        return self.part if party in self._shares.parties else 0

    def _look(self) -> int:
        """Return what all may hold; measure anew if that or the share has changed."""
        most = self._most()
        if self._measured != (most, self._shares.share):
            self.measure()
        return most

    def measure(self) -> None:
        """Add up anew, because the tenants or the bound have changed. O(holders)."""
        most, parties = self._most(), self._shares.parties
        self._measured = most, self._shares.share
        self.part = self._shares.part(most)
        self.promised = self.part * len(parties)
        self.total = sum(self._held.values())
        each: dict[Party, int] = {None: 0}
        for holder, count in self._held.items():
            party = self._party(holder)
            each[party] = each.get(party, 0) + count
        self._others = each[None]
        over = {party: max(0, count - self._part_of(party)) for party, count in each.items()}
        self._over = sum(over.values())
        self._beyond = {party: None for party, count in over.items() if count}

    def check(self, holders: Iterable[Party] | None = None) -> None:
        """Assert all invariants.

        Without `holders`, one of each thing that is held, they are not recounted.
        """
        if holders is not None:
            assert self._held == Counter(holders), "what each holds is what there is"
        self._look()
        before = self.total, self._others, self._over, set(self._beyond)
        self.measure()
        assert before == (self.total, self._others, self._over, set(self._beyond))
        assert all(count > 0 for count in self._held.values())
