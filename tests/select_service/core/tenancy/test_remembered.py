"""Each memory of what has ended: one tenant's flood leaves what the others did."""

from __future__ import annotations

from collections import Counter

import pytest

from indexer.core.index import KvIndex
from indexer.types import BASE_NAMESPACE, Scope
from select_service.core.admission import retry_after
from select_service.core.admission.retry_after import RetryPromises, Room
from select_service.core.decisions.decision_log import EXPLAINED_MAX
from select_service.core.diagnostics import prompt_checks, rank_checks
from select_service.core.diagnostics.prompt_checks import PromptChecks
from select_service.core.diagnostics.prompt_sample import PromptSample, PromptSampler
from select_service.core.diagnostics.rank_checks import RankChecks
from select_service.core.fleet import pins
from select_service.core.fleet.pins import Pins
from select_service.core.ledger.active_blocks import ActiveBlocks
from select_service.core.ledger.leases import Leases
from select_service.core.ledger.reservation import LedgerReservation, SlotGeneration
from select_service.core.replication.claim import Claim
from select_service.core.replication.claims import Claims
from select_service.core.replication.lease_copies import LeaseCopies
from select_service.core.replication.messages import ClaimRecord
from select_service.core.replication.tombstones import Tombstone, Tombstones
from select_service.core.reservations import reservation_ends
from select_service.core.reservations.reservation_ends import ExpiredIds
from select_service.core.tenancy.shares import Shares, prefix_of
from select_service.core.tenancy.tenant_memory import TenantMemory
from select_service.types import CoreLimits, LeaseState, SelectAndReserveRequest
from tests.select_service.core.whole_fleet import Fleet

ACME, RIVAL = prefix_of("acme"), prefix_of("rival")


def shares_of(limits: CoreLimits | None = None) -> Shares:
    shares = Shares(limits or CoreLimits())
    shares.name(("acme", "rival"), others=True)
    return shares


def test_times_to_live_given_in_an_earlier_life() -> None:
    limits = CoreLimits(lease_copies_max=12)
    copies = LeaseCopies(limits, shares_of(limits))
    taken = [copies.recall(f"{ACME}{number}", (60.0, 1), 0.0) for number in range(12)]
    assert not all(taken)
    assert copies.recall(RIVAL + "l", (60.0, 1), 0.0)
    copies.check([])
    copies.purge(1.0, 20)
    assert not copies.recalled
    copies.check([])


def test_what_ended_before_tenants_were_named_counts_at_once() -> None:
    """Metrics show it before anything else ends: the others held nothing of what they held."""
    limits = CoreLimits()
    shares = Shares(limits)
    leases = Leases(limits, shares)
    for number in range(5):
        leases.remember_ended(f"{ACME}{number}", "closed", 0.0)
    shares.name(("acme", "rival"), others=True)
    held = shares.bounds["ended_leases_max"]
    assert dict(held.rows()) == {"acme": 0, "rival": 0, None: 5}
    leases.remember_ended(ACME + "l", "closed", 0.0)
    assert dict(held.rows()) == {"acme": 1, "rival": 0, None: 5}
    leases.check()


def test_ends_of_claims() -> None:
    ends = Tombstones(12, shares_of())

    def end(name: str, born: int) -> None:
        ends.note(name, Tombstone(1, born, by_owner=True, freed=True), float(born), kept=False)

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


@pytest.mark.parametrize("late", [False, True])
def test_a_memory_of_few(*, late: bool) -> None:
    """`late`: nobody had a part when it began."""
    shares = Shares(CoreLimits()) if late else shares_of()
    memory: TenantMemory[str, int] = TenantMemory(
        shares, "few", lambda: 12, size_of=lambda size: size
    )
    if late:
        for number in range(20):
            memory.put("acme", f"early{number}", 1)
            memory.check()
        assert [name for name, _ in memory.items()] == [f"early{n}" for n in range(8, 20)]
        memory.put("rival", "early19", 2)
        assert memory.pop("rival", "early18") == 1
        shares.name(("acme", "rival"), others=True)
    memory.put("rival", "r", 2)
    for number in range(40):
        memory.put("acme", f"r{number}", 1 + number % 3)
        memory.check()
    assert memory.get("rival", "r") == 2
    assert memory.get("acme", "r0") is None
    assert memory.get("acme", "r39") == 1
    memory.put("acme", "r39", 2)
    assert memory.pop("acme", "r39") == 2
    assert not memory.has("acme", "r39")
    memory.put("acme", "huge", 99)
    assert memory.get("rival", "r") == 2, "what has no room at all goes with its tenant's own"
    assert not memory.has("acme", "huge")
    memory.purge(lambda _: False, 10)
    assert memory
    memory.purge(lambda _: True, 100)
    assert not memory
    memory.check()


def test_entries_that_take_no_place_are_no_fault_of_their_row() -> None:
    """Such as second names, where the one with the place is in another tenant's row."""
    memory: TenantMemory[str, int] = TenantMemory(
        shares_of(), "few", lambda: 12, size_of=lambda size: size
    )
    memory.put("acme", "r", 0)
    memory.check()
    assert memory.get("acme", "r") == 0


def test_explained_bookings_ended_ones_and_the_doctors_prompts() -> None:
    """What one tenant floods leaves the others' explanations, predictions and findings."""
    fleet = Fleet()
    fleet.core.name_tenants(("acme", "rival"), others=True)
    for worker, tenant in enumerate(("acme", "rival"), 1):
        fleet.worker(worker, tenant_id=tenant)
    book(fleet, RIVAL, 0)
    count = max(EXPLAINED_MAX, fleet.core.limits.cached_token_reports_max) + 1
    for number in range(count):
        book(fleet, ACME, number, explain=number <= EXPLAINED_MAX)
    core = fleet.core
    assert core.decisions.explained(RIVAL + "0") is not None
    assert core.decisions.explained(ACME + "0") is None
    core.decisions.check()
    before = core.counters.cached_token_reports.get("compared", 0)
    core.reservations.free(RIVAL + "0", fleet.now, 0)
    assert core.counters.cached_token_reports["compared"] == before + 1


def book(fleet: Fleet, prefix: str, number: int, *, explain: bool = True) -> None:
    request = SelectAndReserveRequest(
        tenant_id=prefix[:-1],
        token_ids=[number] * 16,
        reservation_id=f"{prefix}{number}",
        explain=explain,
    )
    fleet.core.selection.select_and_reserve(request, fleet.now)
    fleet.core.reservations.free(f"{prefix}{number}", fleet.now)


def test_prompts_that_the_doctor_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_checks, "SEEN_MAX", 12)
    monkeypatch.setattr(rank_checks, "AWAITED_MAX", 12)
    shares, index = shares_of(), KvIndex(16)
    prompts, ranks = PromptChecks(shares), RankChecks(shares)

    def ask(tenant: str, beginning: int, at: float) -> None:
        scope, key = Scope("m", tenant), beginning.to_bytes(8)
        sample = PromptSample(scope, 1, 0, at, key, 1, 1, 16, "hashes", BASE_NAMESPACE, [])
        prompts.judge(sample, index, {})
        ranks.judge(sample)

    for beginning in range(3):
        ask("rival", beginning, 1.0)
    for beginning in range(40):
        ask("acme", beginning, 2.0)
    for turn in range(1, 4):
        for beginning in range(3):
            ask("rival", beginning, 1.0 + turn * prompt_checks.SETTLE_S)
    held = {bound.name: bound.held("rival") for bound in shares.bounds.values()}
    assert held["doctor_prompts_seen"] == held["doctor_prompts_awaited"] == 3 * 2
    assert held["doctor_ranks_awaited"] == 3


def test_prompts_that_the_doctor_looks_at() -> None:
    fleet = Fleet()
    fleet.core.name_tenants(("acme", "rival"), others=True)
    for worker, tenant in enumerate(("acme", "rival"), 1):
        fleet.worker(worker, tenant_id=tenant)
    sampler = fleet.core.selection.sampler = PromptSampler(fleet.core.shares)
    for _ in range(2):
        sampler.drain(12)
        for number in range(40):
            book(fleet, ACME, number)
        for number in range(3):
            book(fleet, RIVAL, number)
        assert Counter(one.scope.tenant_id for one in sampler.samples) == {"acme": 8, "rival": 2}


def test_returns_that_a_tenant_was_promised() -> None:
    book = RetryPromises(1, slots_max=12, shares=shares_of())

    def grant(tenant: str, number: int, line: str = "pool") -> bool:
        key = f"{tenant}{number}".encode()
        return book.grant(key, 0, Room(line, 1.0, 100.0, 0.0), 0.0, tenant=tenant).is_kept

    assert sum(grant("acme", number) for number in range(40)) == 12 - 2 * 2
    assert [grant("rival", number) for number in range(3)] == [True, True, False]
    book.check()
    book.redeem(b"rival0")
    assert grant("rival", 3)
    book.begin(1, slots_max=12, horizon_s=9.0)
    assert not book.size
    book.check()
    assert grant("acme", 1)


def test_timelines_of_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry_after, "LINES_MAX", 12)
    book = RetryPromises(1, shares=shares_of())

    def wait_s(tenant: str, line: str) -> float:
        return book.grant(b"", 0, Room(line, 1.0, 1.0, 0.0), 0.0, tenant=tenant).retry_after_s

    assert wait_s("rival", "r") == 0.0
    for number in range(40):
        wait_s("acme", f"a{number}")
    assert wait_s("rival", "r") == 1.0, "behind what was promised before"


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
    monkeypatch.setattr(reservation_ends, "LAPSED_MAX", 12)
    names = ExpiredIds(shares_of())

    def note(name: str) -> None:
        reservation = LedgerReservation(name, 0, SlotGeneration(0), ActiveBlocks().root, 0, 0.0)
        reservation.selection_id = name + "/s"
        names.note(reservation)

    note(RIVAL + "r")
    for number in range(40):
        note(f"{ACME}r{number}")
    assert len(names) == 2 * 12, "each under its two names, which take one place"
    assert names.discard(RIVAL + "r/s")
    assert not names.discard(RIVAL + "r")
    for number in range(40):
        if number > 28:
            assert names.discard(f"{ACME}r{number}/s")
        assert not names.discard(f"{ACME}r{number}")
    assert len(names) == 0


def test_a_reservation_that_ends_again_under_other_names_keeps_one_set() -> None:
    names = ExpiredIds(shares_of())
    for number in range(40):
        reservation = LedgerReservation("r", 0, SlotGeneration(0), ActiveBlocks().root, 0, 0.0)
        reservation.selection_id = f"s{number}"
        names.note(reservation)
    assert len(names) == 2
    assert not names.discard("s38")
    assert names.discard("s39")
    assert not names.discard("r")
