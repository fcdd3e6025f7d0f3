"""The selectors behind one name: every one is asked, and those that hide there are named."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

import httpx
import msgspec
import pytest

from select_service.planner.edge.selector_addresses import SILENT_S, SelectorAddresses
from select_service.planner.edge.selectors import SelectorFleet
from select_service.planner.edge.sources import selector as selector_module
from select_service.planner.edge.sources.selector import SelectorSource
from select_service.planner.errors import SelectorError
from select_service.planner.types import Missing, Reading
from select_service.types.workers import DrainStatus
from tests.live.tcp_server import tcp_server
from tests.select_service.planner.edge.fakes import KEY, Clock
from tests.select_service.planner.edge.loops import asking, loop_of
from tests.select_service.planner.edge.test_selector_source import Selectors
from tests.select_service.planner.edge.test_sources import client, number

URL = "http://selectors:8092"
A, B, C = "10.0.0.1", "10.0.0.2", "10.0.0.3"


class Names:
    """A resolver that a test sets."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = list(addresses)
        self.fails = ""
        self.asked = 0

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        assert (host, port) == ("selectors", 8092)
        self.asked += 1
        if self.fails:
            raise socket.gaierror(-2, self.fails)
        return self.addresses


class Fleet:
    """Selectors behind a name, scraped."""

    def __init__(self, *addresses: str) -> None:
        self.names = Names(*addresses)
        self.clock = Clock()
        self.fake = Selectors()
        self.hosts: set[str] = set()
        for name in (A, B, C):
            self.fake.requests[name] = 100.0
            self.fake.backlog[name] = 0.0
            self.fake.started[name] = 50.0
        addresses_ = SelectorAddresses([URL], 10.0, self.clock, self.names)
        self.source = SelectorSource(
            [URL],
            client=client(self.answer),
            clock=self.clock,
            addresses=addresses_,
            wall=self.clock,
        )

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.hosts.add(request.headers["host"])
        return self.fake.answer(request)

    def come(self, **_: float) -> None:
        for name in (A, B, C):
            self.fake.requests[name] += 10.0

    async def window(self, seconds: float = 20.0) -> Reading:
        self.clock.now += seconds
        return (await self.source.windows([KEY], seconds))[KEY].requests


async def test_every_address_of_a_name_is_asked_by_the_name() -> None:
    fleet = Fleet(A, B, A)
    await fleet.source.begin([KEY])
    fleet.come()
    assert number(await fleet.window()) == pytest.approx(20.0)
    assert fleet.hosts == {"selectors:8092"}
    assert fleet.source.states == {"answers": 2, "silent": 0, "several": 0}


async def test_a_name_is_followed() -> None:
    """One is replaced by another, which has counted since it began."""
    fleet = Fleet(A, B)
    await fleet.source.begin([KEY])
    fleet.come()
    await fleet.source.loads([KEY])  # B is gone after that
    fleet.names.addresses = [A, C]
    fleet.fake.started[C], fleet.fake.requests[C] = fleet.clock.now + 5.0, 7.0
    assert number(await fleet.window()) == pytest.approx(27.0), "what it had counted counts"
    fleet.names.addresses = [A, B, C]  # of one that was away nothing is lost either
    fleet.come()
    assert number(await fleet.window()) == pytest.approx(30.0)


async def test_who_joins_and_had_begun_before_is_unknown_for_a_window() -> None:
    fleet = Fleet(A)
    await fleet.source.begin([KEY])
    fleet.names.addresses = [A, B]
    assert await fleet.window() == Missing(f"counting begins at {URL} ({B})")
    fleet.come()
    assert number(await fleet.window()) == pytest.approx(20.0)


async def test_who_boots_behind_a_name_is_not_waited_for_and_who_has_answered_is() -> None:
    fleet = Fleet(A, B)
    fleet.fake.down = {B}
    await fleet.source.begin([KEY])
    fleet.come()
    assert number(await fleet.window()) == pytest.approx(10.0)
    fleet.fake.down = set()
    await fleet.window()
    fleet.fake.down = {B}
    assert isinstance(await fleet.window(), Missing)
    await fleet.window(SILENT_S)
    fleet.come()
    assert number(await fleet.window()) == pytest.approx(10.0)
    assert fleet.source.states == {"answers": 1, "silent": 1, "several": 0}


async def test_a_name_that_cannot_be_looked_up_keeps_what_it_led_to_and_is_reported() -> None:
    fleet = Fleet(A, B)
    fleet.names.fails = "Name or service not known"
    why = f"{URL}: the name cannot be looked up: Name or service not known"
    await fleet.source.begin([KEY])
    assert await fleet.window() == Missing(why)
    fleet.names.fails = ""
    await fleet.window()
    fleet.names.fails = "Name or service not known"
    fleet.come()
    assert number(await fleet.window()) == pytest.approx(20.0)
    assert fleet.source.warnings == (why,)
    asked = fleet.names.asked
    fleet.clock.now += 9.0
    await fleet.source.loads([KEY])
    assert fleet.names.asked == asked, "not at every look"


@pytest.mark.parametrize("url", ["http://10.0.0.1:8092", "http://[fd00::1]:8092/at"])
async def test_an_address_is_no_name(url: str) -> None:
    names = Names()
    (one,) = await SelectorAddresses([url], lookup=names).look()
    assert (one.url, one.shown, one.name, one.authority) == (url, url, "", "")
    assert not names.asked


async def test_of_two_families_one_is_asked() -> None:
    """A dual-stack replica has an address of each: it was counted twice."""

    async def both(host: str, port: int) -> Sequence[str]:
        return ["::1", "127.0.0.1"]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with tcp_server(serve) as port:
        found = await SelectorAddresses([f"http://localhost:{port}/x"], lookup=both).look()
        assert [one.url for one in found] == [f"http://127.0.0.1:{port}/x"]
    found = await SelectorAddresses([f"http://localhost:{port}/x"], lookup=both).look()
    assert [one.url for one in found] == [f"http://[::1]:{port}/x"], "nobody answers at either"


# -- who hides behind one address ------------------------------------------------------------------


async def test_the_first_answer_of_another_process_at_an_address_shows_several() -> None:
    """By start times: the other had not ended when this one began. Neither is believed."""
    fleet = Fleet(A)
    await fleet.source.begin([KEY])
    fleet.come()
    fleet.fake.started[A] = 60.0
    why = await fleet.window()
    assert isinstance(why, Missing)
    assert why.why.startswith(f"{URL}: several processes answer in turns: name every selector")
    assert fleet.source.warnings == (why.why,)
    assert fleet.source.states["several"] == 1
    for _ in range(5):  # the same one again and again is only a part of the traffic
        fleet.come()
        assert isinstance(await fleet.window(), Missing)
    for _ in range(12):
        await fleet.window()
    assert fleet.source.states == {"answers": 1, "silent": 0, "several": 0}
    fleet.come()
    assert number(await fleet.window()) == pytest.approx(10.0)
    assert not fleet.source.warnings


async def test_two_that_were_started_together_are_two() -> None:
    """A start time has hundredths of a second: those of one rollout may share it."""
    fleet = Fleet(A)
    fleet.fake.ids[A] = "one"
    await fleet.source.begin([KEY])
    fleet.fake.ids[A] = "two"
    assert isinstance(await fleet.window(), Missing)
    assert fleet.source.states["several"] == 1


async def test_who_has_ended_was_replaced() -> None:
    fleet = Fleet(A)
    await fleet.source.begin([KEY])
    fleet.fake.started[A], fleet.fake.requests[A] = fleet.clock.now + 8.0, 30.0
    assert number(await fleet.window()) == pytest.approx(30.0)
    assert not fleet.source.warnings


async def test_replicas_that_are_known_and_not_scraped_are_reported_everywhere(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A connection that always leads to the same one shows no other process."""
    fleet = Fleet(A)
    page = fleet.fake.answer(httpx.Request("GET", f"http://{A}/metrics")).text
    peers = "".join(
        f'select_service_replica_publishers{{state="{state}"}} {count}\n'
        for state, count in (("synced", 1), ("behind", 1), ("gone", 5), ("foreign", 5))
    )
    fleet.fake.pages[A] = httpx.Response(200, text=page + peers)
    await fleet.source.begin([KEY])
    assert not fleet.source.warnings
    fleet.clock.now += selector_module.UNSEEN_S
    loop = loop_of(source=fleet.source)  # type: ignore[arg-type] # it is a source
    await loop.slow()
    warning = f"2 further replicas of {URL} are not scraped"
    assert any(one.startswith(warning) for one in loop.decisions[-1].reasons)
    await loop.slow()
    assert caplog.text.count(warning) == 1
    async with asking(loop) as client_:
        metrics = (await client_.get("/metrics")).text
    assert "select_planner_selectors_unseen 2.0" in metrics
    assert 'select_planner_selectors{state="answers"} 1.0' in metrics
    fleet.names.addresses = [A, B, C]
    await fleet.window()
    assert fleet.source.unseen == 0


async def test_a_selector_at_two_addresses_is_counted_once() -> None:
    """By IPv4 and IPv6, or by two names: the id of its process shows it."""
    fleet = Fleet(A, B, C)
    fleet.fake.ids |= {A: "one", B: "one", C: "two"}
    await fleet.source.begin([KEY])
    fleet.come()
    assert number(await fleet.window()) == pytest.approx(20.0)
    assert fleet.source.states == {"answers": 2, "silent": 0, "several": 0}
    fleet.come()
    (load,) = (await fleet.source.loads([KEY])).values()
    assert number(load.arrived) == pytest.approx(20.0)
    fleet.fake.down = {A}  # it still answers at the other
    assert number(await fleet.window()) == pytest.approx(20.0)
    fleet.come()
    fleet.names.addresses = [B, C]
    fleet.fake.down = set()
    assert number(await fleet.window()) == pytest.approx(20.0)
    fleet.names.addresses = [A, B, C]
    fleet.come()
    assert number(await fleet.window()) == pytest.approx(20.0)


async def test_every_scrape_connects_anew() -> None:
    """Connections that are kept lead to one of several for ever, and none of the others is seen."""
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while await reader.readline() not in (b"\r\n", b""):
            pass
        text = b"select_service_up 1\n"
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(text), text))
        await reader.read()

    async with tcp_server(serve) as port:
        source = SelectorSource([f"http://127.0.0.1:{port}"])
        for _ in range(3):
            await source.loads([KEY])
        await source.close()
    assert connections == 3


# -- drains ----------------------------------------------------------------------------------------


async def test_a_selector_that_is_broken_holds_up_no_drain_for_long() -> None:
    """One of two behind a name restarts again and again: the other knows what it had booked."""
    requests: list[bytes] = []
    status = msgspec.json.encode(
        DrainStatus(
            worker_id=7,
            model_name="m",
            tenant_id="default",
            lifecycle="draining",
            drains=True,
            reservations=0,
            prefill_tokens=0,
            decode_blocks=0,
            safe_to_terminate=True,
        )
    )

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append((await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")[0])
        body = b"[]" if b"GET /workers?" in requests[-1] else status
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
        writer.write(b"content-length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()

    async def lookup(host: str, port: int) -> Sequence[str]:
        return ["127.0.0.2", "127.0.0.3"]

    clock = Clock()
    async with tcp_server(serve, "127.0.0.2") as port:
        url = f"http://selectors:{port}"
        addresses = SelectorAddresses([url], 1000.0, clock, lookup)
        fleet = SelectorFleet([url], None, addresses, clock)
        for call in (fleet.in_flight(7), fleet.drain(7, "it goes"), fleet.workers(KEY, {7})):
            with pytest.raises(SelectorError, match=r"127\.0\.0\.3"):
                await call
        clock.now += SILENT_S
        assert await fleet.in_flight(7) == ""
        await fleet.drain(7, "it goes")
        assert await fleet.workers(KEY, {7}) == {}
        async with tcp_server(serve, "127.0.0.3", port):
            requests.clear()
            await fleet.drain(7, "it goes")
            assert len(requests) == 2, "it is drained once it answers"
        with pytest.raises(SelectorError, match=r"127\.0\.0\.3"):
            await fleet.in_flight(7)
    clock.now += SILENT_S
    with pytest.raises(SelectorError):
        await fleet.in_flight(7)  # if nobody answers, nobody knows
    await fleet.close()


async def test_every_selector_behind_a_name_is_sent_a_drain() -> None:
    requests: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append((await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")[0])
        writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\n{}")
        await writer.drain()

    addresses = ["127.0.0.2"]

    async def lookup(host: str, port: int) -> Sequence[str]:
        if not addresses:
            raise socket.gaierror(-2, "Name or service not known")
        return addresses

    async with tcp_server(serve, "127.0.0.2") as port, tcp_server(serve, "127.0.0.3", port):
        url, clock = f"http://selectors:{port}", Clock()
        fleet = SelectorFleet([url], None, SelectorAddresses([url], 10.0, clock, lookup))
        await fleet.drain(7, "it goes")
        assert len(requests) == 1
        addresses.append("127.0.0.3")
        clock.now += 10.0
        await fleet.drain(7, "it goes")
        assert requests == [b"POST /workers/7/drain HTTP/1.1"] * 3
        await fleet.close()
    addresses.clear()
    nowhere = SelectorFleet([url], None, SelectorAddresses([url], 10.0, clock, lookup))
    with pytest.raises(SelectorError, match="the name cannot be looked up"):
        await nowhere.drain(7, "it goes")
