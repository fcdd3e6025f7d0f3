"""What is remembered of claims under a lease is shared by the publishers that sent them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from select_service.core.ledger.claim_owners import ClaimOwners

MOST = 12


def remembered(owners: ClaimOwners, publisher: int) -> int:
    """How much of what a publisher sent (owners of its own thousand) is remembered."""
    return sum(owner // 1000 == publisher for owner, _ in owners.items())


def send(
    owners: ClaimOwners, publisher: int, count: int, gone: frozenset[int] = frozenset()
) -> None:
    keys = [(publisher * 1000 + one, 1 + one) for one in range(count)]
    owners.note(publisher, keys, MOST, gone.__contains__)


def test_publishers_that_left_have_one_share_together() -> None:
    owners = ClaimOwners()
    for publisher in (1, 2, 3):
        send(owners, publisher, 4)
    gone = frozenset({1, 2, 3})
    send(owners, 4, 100, gone)
    assert remembered(owners, 4) == MOST // 2, "three that left kept three quarters of it"
    assert [remembered(owners, one) for one in (1, 2, 3)] == [2, 2, 2]


def test_what_those_that_left_told_is_not_pushed_out_by_another() -> None:
    owners = ClaimOwners()
    send(owners, 1, 3)
    send(owners, 4, 1000, frozenset({1}))
    assert remembered(owners, 1) == 3
    assert remembered(owners, 4) == MOST - 3


def test_of_those_that_left_whoever_told_most_loses_the_oldest() -> None:
    owners = ClaimOwners()
    send(owners, 1, 11)
    send(owners, 2, 1)
    send(owners, 3, 6, frozenset({1, 2}))
    assert [remembered(owners, one) for one in (1, 2, 3)] == [5, 1, 6]
    assert (1000, 1) not in owners.items()
    assert (1010, 11) in owners.items()


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 30)), max_size=60),
    st.frozensets(st.integers(1, 5)),
)
def test_it_is_never_more_and_who_has_less_than_its_share_keeps_it(
    steps: list[tuple[int, int]], gone: frozenset[int]
) -> None:
    owners = ClaimOwners()
    for publisher, number in steps:
        before = {one: remembered(owners, one) for one in range(1, 6)}
        owners.note(publisher, [(publisher * 1000 + number, 1)], MOST, gone.__contains__)
        assert len(owners) == len(list(owners.items())) <= MOST
        parties = len(
            {0 if one in gone else one for one in (*(o for o in before if before[o]), publisher)}
        )
        for one, count in before.items():
            if one not in gone and count * parties <= MOST:
                assert remembered(owners, one) >= count, "it has no more than its share"
