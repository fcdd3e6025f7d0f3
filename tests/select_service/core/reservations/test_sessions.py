"""Session affinity: where requests of a session go, and when they need not."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.core.packing import pack_u64
from indexer.core.registry import StreamRegistry
from indexer.types import Scope
from select_service.core.decisions.explain import ExplainedRecord
from select_service.core.decisions.record import DecisionRecord
from select_service.core.reservations.sessions import GAP_TTL_MIN_S
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
from select_service.types.workers import DrainRequest
from tests.models.replica_net import LIMITS, Net, Node

if TYPE_CHECKING:
    from select_service.core.changes import StateKey

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


def test_requests_with_an_empty_name_share_no_session() -> None:
    fleet = Fleet()
    assert len({fleet.ask("") for _ in range(4)}) == 4
    assert len(fleet.core.sessions) == 0
    assert fleet.count("begun") == 0
    (booked, *_) = fleet.core.lifecycle.bookings.by_id.values()
    assert booked.reservation.session_id is None


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
    fleet.free()
    fleet.core.reservations.free(f"r{fleet.made - 1}", fleet.now)
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
    table: list[tuple[str, int]] = []
    for name, isl, later in steps:
        fleet.now += later  # nobody is silent: all their requests run
        loads = {row.worker_id: row.potential_prefill_tokens for row in loads_of(fleet)}
        mine = next((one for one in table if one[0] == name), None)
        stays = mine is not None and loads[mine[1]] - min(loads.values()) <= isl
        chosen = fleet.ask(name, isl=isl)
        if stays:
            assert mine is not None
            assert chosen == mine[1]
        table = [one for one in table if one[0] != name]
        table = [*table, (name, chosen)][-most:]


def loads_of(fleet: Fleet) -> Any:
    (scope,) = fleet.core.queries.loads()
    return scope.loads


def test_a_program_is_waited_for_as_long_as_its_own_gaps_last() -> None:
    """Eight times its usual tool call, not the hour that somebody who reads may take."""
    fleet = Fleet(session_ttl_s=3600.0)

    def turns(gaps: list[float]) -> None:
        for gap in gaps:
            fleet.ask("s")
            fleet.now += 100.0  # while it is answered nothing counts
            fleet.free()
            fleet.now += gap
            fleet.core.tick(fleet.now)

    turns([3.0, 2.0, 4.0, 3.0, 20.0])
    assert (fleet.count("begun"), fleet.count("expired")) == (1, 0), "eight of 4 s are 32"
    turns([2.0] * 8)
    assert fleet.count("begun") == 1, "a longer one only rises the estimate"
    turns([0.1] * 80)
    assert (fleet.count("begun"), fleet.count("expired")) == (1, 0)
    turns([GAP_TTL_MIN_S, 0.1])
    assert (fleet.count("begun"), fleet.count("expired")) == (2, 1)
    fleet = Fleet(session_ttl_s=3600.0, session_gap_factor=0.0)
    turns([0.1] * 3 + [3599.0])
    assert fleet.count("expired") == 0


def test_a_gap_that_was_too_long_to_be_waited_for_is_waited_for_the_next_time() -> None:
    """Many quick calls, and a tool that takes a minute: both belong to the program."""
    fleet = Fleet(session_ttl_s=600.0)
    for _ in range(5):
        for gap in (0.01, 0.01, 60.0):
            fleet.ask("s")
            fleet.free()
            fleet.now += gap
            fleet.core.tick(fleet.now)
    assert fleet.count("begun") == 2, "the first minute was not to be foreseen"


def test_a_session_is_not_silent_while_another_request_of_it_runs() -> None:
    fleet = Fleet(session_ttl_s=600.0)
    for _ in range(3):
        fleet.ask("s")
        fleet.free()
        fleet.now += 0.01
    fleet.ask("s", isl=16)
    long = f"r{fleet.made}"
    fleet.ask("s", isl=16)
    fleet.free()
    fleet.now += 100.0
    fleet.core.tick(fleet.now)
    fleet.ask("s", isl=64)
    fleet.free()
    assert fleet.count("begun") == 1
    fleet.core.reservations.free(long, fleet.now)
    fleet.now += 100.0
    fleet.ask("s")
    assert fleet.count("begun") == 2, "only now it was silent"


def test_a_session_whose_rank_went_during_a_request_has_gaps_again() -> None:
    fleet = Fleet(session_ttl_s=600.0)
    first = fleet.ask("s")
    fleet.ask("s", allowed_worker_ids=[one for one in range(4) if one != first])
    fleet.free()
    fleet.core.workers.delete_worker(first, fleet.now)
    fleet.core.tick(fleet.now)
    (partition,) = fleet.core.partitions.values()
    rank = fleet.core.sessions.find(partition, "s")
    assert rank is not None
    assert (rank.running, rank.is_resting) == (0, True)


def test_a_session_survives_a_restart_with_what_is_known_of_its_gaps() -> None:
    fleet = Fleet(session_ttl_s=3600.0)
    changes = fleet.core.keep_changes()
    rows: dict[StateKey, bytes | None] = {}

    def write() -> None:
        while (taken := changes.take([], ())) is not None:
            rows[taken[0]] = fleet.core.state.record(taken[0])
            changes.written(*taken)

    fleet.ask("gone")
    fleet.free()
    write()
    first, other = fleet.ask("s"), fleet.ask("t")
    for _ in range(2):
        fleet.free()
        fleet.now += 1.0
        other = fleet.ask("t")
    fleet.free()
    fleet.core.workers.delete_worker(
        next(one for one in range(4) if one not in {first, other}), fleet.now
    )
    write()
    again = Fleet(session_ttl_s=3600.0)
    for key in sorted(rows, key=lambda one: again.core.state.turn(one[0], rows[one] or b"")):
        record = rows[key]
        if record is not None:
            again.core.state.restore(key, record, again.now)
    assert not again.core.state.unreadable
    assert again.ask("s") == first
    again.made = 100
    assert again.ask("t") == other
    assert again.count("kept") == 2
    again.free()
    again.now += 8.0 * 1.0 - 0.1
    again.core.tick(again.now)
    again.core.sessions.check()
    kept = again.core.sessions.find(again.core.partitions[Scope("default", "default")], "t")
    assert kept is not None
    assert kept.until - kept.active_at == pytest.approx(8.0)


def ask(node: Node, name: str, *allowed: int, session_id: str = "s") -> int:
    """Ask a node of a net for a worker, and book it; return which."""
    request = SelectAndReserveRequest(
        reservation_id=name,
        block_hashes=b"",
        sequence_hashes=b"",
        isl_tokens=4,
        session_id=session_id,
        allowed_worker_ids=[*allowed] or None,
    )
    answer, effects = node.core.selection.select_and_reserve(request, node.net.now)
    node.did(effects)
    assert isinstance(answer, Selection)
    return answer.worker_id


def test_names_of_sessions_that_are_too_long_here_are_not_taken_from_replicas() -> None:
    net = Net(1, 2, msgspec.structs.replace(LIMITS, session_ttl_s=60.0))
    here, there = net.nodes
    net.limits = msgspec.structs.replace(net.limits, id_length_max=8)
    there.restart()
    for node in net.nodes:
        node.put_worker(3)
    net.now += 1.0
    ask(here, "a", session_id="s" * 8)
    ask(here, "b", session_id="s" * 9)
    net.run(1.0)
    assert there.core.lifecycle.bookings.live("b") is not None
    assert (len(here.core.sessions), len(there.core.sessions)) == (2, 1)


def test_after_a_restart_a_session_is_where_it_was_last_not_where_an_older_claim_is() -> None:
    net = Net(1, 2, msgspec.structs.replace(LIMITS, session_ttl_s=60.0))
    here, there = net.nodes
    for node in net.nodes:
        node.keep()
        for worker_id in range(3, 9):
            node.put_worker(worker_id)
    net.now += 1.0

    first = ask(here, "long")
    net.run(1.0)
    last = ask(there, "short", *(one for one in range(3, 9) if one != first))
    there.did(there.core.reservations.free("short", net.now))
    there.flush()
    there.reboot()
    net.run(10.0)
    assert there.core.lifecycle.bookings.live("long") is not None, "told again"
    assert ask(there, "next") == last


def test_replicas_hear_of_sessions_with_their_reservations() -> None:
    net = Net(1, 2, msgspec.structs.replace(LIMITS, session_ttl_s=60.0))
    here, there = net.nodes
    for node in net.nodes:
        for worker_id in range(3, 9):
            node.put_worker(worker_id)
    net.now += 1.0

    place = ask(here, "a")
    net.run(1.0)
    assert there.core.lifecycle.bookings.live("a") is not None
    for number in range(4):
        assert ask(there, f"b{number}") == place
        there.did(there.core.reservations.free(f"b{number}", net.now))
    assert there.core.sessions.counters.begun == 0


def test_a_session_is_not_silent_while_its_request_runs_for_longer_than_a_silence() -> None:
    fleet = Fleet()
    first = fleet.ask("s", isl=16)
    long = f"r{fleet.made}"
    fleet.now += 1.5 * TTL_S
    fleet.core.tick(fleet.now)
    assert fleet.ask("s", isl=160) == first, "a second one at the same time"
    fleet.free()
    fleet.now += 1.5 * TTL_S
    fleet.core.tick(fleet.now)
    fleet.core.reservations.free(long, fleet.now)
    fleet.core.tick(fleet.now)
    fleet.now += 0.5 * TTL_S
    assert fleet.ask("s") == first
    assert (fleet.count("begun"), fleet.count("kept")) == (1, 2)
    fleet.free()
    fleet.now += 1.5 * TTL_S
    fleet.core.tick(fleet.now)
    assert len(fleet.core.sessions) == 0


def test_running_sessions_make_room_for_others() -> None:
    fleet = Fleet(sessions_max=3)
    for number in range(3):
        fleet.ask(f"s{number}")
    fleet.now += 1.5 * TTL_S
    fleet.ask("another")
    assert len(fleet.core.sessions) == 3
    assert fleet.count("evicted") == 1
