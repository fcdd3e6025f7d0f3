"""Late and lost events, and what they cost."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.core.progress import BASE_S, Delivery
from indexer.types import EventLossPolicy
from select_service.core.decisions.trust_monitor import LOOK_S
from select_service.types import CoreLimits, TrustSettings
from tests.indexer.encoding import encode_batch, stored
from tests.select_service.core.decisions.doubted import Late, fleet_of
from tests.select_service.core.whole_fleet import DEFAULT, Fleet


def test_events_that_come_in_time_or_not_at_all_cost_nothing() -> None:
    fleet = Late()
    fleet.tick(1000.0)
    assert (fleet.row.trust, fleet.row.index.state, fleet.row.index.lag_s) == (1.0, "silent", None)
    for late in (0.01, 0.5, 2.0, 4.9):
        fleet.fall_behind(late)
        assert fleet.row.trust == 1.0
    assert fleet.row.index.lag_s == pytest.approx(4.89)
    fleet.event(0.01)
    for _ in range(100):
        fleet.tick(100.0)
        assert fleet.row.trust == 1.0, "an idle engine says nothing"
    fleet.event(0.0)
    fleet.fall_behind(20.0)
    assert fleet.row.trust < 1.0
    fleet.tick(20.0)
    assert fleet.row.trust == 1.0, "whatever was as late has come by now"
    assert fleet.core.partitions[DEFAULT].trust.column is None


def test_late_events_cost_half_the_credit_every_so_often() -> None:
    fleet = Late(lag_grace_s=2.0, lag_half_s=4.0)
    fleet.event(0.0)
    fleet.fall_behind(6.0)
    assert fleet.row.trust == pytest.approx(0.5)
    assert fleet.row.reasons == ["lag"]
    fleet.fall_behind(10.0)
    assert fleet.row.trust == pytest.approx(0.25)
    fleet.event(0.0)
    assert (fleet.row.trust, fleet.row.reasons) == (1.0, [])


def test_clocks_that_differ_are_no_lag() -> None:
    for ahead in (-300.0, 300.0):
        fleet = Late()
        for _ in range(5):
            fleet.event(ahead)
            assert (fleet.row.trust, fleet.row.index.lag_s) == (1.0, 0.0)
        fleet.fall_behind(ahead + 20.0)
        assert fleet.row.trust < 1.0


def test_a_clock_that_drifts_is_forgiven_after_a_while() -> None:
    fleet = Late()
    fleet.event(0.0)
    fleet.fall_behind(60.0)
    assert fleet.row.trust < 0.1
    for _ in range(int(2 * BASE_S / 50.0) + 2):  # no silence outlasts the delay
        fleet.tick(50.0)
        fleet.event(60.0)
    assert fleet.row.trust == 1.0


def test_a_delay_that_a_silence_has_outlasted_is_over() -> None:
    """Also where the clock was set back meanwhile, by as much as the batches had been late."""
    fleet = Late()
    fleet.event(0.0)
    fleet.fall_behind(10.0)
    assert fleet.row.index.lag_s == pytest.approx(10.0)
    fleet.tick(100.0)
    fleet.event(10.0, is_set=True)
    assert (fleet.row.trust, fleet.row.index.lag_s) == (1.0, 0.0)


@pytest.mark.parametrize("step_s", [3.0, 60.0])
def test_a_clock_that_is_set_hides_no_delay_of_a_busy_engine(step_s: float) -> None:
    fleet = Late()
    fleet.event(0.0)
    fleet.fall_behind(10.0)
    fleet.event(10.0 + step_s, is_set=True)
    assert fleet.row.index.lag_s == pytest.approx(10.0)
    fleet.fall_behind(12.0 + step_s)
    assert fleet.row.index.lag_s == pytest.approx(12.0)


@pytest.mark.parametrize("back_s", [60.0, 7200.0])
def test_an_engine_whose_clock_is_set_back_is_not_late(back_s: float) -> None:
    """One engine's batches are made one after another: a time that goes back was set."""
    fleet = Late()
    for _ in range(3):
        fleet.event(0.0)
    for _ in range(5):
        fleet.event(back_s, is_set=True)
        assert (fleet.row.trust, fleet.row.index.lag_s) == (1.0, 0.0)
    fleet.fall_behind(back_s + 20.0)  # and from then on, this late is late
    assert fleet.row.index.lag_s == pytest.approx(20.0)
    assert fleet.row.trust < 1.0


def test_an_engine_without_a_clock_has_no_lag() -> None:
    fleet = Late()
    for _ in range(3):
        fleet.now += 100.0
        fleet.event(fleet.now + 1e9)
        assert (fleet.row.trust, fleet.row.index.lag_s) == (1.0, None)
    fleet.core.trust_monitor.wall_ahead = None
    fleet.event(50.0)
    assert fleet.row.index.lag_s is None


def test_an_open_gap_costs_and_a_closed_one_does_not() -> None:
    fleet = Late(lag_grace_s=2.0, lag_half_s=2.0)
    fleet.event(0.0)
    fleet.event(0.0, seq=3)
    assert fleet.row.index.open_gaps == 1
    assert fleet.row.index.state == "replaying"
    assert fleet.row.trust == 1.0
    for _ in range(4):
        fleet.tick(1.0)
    assert fleet.row.reasons == ["gaps"]
    assert fleet.row.trust == pytest.approx(0.5**1.0, abs=0.2)
    for seq in range(3):
        payload = encode_batch([stored([seq + 1], [seq * 16 + at for at in range(16)])], ts=99.0)
        if seq == 0:
            payload = encode_batch([stored([1], list(range(16)))], ts=100.0)
        fleet.stream.on_replay([b"", b"kv", seq.to_bytes(8, "big"), payload], fleet.now)
    fleet.tick(1.0)
    assert fleet.row.index.open_gaps == 0
    assert fleet.row.trust == 1.0


def test_many_lost_batches_cost_their_share_few_cost_nothing() -> None:
    fleet = Late()
    fleet.stream.has_replay = False
    for _ in range(40):
        fleet.event(0.0)
    fleet.event(0.0, seq=42)
    assert fleet.row.index.lost_batches == 2
    assert fleet.row.trust == 1.0
    fleet.event(0.0, seq=60)
    assert fleet.row.index.state == "uncertain"
    assert fleet.row.reasons == ["gaps"]
    assert fleet.row.trust == pytest.approx(42 / 61)


def test_an_index_that_begins_empty_is_not_made_wrong_by_what_was_before() -> None:
    """Shown as unknown; what is lost from then on counts as ever."""
    fleet = Late()
    fleet.stream.has_replay = False
    fleet.event(0.0, seq=800)
    for _ in range(39):
        fleet.event(0.0)
    index = fleet.row.index
    assert (index.lost_batches, index.unknown_batches, index.last_batch) == (800, 800, 839)
    assert index.known_share == pytest.approx(40 / 840)
    assert index.state == "uncertain", "not all is known that it holds"
    assert (fleet.row.trust, fleet.row.reasons) == (1.0, [])
    fleet.event(0.0, seq=860)
    assert (fleet.row.index.lost_batches, fleet.row.index.unknown_batches) == (820, 800)
    assert fleet.row.reasons == ["gaps"]
    assert fleet.row.trust == pytest.approx(41 / 61)


def test_blocks_that_were_dropped_with_a_loss_are_not_made_wrong_by_it() -> None:
    fleet = Late()
    fleet.stream._on_event_loss = EventLossPolicy.DROP
    fleet.stream.has_replay = False
    for _ in range(4):
        fleet.event(0.0)
    fleet.event(0.0, seq=20)
    assert (fleet.row.index.lost_batches, fleet.row.index.unknown_batches) == (16, 16)
    assert fleet.row.trust == 1.0


def test_it_can_be_switched_off() -> None:
    fleet = Late(weigh_freshness=False)
    fleet.event(0.0)
    fleet.fall_behind(100.0)
    assert (fleet.row.trust, fleet.row.index.lag_s) == (1.0, None)


def test_streams_are_looked_at_some_a_turn() -> None:
    fleet = Fleet()
    for worker_id in range(CoreLimits().streams_watched_per_turn_max + 1):
        spec: dict[str, Any] = {"kv_events_endpoint": f"tcp://127.0.0.1:{5000 + worker_id}"}
        fleet.worker(worker_id, **spec)
    trust_monitor = fleet.core.trust_monitor
    assert trust_monitor.keep(1000.0)
    assert not trust_monitor.keep(1000.0)
    assert not trust_monitor.keep(1000.5), "not before a second is over"
    assert trust_monitor.keep(1001.0)
    fleet.delete(5)
    assert not trust_monitor.keep(1001.0)


def test_a_fleet_that_is_late_as_one_is_told_so_in_turns() -> None:
    limits = CoreLimits(streams_watched_per_turn_max=2)
    fleet = Fleet(limits=limits, trust=TrustSettings())
    for worker_id in range(1, 6):
        fleet.worker(worker_id, kv_events_endpoint=f"tcp://127.0.0.1:{5000 + worker_id}")
    for stream in fleet.core.membership.streams():
        stream.lost_batches = 9
    reported = []
    more = True
    while more:
        before = sum(row.trust < 1.0 for row in fleet.core.trust_monitor.table().ranks)
        more = fleet.core.trust_monitor.keep(fleet.now)
        reported.append(
            sum(row.trust < 1.0 for row in fleet.core.trust_monitor.table().ranks) - before
        )
    assert sum(reported) == 5
    assert max(reported) == 2
    for stream in fleet.core.membership.streams():
        stream.lost_batches = 0
    fleet.now += LOOK_S
    while fleet.core.trust_monitor.keep(fleet.now):
        pass
    assert all(row.trust == 1.0 for row in fleet.core.trust_monitor.table().ranks)


def test_a_scope_is_shown_alone() -> None:
    fleet = fleet_of()
    fleet.worker(9, tenant_id="other")
    assert [row.worker_id for row in fleet.core.trust_monitor.table().ranks] == [1, 2, 9]
    assert [row.worker_id for row in fleet.core.trust_monitor.table(tenant_id="other").ranks] == [9]
    assert fleet.core.trust_monitor.table(model_name="none").ranks == []


class Step(NamedTuple):
    """A clock that is set, before a batch."""

    idle_s: float
    forward_s: float  # the engine's clock; negative: back
    batches: int  # the same engine makes afterwards, busily


@settings(max_examples=60)
@given(
    st.lists(
        st.builds(
            Step,
            st.floats(0.0, 90.0) | st.floats(90.0, 20_000.0),
            st.floats(1.5, 20_000.0) | st.floats(-20_000.0, -1.5),
            st.integers(0, 5),
        ),
        max_size=12,
    ),
    st.data(),
)
def test_no_step_of_a_clock_costs_anything(steps: list[Step], data: st.DataObject) -> None:
    """Whatever its size, and whether or not the engine was idle, from the first batch on."""
    fleet = Late()
    network = st.floats(0.0, 0.4)
    ahead_s = 0.0
    fleet.event(data.draw(network))
    for step in steps:
        fleet.tick(step.idle_s)
        ahead_s += step.forward_s
        for _ in range(1 + step.batches):
            fleet.event(data.draw(network) - ahead_s, is_set=True)
            row = fleet.row
            assert row.trust == 1.0
            assert row.index.lag_s is None or row.index.lag_s <= 1.0


def test_what_the_network_takes_does_not_add_up_over_steps() -> None:
    fleet, ahead_s = Late(), 0.0
    for forward_s in (2.0, *[-2.0] * 12):
        ahead_s += forward_s
        for network_s in (0.0, 0.375):
            fleet.event(network_s - ahead_s, is_set=True)
            assert fleet.row.index.lag_s in {0.0, 0.375}


@pytest.mark.parametrize("back_s", [0.07, 0.3, 0.9, 1.0])
def test_small_steps_of_a_busy_engine_s_clock_do_not_add_up(back_s: float) -> None:
    """Its batches are made one after another: a time that goes back, by however little, was set."""
    delivery, now, set_back_s = Delivery(), 100.0, 0.0
    for batch in range(200):
        now += 0.05
        set_back_s += 0.0 if batch % 5 else back_s
        delivery.note(now, now - set_back_s)
        assert delivery.lag_s == pytest.approx(0.0, abs=1e-6)
    for batch in range(20):
        now += 1.0
        delivery.note(now, now - set_back_s - 0.8 * batch)
    assert delivery.lag_s == pytest.approx(0.8 * 19), "a delay is none"


def test_times_that_are_a_little_out_of_order_hide_no_delay() -> None:
    delivery, now, late_s = Delivery(), 100.0, 0.0
    for batch in range(600):
        now += 0.04
        late_s += 0.02
        delivery.note(now, now - late_s - 0.022 * (batch % 2))
    assert delivery.lag_s == pytest.approx(late_s, abs=0.1)


@pytest.mark.parametrize("step_s", [60.0, 6.0, 99.0, -60.0, -7200.0])
def test_a_clock_that_is_set_while_the_engine_is_idle_is_seen_by_the_next_batch(
    step_s: float,
) -> None:
    fleet = Late()
    for _ in range(3):
        fleet.event(0.0)
    fleet.tick(100.0)
    for _ in range(3):
        fleet.event(step_s, is_set=True)
        assert (fleet.row.trust, fleet.row.index.lag_s) == (1.0, 0.0)
