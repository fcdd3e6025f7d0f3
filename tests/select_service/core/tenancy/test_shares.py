"""Parts of bounds: against a model that adds everything up each time."""

from __future__ import annotations

from collections import OrderedDict
from urllib.parse import quote

from hypothesis import given, settings
from hypothesis import strategies as st

from select_service.core.tenancy.shares import Shares, prefix_in, prefix_of
from select_service.core.tenancy.tenant_parts import TenantParts
from select_service.types import CoreLimits

NAMES = ("acme", "rival", "third", "")
HOLDERS = st.sampled_from((*NAMES, "stranger", None))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.tuples(HOLDERS, st.integers(1, 4))),
        st.tuples(st.just("force"), st.tuples(HOLDERS, st.integers(1, 4))),
        st.tuples(st.just("give"), HOLDERS),
        st.tuples(st.just("most"), st.integers(0, 12)),
        st.tuples(st.just("share"), st.sampled_from((0.0, 0.3, 0.5, 1.0))),
        st.tuples(st.just("name"), st.tuples(st.sets(st.sampled_from(NAMES)), st.booleans())),
    ),
    max_size=40,
)


class Model:
    """The rule of the module's docstring, added up each time."""

    def __init__(self) -> None:
        self.held: dict[str | None, int] = {}
        self.most, self.share = 8, 0.5
        self.tenants: set[str] = set()
        self.others = False

    def party(self, holder: str | None) -> str | None:
        return holder if holder in self.tenants else None

    def parts(self) -> dict[str | None, int]:
        parties: list[str | None] = list(self.tenants)
        parties += [None] if parties and self.others else []
        if not parties or not self.share:
            return {}
        part = int(self.most * self.share) // len(parties)
        return dict.fromkeys(parties, max(part, 1 if len(parties) <= self.most else 0))

    def used(self) -> dict[str | None, int]:
        sums: dict[str | None, int] = {None: 0}
        for holder, count in self.held.items():
            party = self.party(holder)
            sums[party] = sums.get(party, 0) + count
        return sums

    def has_room(self, holder: str | None, count: int) -> bool:
        party, parts, used = self.party(holder), self.parts(), self.used()
        used[party] = used.get(party, 0) + count
        part = parts.get(party, 0)
        reserved = sum(parts.values())
        if used[party] <= part:
            return True
        over = sum(max(0, one - parts.get(who, 0)) for who, one in used.items())
        if not any(parts.values()) and len(parts) > 1:
            if sum(used.values()) > self.most:
                return False
            fits = used[party] <= self.most - int(self.most * self.share)
            return fits or sum(used.values()) + reserved <= self.most
        return reserved + over <= self.most


@given(STEPS)
@settings(max_examples=400)
def test_who_may_hold_more_is_as_in_the_model(steps: list[tuple[str, object]]) -> None:
    limits, model = CoreLimits(), Model()
    shares = Shares(limits)
    bounds = {
        False: shares.bound("leases_max", lambda: model.most),
        True: shares.bound("freed_ids_max", lambda: model.most, by_prefix=True),
    }
    for kind, value in steps:
        if kind in {"take", "force"}:
            assert isinstance(value, tuple)
            holder, count = value
            allowed = False
            for by_prefix, bound in bounds.items():
                name = prefix_of(holder) if by_prefix and holder is not None else holder
                allowed = bound.has_room(name, count)
                assert allowed == model.has_room(holder, count)
                if allowed or kind == "force":
                    bound.take(name, count)
            if allowed or kind == "force":
                model.held[holder] = model.held.get(holder, 0) + count
        elif kind == "give":
            assert value is None or isinstance(value, str)
            if model.held.get(value):
                model.held[value] -= 1
                bounds[False].give(value)
                bounds[True].give(None if value is None else prefix_of(value))
        elif kind == "name":
            assert isinstance(value, tuple)
            model.tenants, model.others = value
            shares.name(sorted(model.tenants), others=model.others)
        else:
            setattr(model, kind, value)
            limits.tenant_share = model.share
        for bound in bounds.values():
            bound.check()
            used = model.used()
            assert bound.total == sum(used.values())
            assert dict(bound.rows()) == {who: used.get(who, 0) for who in model.parts()} or (
                not model.share
            )


@given(
    st.integers(1, 40),
    st.integers(1, 6),
    st.sampled_from((0.1, 0.5, 1.0)),
    st.booleans(),
    st.lists(st.integers(0, 6), max_size=120),
)
def test_nobody_can_use_up_what_is_kept_for_another(
    most: int, count: int, share: float, others: bool, asking: list[int]
) -> None:
    shares = Shares(CoreLimits(tenant_share=share))
    shares.name([str(one) for one in range(count)], others=others)
    bound = shares.bound("leases_max", lambda: most)
    for who in asking:
        if bound.has_room(str(who)):
            bound.take(str(who))
        assert bound.total <= most
    part = bound.part
    for party, held in list(bound.rows()):
        for _ in range(part - held):
            assert bound.has_room(party)
            bound.take(party)
    assert bound.total <= most
    bound.check()


def test_one_tenant_alone_has_everything() -> None:
    shares = Shares(CoreLimits())
    bound = shares.bound("leases_max", lambda: 7)
    for tenants in ((), ("acme",)):
        shares.name(tenants, others=False)
        for _ in range(7):
            assert bound.has_room("acme")
            bound.take("acme")
        assert not bound.has_room("acme")
        bound.give("acme", 7)


def test_what_was_restored_takes_nothing_from_others() -> None:
    """More than may be, from before a change of settings: others still get their part."""
    shares = Shares(CoreLimits())
    bound = shares.bound("leases_max", lambda: 8)
    bound.take("acme", 8)
    shares.name(("acme", "rival"), others=False)
    assert not bound.has_room("acme")
    assert [bound.has_room("rival", count) for count in (1, 2, 3)] == [True, True, False]
    refusal = bound.refuse("acme")
    assert refusal is not None
    assert refusal.details == {"limit": "leases_max", "held": 8, "share": 2, "tenant_id": "acme"}
    assert "--leases-max" in refusal.text
    assert "--tenant-share 0.5" in refusal.text
    assert bound.refused == {"acme": 1}


@given(
    st.lists(st.tuples(st.sampled_from((None, "a:", "b:", "x:")), st.integers(0, 9)), max_size=80),
    st.integers(0, 8),
    st.booleans(),
)
def test_a_flood_makes_a_tenant_forget_its_own(
    puts: list[tuple[str | None, int]], most: int, others: bool
) -> None:
    """Against a list of all entries, oldest first."""
    shares = Shares(CoreLimits())
    bound = shares.bound("freed_ids_max", lambda: most, by_prefix=True)
    rows: TenantParts[OrderedDict[str, None]] = TenantParts(shares, bound, OrderedDict)
    shares.name(("a", "b"), others=others)
    kept: list[tuple[str | None, str]] = []
    for number, (prefix, _) in enumerate(puts):
        party = prefix if prefix in {"a:", "b:"} else None
        holder, row = rows.place(prefix)
        assert holder == party
        name = f"{prefix or ''}{number}"
        row[name] = None
        rows.took(holder)
        kept.append((party, name))
        crowded = rows.crowded(holder)
        assert (crowded is not None) == (len(kept) > most)
        if crowded is not None:
            whose, row = crowded
            part = bound.part if whose is not None or others else 0
            held = [one for who, one in kept if who == whose]
            assert len(held) > part, "nobody loses what is kept for it"
            mine = [one for who, one in kept if who == holder]
            if len(mine) > (bound.part if holder is not None or others else 0):
                assert whose == holder, "who floods forgets its own"
            gone, _ = row.popitem(last=False)
            assert gone == held[0]
            kept.remove((whose, gone))
            rows.left(whose)
        rows.check()
        assert {one for row in rows.rows for one in row} == {one for _, one in kept}


def test_a_row_outlives_the_name_in_the_token_file() -> None:
    shares = Shares(CoreLimits())
    bound = shares.bound("freed_ids_max", lambda: 4, by_prefix=True)
    rows: TenantParts[OrderedDict[str, None]] = TenantParts(shares, bound, OrderedDict)
    shares.name(("a", "b"), others=False)
    for name in ("a:1", "a:2", "b:1"):
        holder, row = rows.place(prefix_in(name))
        row[name] = None
        rows.took(holder)
    shares.name(("b",), others=False)
    rows.check()
    for number in range(2, 6):
        holder, row = rows.place("b:")
        row[f"b:{number}"] = None
        rows.took(holder)
        crowded = rows.crowded(holder)
        if crowded is not None:
            crowded[1].popitem(last=False)
            rows.left(crowded[0])
    assert len(rows) == 4
    assert [name for _, row in rows.where("a:") for name in row] == ["a:1", "a:2"]
    holder, row = rows.place("a:")
    assert holder is None
    row["a:3"] = None
    rows.took(None)
    crowded = rows.crowded(None)
    assert crowded is not None
    rows.check()


@given(st.text(max_size=12))
def test_a_prefix_is_the_name_as_in_an_address(tenant: str) -> None:
    """Ids on disk start with it."""
    quoted = quote(tenant, safe="")
    assert prefix_of(tenant) == quoted + ":" or len(quoted) > 32


def test_an_id_says_whose_it_is() -> None:
    shares = Shares(CoreLimits())
    assert not shares.by_prefix
    shares.name(("acme", "a b:c", "x" * 99), others=True)
    for tenant in ("acme", "a b:c", "x" * 99):
        assert shares.by_prefix.get(prefix_in(prefix_of(tenant) + "id:with:colons")) == tenant
    assert shares.by_prefix.get(prefix_in("other:x")) is None
    assert shares.by_prefix.get(prefix_in("acme")) is None
