"""Session affinity: where requests of a session go, and when they need not."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.core.hashing import pack_u64
from indexer.core.registry import StreamRegistry
from select_service.core.decisions.explain import ExplainedRecord
from select_service.core.decisions.record import DecisionRecord
from select_service.core.service import SelectionCore
from select_service.errors import NameRefused
from select_service.types import (
    CoreLimits,
    RouterConfig,
    SelectAndReserveRequest,
    Selection,
    SelectRequest,
    WorkerPatch,
    WorkerSpec,
)
from select_service.types.drains import DrainRequest

TTL_S = 10.0
SIZE = 16


class Fleet:
    """Four workers; which one is drawn does not matter, which one comes again does."""

    def __init__(self, **limits: Any) -> None:
        bounds = {"session_ttl_s": TTL_S} | limits
        config = RouterConfig(use_kv_events=False)
        self.core = SelectionCore(
            *(StreamRegistry(), config, random.Random(3)), limits=CoreLimits(**bounds)
        )
        self.now = 100.0
        self.made = 0
        for worker_id in range(4):
            self.add(worker_id)

    def add(self, worker_id: int, tenant_id: str = "default") -> None:
        spec = WorkerSpec(worker_id=worker_id, endpoint="x", block_size=SIZE, tenant_id=tenant_id)
        self.core.workers.upsert_worker(spec, self.now)

    def ask(self, session_id: str | None, *, isl: int = 64, **wishes: Any) -> int:
        """Ask for somebody, and book him; returns who."""
        self.made += 1
        hashes = pack_u64([self.made * 1000 + at for at in range(isl // SIZE)])
        request = SelectAndReserveRequest(
            reservation_id=f"r{self.made}",
            block_hashes=hashes,
            sequence_hashes=hashes,
            isl_tokens=isl,
            session_id=session_id,
            **wishes,
        )
        answer, _ = self.core.selection.select_and_reserve(request, self.now)
        assert isinstance(answer, Selection)
        self.core.check()
        self.core.sessions.check()
        self.last = answer
        return answer.worker_id

    def free(self) -> None:
        self.core.reservations.free(f"r{self.made}", self.now)

    def count(self, name: str) -> int:
        count: int = getattr(self.core.sessions.counters, name)
        return count


def test_a_session_stays_where_it_is() -> None:
    fleet = Fleet()
    first = fleet.ask("s")
    for number in range(8):
        fleet.free()
        fleet.ask(f"other {number}")
        fleet.free()
        assert fleet.ask("s") == first, "nothing of its prompts is cached anywhere"
    assert (fleet.count("begun"), fleet.count("kept")) == (9, 8)


def test_it_leaves_a_rank_with_more_ahead_than_its_prompt_is_long() -> None:
    fleet = Fleet()
    first = fleet.ask("s", isl=160)
    assert fleet.ask("s", isl=160) == first, "160 tokens ahead, as long as itself"
    assert fleet.ask("s", isl=160) != first, "320 tokens ahead, and others are idle"
    assert fleet.count("moved_busy") == 1
    last = fleet.last.worker_id
    fleet.free()
    assert fleet.ask("s", isl=160) == last, "from now on it is there"


def test_a_session_stays_with_the_rank_of_a_booking_that_is_withdrawn() -> None:
    """Its request comes again soon, and its rank has nothing of it: it moves if others are free."""
    fleet = Fleet()
    place = fleet.ask("s")
    reservation_id = f"r{fleet.made}"
    fleet.core.reservations.withdraw(reservation_id, fleet.core.lifecycle.bookings.added, fleet.now)
    assert not fleet.core.lifecycle.bookings.by_id
    assert fleet.ask("s") == place
    assert fleet.count("kept") == 1
    fleet.core.check()


def test_without_a_session_or_time_to_live_nothing_is_kept() -> None:
    fleet = Fleet()
    fleet.ask(None)
    assert len(fleet.core.sessions) == 0
    fleet = Fleet(session_ttl_s=0.0)
    fleet.ask("s")
    assert len(fleet.core.sessions) == 0
    assert fleet.count("begun") == 0


def test_a_plain_selection_counts_too() -> None:
    fleet = Fleet()
    request = SelectRequest(block_hashes=b"", sequence_hashes=b"", isl_tokens=5, session_id="s")
    seen = set()
    for _ in range(20):
        answer, _ = fleet.core.selection.select(request, fleet.now)
        assert isinstance(answer, Selection)
        seen.add(answer.worker_id)
    assert len(seen) == 1


def test_silence_ends_it() -> None:
    fleet = Fleet()
    fleet.ask("s")
    fleet.now += TTL_S * 0.9
    fleet.free()
    fleet.ask("s")
    fleet.now += TTL_S * 0.9
    fleet.ask("s")
    assert fleet.count("begun") == 1, "each request begins the time anew"
    fleet.now += TTL_S
    fleet.core.tick(fleet.now)
    assert len(fleet.core.sessions) == 0
    assert fleet.count("expired") == 1
    fleet.ask("s")
    assert fleet.count("begun") == 2


def test_the_one_silent_for_longest_goes_for_a_new_one() -> None:
    fleet = Fleet(sessions_max=3)
    for name in ("a", "b", "c", "a", "d"):
        fleet.ask(name, isl=16)
        fleet.free()
    assert len(fleet.core.sessions) == 3
    assert fleet.count("evicted") == 1
    begun = fleet.count("begun")
    fleet.ask("a", isl=16)
    assert fleet.count("begun") == begun
    fleet.ask("b", isl=16)
    assert fleet.count("begun") == begun + 1


def test_a_worker_that_is_gone_or_new_under_its_id_has_no_sessions() -> None:
    fleet = Fleet()
    first = fleet.ask("s")
    fleet.core.workers.delete_worker(first, fleet.now)
    fleet.add(first)
    fleet.ask("s")
    assert (fleet.count("released"), fleet.count("kept")) == (1, 0)


def test_a_change_of_its_record_leaves_sessions_where_they_are() -> None:
    fleet = Fleet()
    first = fleet.ask("s")
    fleet.core.workers.patch_worker(first, WorkerPatch(max_num_batched_tokens=999), fleet.now)
    assert fleet.ask("s") == first
    assert fleet.count("kept") == 1


@pytest.mark.parametrize("by_source", [False, True])
def test_a_worker_that_drains_passes_them_on(*, by_source: bool) -> None:
    fleet = Fleet()
    first = fleet.ask("s")
    if by_source:
        fleet.core.drains.hold_back(first, "api", "not ready", fleet.now)
    else:
        fleet.core.drains.drain(first, DrainRequest(), fleet.now)
    second = fleet.ask("s")
    assert second != first
    assert fleet.count("moved_ineligible") + fleet.count("released") == 1
    fleet.free()
    assert fleet.ask("s") == second


def test_wishes_go_before_the_session() -> None:
    fleet = Fleet()
    first = fleet.ask("s")
    others = [one for one in range(4) if one != first]
    assert fleet.ask("s", allowed_worker_ids=others) in others
    assert fleet.count("moved_ineligible") == 1


def test_tenants_are_apart() -> None:
    fleet = Fleet()
    for worker_id in range(10, 13):
        fleet.add(worker_id, "other")
    assert fleet.ask("s") < 10
    assert fleet.ask("s", tenant_id="other") >= 10
    assert fleet.count("begun") == 2


def test_a_record_says_so() -> None:
    fleet = Fleet()
    fleet.ask("s")
    fleet.ask("s", explain=True)
    record: object = fleet.last.decision
    assert isinstance(record, DecisionRecord)
    told = msgspec.to_builtins(ExplainedRecord(record, 0.0, 0.1).whole())
    excluded = [one["excluded"] for one in told["candidates"]]
    assert sorted(excluded, key=str) == [None, *["session"] * 3]
    assert told["chosen"]["picked_by"] == "only"


@pytest.mark.parametrize("name", ["x" * 257, "a\nb"])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(NameRefused, match="session_id"):
        Fleet().ask(name)


@given(
    steps=st.lists(
        st.tuples(st.sampled_from("abcde"), st.sampled_from([16, 160, 1600]), st.floats(0.0, 6.0)),
        max_size=30,
    ),
    most=st.integers(1, 4),
)
def test_like_a_table_read_aloud(steps: list[tuple[str, int, float]], most: int) -> None:
    """A naive twin: a list of who was where, the last heard of at its end."""
    fleet = Fleet(sessions_max=most)
    table: list[tuple[str, int, float]] = []
    for name, isl, later in steps:
        fleet.now += later
        table = [one for one in table if one[2] > fleet.now]
        loads = {row.worker_id: row.potential_prefill_tokens for row in loads_of(fleet)}
        mine = next((one for one in table if one[0] == name), None)
        stays = mine is not None and loads[mine[1]] - min(loads.values()) <= isl
        chosen = fleet.ask(name, isl=isl)
        if stays:
            assert mine is not None
            assert chosen == mine[1]
        table = [one for one in table if one[0] != name]
        table = [*table, (name, chosen, fleet.now + TTL_S)][-most:]


def loads_of(fleet: Fleet) -> Any:
    (scope,) = fleet.core.queries.loads()
    return scope.loads
