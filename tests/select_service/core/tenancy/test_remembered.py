"""Each memory of what has ended: one tenant's flood leaves what the others did."""

from __future__ import annotations

import pytest

from indexer.types import Scope
from select_service.core.fleet import pins
from select_service.core.fleet.pins import Pins
from select_service.core.ledger import expired_ids
from select_service.core.ledger.active_blocks import ActiveBlocks
from select_service.core.ledger.expired_ids import ExpiredIds
from select_service.core.ledger.reservation import LedgerReservation, SlotGeneration
from select_service.core.replication.claim import Claim
from select_service.core.replication.claims import Claims
from select_service.core.replication.messages import ClaimRecord
from select_service.core.replication.tombstones import Tombstones
from select_service.core.tenancy.shares import Shares, prefix_of
from select_service.types import CoreLimits, LeaseState

ACME, RIVAL = prefix_of("acme"), prefix_of("rival")


def shares_of(limits: CoreLimits | None = None) -> Shares:
    shares = Shares(limits or CoreLimits())
    shares.name(("acme", "rival"), others=True)
    return shares


def test_ends_of_claims() -> None:
    ends = Tombstones(12, shares_of())

    def end(name: str, born: int) -> None:
        ends.note(name, (1, born), float(born), by_owner=True, heir=None, freed=True)

    long = RIVAL + "x" * 99
    end(RIVAL + "r", 1)
    end(long, 2)
    for born in range(3, 60):
        end(f"{ACME}r{born}", born)
        ends.check()
    assert len(ends) == 12
    assert ends.was_freed(RIVAL + "r", (1, 1))
    assert ends.has(long, (1, 2))
    assert not ends.has(ACME + "r3", (1, 3))
    assert ends.has(ACME + "r59", (1, 59))
    assert {one.reservation_id for one in ends.retold()} >= {RIVAL + "r", long}
    ends.purge(50.0, 100)
    ends.check()
    assert not ends.has(RIVAL + "r", (1, 1))
    assert ends.has(ACME + "r59", (1, 59))


def test_ids_freed_here_before_their_claims_are_heard_of() -> None:
    limits = CoreLimits(replica_ended_max=12)
    endings = Claims(limits, 7, 1, shares_of(limits)).endings
    endings.note_freed(RIVAL + "r", 1.0)
    for number in range(40):
        endings.note_freed(f"{ACME}r{number}", 2.0)
    assert endings.kept_order(RIVAL + "r") == 1
    assert endings.kept_order(ACME + "r0") == 0
    assert endings.kept_order(ACME + "r39") == 41
    endings.note_freed(RIVAL + "r", 3.0)
    endings.check()
    assert endings.kept_order(RIVAL + "r") == 42


def test_closed_leases() -> None:
    limits = CoreLimits(ended_leases_max=12)
    endings = Claims(limits, 7, 1, shares_of(limits)).endings
    assert endings.note_closed(RIVAL + "l", {1: 5}, 1.0)
    for number in range(40):
        assert endings.note_closed(f"{ACME}l{number}", {1: number}, 2.0)
    assert endings.closings.find(RIVAL + "l") == {1: 5}
    assert endings.closings.find(ACME + "l0") is None
    assert endings.closings.find(ACME + "l39") == {1: 39}
    assert not endings.note_closed(RIVAL + "l", {1: 4}, 3.0)
    assert endings.note_closed(RIVAL + "l", {1: 4, 2: 1}, 3.0)
    endings.check()
    assert len(endings.closings) == 12
    assert sum(map(len, endings.closings.retold())) == 12
    endings.purge(2.5, 100)
    endings.check()
    assert list(map(len, endings.closings.retold())) == [1]


def test_copies_of_leases() -> None:
    """What replicas tell of acme's leases leaves room for those of others."""
    limits = CoreLimits(lease_copies_max=12)
    copies = Claims(limits, 7, 1, shares_of(limits)).copies
    joined: list[Claim] = []

    def join(name: str) -> bool:
        record = ClaimRecord(
            name, len(joined) + 1, "m", "default", 16, 1, 0, lease=LeaseState(name, "owner", 30.0)
        )  # fmt: skip
        claim = Claim(9, record)
        copies.join(claim, 1.0)
        if claim.lease is not None:
            joined.append(claim)
        return claim.lease is not None

    assert sum(join(f"{ACME}l{number}") for number in range(20)) == 12 - 2 * 2
    assert [join(f"{RIVAL}l{number}") for number in range(3)] == [True, True, False]
    copies.check(joined)
    copies.leave(joined.pop(0))
    assert join(f"{RIVAL}l9")
    copies.check(joined)


def test_pinned_block_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "PINS_MAX", 12)
    made = Pins(shares_of())
    made.put(Scope("m", "rival"), 16, is_eagle=False)
    for number in range(40):
        made.put(Scope(f"m{number}", "acme"), 32, is_eagle=True)
        made.check()
    assert made.get(Scope("m", "rival")) == (16, False)
    assert made.get(Scope("m0", "acme")) is None
    assert made.get(Scope("m39", "acme")) == (32, True)
    made.discard(Scope("m", "rival"))
    assert made.get(Scope("m", "rival")) is None
    assert len(made) == 11


def test_ids_that_ended_by_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expired_ids, "LAPSED_MAX", 12)
    names = ExpiredIds(shares_of())

    def note(name: str) -> None:
        reservation = LedgerReservation(name, 0, SlotGeneration(0), ActiveBlocks().root, 0, 0.0)
        reservation.selection_id = name + "/s"
        names.note(reservation)

    note(RIVAL + "r")
    for number in range(40):
        note(f"{ACME}r{number}")
    assert len(names) == 12
    assert names.hear(RIVAL + "r/s")
    assert not names.hear(RIVAL + "r")
    assert not names.hear(ACME + "r0")
    assert names.hear(ACME + "r39")
