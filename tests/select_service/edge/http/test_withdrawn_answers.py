"""An answer that cannot be written takes its booking back, unless somebody else has it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from select_service.edge.http.unsent_answers import WRITE_BUFFER_MAX
from select_service.edge.state.keeper import Keeper
from tests.coroutines import run_by
from tests.select_service.edge.http.fake_clients import (
    BOOK,
    FORMS,
    ROOM,
    FakeClient,
    Rig,
    full,
    play,
)
from tests.select_service.edge.serving import add_worker
from tests.wait import until

# -- answers given at once -------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@run_by(play, session_ttl_s=60.0)
async def test_a_client_that_leaves_before_the_turn_ends_has_booked_nothing(
    one: Rig, *, form: str
) -> None:
    client = one.connect()
    client.ask(*FORMS[form])
    client.leave()
    await one.settled()
    assert one.booked == []
    assert client.sent == b""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("writes", [0, 1])
@run_by(play, session_ttl_s=60.0)
async def test_what_the_kernel_refuses_is_withdrawn(one: Rig, *, form: str, writes: int) -> None:
    """An answer in one write, or one whose head was taken and whose body was not."""
    client = one.connect()
    client.writes_left = writes
    client.ask(*FORMS[form])
    await one.settled()
    if client.sent.endswith(b"}") and writes:
        assert one.booked != [], "it was one write"
    else:
        assert one.booked == []


@pytest.mark.parametrize("form", FORMS)
@run_by(play, session_ttl_s=60.0)
async def test_what_is_written_stays(one: Rig, *, form: str) -> None:
    client = one.connect()
    client.ask(*FORMS[form])
    await until(lambda: client.sent.endswith(b"}"), pause_s=0)
    client.leave()
    await one.settled()
    assert one.booked != []
    assert one.withdrawn == 0


@pytest.mark.parametrize("form", FORMS)
@run_by(play, session_ttl_s=60.0)
async def test_what_the_kernel_had_no_room_for_is_withdrawn(one: Rig, *, form: str) -> None:
    client = one.connect()
    client.room = 10
    client.ask(*FORMS[form])
    await until(lambda: client.sent, pause_s=0)
    await one.settled()
    assert one.booked != []
    client.leave(ConnectionResetError())
    await one.settled()
    assert one.booked == []


@pytest.mark.parametrize("form", FORMS)
@run_by(play, session_ttl_s=60.0)
async def test_what_the_kernel_takes_later_is_written(one: Rig, *, form: str) -> None:
    client = one.connect()
    client.room = 10
    client.ask(*FORMS[form])
    await until(lambda: client.sent, pause_s=0)
    assert (client.high, client.low) == (1, 0), "every byte is waited for"
    client.make_room(ROOM)
    await until(lambda: client.sent.endswith(b"}"), pause_s=0)
    assert (client.high, client.low) == (WRITE_BUFFER_MAX, WRITE_BUFFER_MAX // 4)
    client.leave()
    await one.settled()
    assert one.booked != []


@pytest.mark.parametrize("form", [one for one in FORMS if one != "without an id"])
@run_by(play, session_ttl_s=60.0)
async def test_a_lease_decides_for_itself(one: Rig, *, form: str) -> None:
    client, other = one.connect(), one.connect()
    other.ask("/leases", {"owner": "o", "ttl_s": 9.0, "lease_id": "l"})
    path, body = FORMS[form]
    lease = {"lease_id": "l"}
    if "requests" in body:
        body = {**body, "requests": [{**one, **lease} for one in body["requests"]]}
    else:
        body = {**body, **lease}
    client.writes_left = 0
    client.ask(path, body)
    await one.settled()
    assert one.booked != []
    assert one.withdrawn == 0
    other.ask("/leases/l", None, "DELETE")
    await one.settled()
    assert one.booked == []


@run_by(play)
async def test_a_client_that_is_answered_elsewhere_keeps_its_booking(one: Rig) -> None:
    client, again = one.connect(), one.connect()
    client.ask("/select_and_reserve", BOOK)
    again.ask("/select_and_reserve", BOOK)  # a repeat, before the first is written
    client.leave()
    await one.settled()
    assert one.booked == ["mine"]
    assert again.sent.endswith(b"}")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@run_by(play)
async def test_when_all_its_answers_are_lost_it_is_withdrawn(
    one: Rig, *, order: tuple[int, int]
) -> None:
    clients = one.connect(), one.connect()
    for client in clients:
        client.ask("/select_and_reserve", BOOK)
    for at in order:
        clients[at].leave()
    await one.settled()
    assert one.booked == []
    assert one.withdrawn == 1


@run_by(play)
async def test_a_repeat_that_is_lost_takes_nothing_back(one: Rig) -> None:
    client, again = one.connect(), one.connect()
    client.ask("/select_and_reserve", BOOK)
    await one.settled()
    again.ask("/select_and_reserve", BOOK)
    again.leave()
    await one.settled()
    assert one.booked == ["mine"]


@run_by(play)
async def test_who_calls_it_by_its_id_keeps_it(one: Rig) -> None:
    client, other = one.connect(), one.connect()
    client.room = 0
    client.ask("/select_and_reserve", BOOK)
    await one.settled()
    other.ask("/reservations/mine/prefill_complete", {})
    await one.settled()
    client.leave()
    await one.settled()
    assert one.booked == ["mine"]


@run_by(play)
async def test_a_later_booking_of_its_id_is_another_one(one: Rig) -> None:
    client, other = one.connect(), one.connect()
    client.room = 0
    client.ask("/select_and_reserve", BOOK)
    await one.settled()
    other.ask("/reservations/mine", None, "DELETE")
    other.ask("/select_and_reserve", BOOK)
    await one.settled()
    client.leave()
    await one.settled()
    assert one.booked == ["mine"]


@run_by(play)
async def test_the_record_of_the_decision_and_a_counter_tell_of_it(one: Rig) -> None:
    kept, lost, reader = one.connect(), one.connect(), one.connect()
    kept.ask("/select_and_reserve", {**BOOK, "reservation_id": "kept"})
    lost.ask("/select_and_reserve", BOOK)
    lost.leave()
    await one.settled()
    counts = {}
    for name in ("kept", "mine"):
        reader.sent = b""
        reader.ask(f"/decisions/{name}", None, "GET")
        await until(lambda: reader.sent.endswith(b"}"), pause_s=0)
        counts[name] = json.loads(reader.sent.partition(b"\r\n\r\n")[2])
    assert counts["mine"]["withdrawn"] is True
    assert counts["mine"]["outcome"] == "placed"
    assert "withdrawn" not in counts["kept"]
    reader.sent = b""
    reader.ask("/metrics", None, "GET")
    await until(lambda: b"reservation_events_total" in reader.sent)
    assert b'reservation_events_total{event="withdrawn"} 1.0' in reader.sent
    assert b'reservation_events_total{event="freed"} 0.0' in reader.sent


# -- answers that waited ---------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["client", "turn"])
@pytest.mark.parametrize("why", [None, ConnectionResetError()])
@run_by(full)
async def test_a_client_that_leaves_in_the_instant_of_its_turn_has_booked_nothing(
    one: Rig, client: FakeClient, *, first: str, why: Exception | None
) -> None:
    if first == "client":
        client.leave(why)
    one.service.free("first")
    if first == "turn":
        client.leave(why)
    await one.settled()
    assert one.booked == []


@pytest.mark.parametrize("turns", range(8))
@run_by(full)
async def test_a_client_that_leaves_some_turns_of_the_loop_later_is_answered_or_has_booked_nothing(
    one: Rig, client: FakeClient, *, turns: int
) -> None:
    one.service.free("first")
    for _ in range(turns):
        await asyncio.sleep(0)
    client.leave()
    await one.settled()
    assert one.booked == (["mine"] if client.sent.endswith(b"}") else [])


@run_by(full)
async def test_a_client_of_whose_end_only_the_transport_knows_has_booked_nothing(
    one: Rig, client: FakeClient
) -> None:
    """Half-closed: asyncio closes the transport at once, and calls the protocol a turn later."""
    client.connection.eof_received()
    client.close()
    one.service.free("first")
    await one.settled()
    assert one.booked == []
    client.leave()


@pytest.mark.parametrize("writes", [0, 1])
@run_by(full)
async def test_what_the_kernel_refuses_of_an_answer_that_waited_is_withdrawn(
    one: Rig, client: FakeClient, *, writes: int
) -> None:
    client.writes_left = writes
    one.service.free("first")
    await one.settled()
    assert one.booked == []


@run_by(full)
async def test_an_answer_that_waits_for_its_client_to_read_is_withdrawn_with_it(
    one: Rig, client: FakeClient
) -> None:
    client.connection.pause_writing()
    one.service.free("first")
    for _ in range(10):
        await asyncio.sleep(0)
    assert one.booked == ["mine"]
    client.leave()
    await one.settled()
    assert one.booked == []


@run_by(full)
async def test_requests_behind_one_that_waits_are_as_if_never_sent(
    one: Rig, client: FakeClient
) -> None:
    for name in ("behind", "further behind"):
        client.ask("/select_and_reserve", {**BOOK, "reservation_id": name})
    one.service.free("first")
    client.leave()
    await one.settled()
    assert one.booked == []


@run_by(full)
async def test_of_pipelined_answers_those_that_are_written_stay(
    one: Rig, client: FakeClient
) -> None:
    client.ask("/select_and_reserve", {**BOOK, "reservation_id": "behind"})
    one.service.free("first")
    await until(lambda: client.sent.endswith(b"}"), pause_s=0)
    await until(lambda: one.waiting == 1, pause_s=0)
    add_worker(one.service, 2)
    client.writes_left = 1
    await one.settled()
    assert one.booked == ["mine"]


@run_by(full)
async def test_a_place_that_is_given_back_goes_to_the_next(one: Rig, client: FakeClient) -> None:
    behind = one.connect()
    behind.ask("/select_and_reserve", {**BOOK, "reservation_id": "behind"})
    await until(lambda: one.waiting == 2, pause_s=0)
    client.writes_left = 0
    one.service.free("first")
    await until(lambda: behind.sent.endswith(b"}"), pause_s=0)
    await one.settled()
    assert one.booked == ["behind"]


@pytest.mark.parametrize("leaving", ["first", "second", "both"])
@run_by(full)
async def test_who_waits_twice_for_one_booking_has_it_while_one_is_answered(
    one: Rig, client: FakeClient, *, leaving: str
) -> None:
    again = one.connect()
    again.ask("/select_and_reserve", BOOK)
    for _ in range(10):
        await asyncio.sleep(0)
    one.service.free("first")
    if leaving != "second":
        client.leave()
    if leaving != "first":
        again.leave()
    await one.settled()
    assert one.booked == ([] if leaving == "both" else ["mine"])


# -- answers that wait for the disk ----------------------------------------------------------------


def on_disk(path: Path) -> dict[str, Any]:
    return {"state_dir": str(path), "durability": "strict"}


@pytest.mark.parametrize("form", FORMS)
def test_a_client_that_leaves_while_the_disk_writes_has_booked_nothing(
    form: str, tmp_path: Path
) -> None:
    async def scene(one: Rig) -> None:
        client = one.connect()
        client.ask(*FORMS[form])
        client.leave()
        await one.settled()
        assert one.booked == []
        assert client.sent == b""

    play(scene, session_ttl_s=60.0, **on_disk(tmp_path))


@pytest.mark.parametrize("form", FORMS)
def test_what_the_kernel_refuses_once_it_ison_disk_is_withdrawn(form: str, tmp_path: Path) -> None:
    async def scene(one: Rig) -> None:
        client = one.connect()
        client.writes_left = 0
        client.ask(*FORMS[form])
        await until(lambda: client.is_closed)
        await one.settled()
        assert one.booked == []

    play(scene, session_ttl_s=60.0, **on_disk(tmp_path))


def test_an_answer_that_waited_for_its_turn_and_then_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(one: Rig, client: FakeClient) -> None:
        written = asyncio.get_running_loop().create_future()
        monkeypatch.setattr(Keeper, "settled", lambda _: written)
        one.service.free("first")
        await until(lambda: one.waiting == 0, pause_s=0)
        for _ in range(10):
            await asyncio.sleep(0)
        assert one.booked == ["mine"]
        client.leave()
        await one.settled()
        assert one.booked == []

    full(scene, **on_disk(tmp_path))
