"""Names resolved beside the loop: judged after it, remembered, bounded, never waited for long."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from msgspec.structs import replace

from indexer.edge.addresses import THREADS, Addresses
from indexer.errors import EndpointRefused, HostNotFound
from indexer.types import EgressSettings
from tests import wait
from tests.live.ports import free_port
from tests.wait import until

Answer = str | EndpointRefused | HostNotFound
SETTINGS = EgressSettings()


class Names:
    """A name service that can be changed, and that counts."""

    def __init__(self, **names: list[str]) -> None:
        self.names = names
        self.asked: list[str] = []
        self.held = threading.Event()
        self.held.set()

    def __call__(self, host: str) -> list[str]:
        self.asked.append(host)
        self.held.wait(wait.PATIENCE_S)
        if host not in self.names:
            raise OSError("no such name")
        return self.names[host]


@contextlib.asynccontextmanager
async def resolving(
    names: Names, settings: EgressSettings = SETTINGS, clock: Callable[[], float] = lambda: 0.0
) -> AsyncIterator[Addresses]:
    addresses = Addresses(settings, clock=clock, look_up=names)
    try:
        yield addresses
    finally:
        names.held.set()
        addresses.close()
        addresses.close()


async def found(addresses: Addresses, endpoint: str, *, last: str | None = None) -> Answer:
    future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    addresses.find(endpoint, future.set_result, last=last)
    assert not future.done(), "never before the caller has gone on"
    return await future


async def test_what_is_known_without_asking() -> None:
    names = Names()
    async with resolving(names) as addresses:
        assert addresses.place("tcp://10.0.0.1:5") == "tcp://10.0.0.1:5"
        assert addresses.place("tcp://[::1]:5") == "tcp://[::1]:5"
        assert addresses.place("tcp://engine:5") is None
        assert not addresses.is_named("tcp://10.0.0.1:5")
        assert addresses.is_named("tcp://engine:5")
        with pytest.raises(EndpointRefused, match=r"169\.254\.0\.0/16"):
            addresses.place("tcp://169.254.169.254:80")
        with pytest.raises(EndpointRefused):
            addresses.place("ipc:///etc/passwd")
        assert addresses.refused == {"scheme": 1, "address": 1, "resolved": 0}
    assert not names.asked


async def test_a_name_is_judged_by_where_it_leads() -> None:
    names = Names(
        good=["10.0.0.1"],
        mixed=["169.254.1.1", "10.0.0.2"],
        six=["2001:db8::1"],
        bad=["169.254.169.254"],
        empty=[],
    )
    async with resolving(names) as addresses:
        assert await found(addresses, "tcp://good:5") == "tcp://10.0.0.1:5"
        assert await found(addresses, "tcp://mixed:5") == "tcp://10.0.0.2:5"
        assert await found(addresses, "tcp://six:5") == "tcp://[2001:db8::1]:5"
        assert isinstance(await found(addresses, "tcp://bad:5"), EndpointRefused)
        assert "169.254.169.254" not in str(await found(addresses, "tcp://bad:5"))
        assert isinstance(await found(addresses, "tcp://none:5"), HostNotFound)
        assert isinstance(await found(addresses, "tcp://empty:5"), HostNotFound)
        assert addresses.refused["resolved"] == 2
        assert addresses.lookups == {"found": 4, "failed": 2, "timeout": 0, "left_out": 0}


async def test_answers_are_remembered_for_a_while() -> None:
    now = 0.0
    names = Names(engine=["10.0.0.1"])
    async with resolving(names, clock=lambda: now) as addresses:
        both = await asyncio.gather(*[found(addresses, "tcp://engine:5") for _ in range(2)])
        assert both == ["tcp://10.0.0.1:5"] * 2
        assert addresses.place("tcp://engine:6") == "tcp://10.0.0.1:6"
        names.names["engine"] = ["127.0.0.1"]
        now = SETTINGS.lookup_cache_s - 0.001
        assert await found(addresses, "tcp://engine:5") == "tcp://10.0.0.1:5"
        now = SETTINGS.lookup_cache_s
        assert addresses.place("tcp://engine:6") is None
        assert await found(addresses, "tcp://engine:5") == "tcp://127.0.0.1:5"
        assert names.asked == ["engine", "engine"]


async def test_a_resolver_that_hangs() -> None:
    settings = replace(SETTINGS, lookup_timeout_s=0.05, lookups_max=8)
    names = Names(good=["10.0.0.1"])
    async with resolving(names, settings) as addresses:
        before = threading.active_count()
        names.held.clear()
        answers = await asyncio.gather(
            *[found(addresses, f"tcp://host{number}:1") for number in range(9)]
        )
        assert all(isinstance(answer, HostNotFound) for answer in answers)
        assert addresses.lookups == {"found": 0, "failed": 0, "timeout": 8, "left_out": 1}
        assert threading.active_count() <= before + THREADS
        names.held.set()
        await until(lambda: addresses.lookups["failed"] == 8)
        addresses.settings = SETTINGS  # or a thread that gets no time would hang, too
        assert isinstance(await found(addresses, "tcp://good:1"), str)


async def test_what_is_remembered_is_bounded() -> None:
    names = Names(**{f"host{number}": [f"10.0.0.{number}"] for number in range(5)})
    async with resolving(names, replace(SETTINGS, lookups_max=2)) as addresses:
        for number in range(5):
            await found(addresses, f"tcp://host{number}:1")
        assert addresses.place("tcp://host4:1") == "tcp://10.0.0.4:1"
        assert addresses.place("tcp://host2:1") is None


async def test_urls_are_asked_for_by_address() -> None:
    async with resolving(
        Names(good=["10.0.0.1"], six=["2001:db8::1"], bad=["169.254.0.1"])
    ) as addresses:
        assert await addresses.route("http://10.0.0.1:8/dump") == ("http://10.0.0.1:8/dump", {}, {})
        assert await addresses.route("https://u:p@good:8/dump?x=1") == (
            "https://u:p@10.0.0.1:8/dump?x=1",
            {"host": "good:8"},
            {"sni_hostname": "good"},
        )
        assert (await addresses.route("http://six/"))[0] == "http://[2001:db8::1]/"
        for url in ("http://169.254.169.254/", "http://[fe80::1]/", "http://bad/", "http:///x"):
            with pytest.raises(EndpointRefused):
                await addresses.route(url)
        for url in ("http://none/", "http://[::1", "http://good:port/"):
            with pytest.raises(HostNotFound):
                await addresses.route(url)


@contextlib.contextmanager
def alive(*hosts: str) -> Iterator[int]:
    """A port at which these addresses of ours accept connections, and others refuse them."""
    with contextlib.ExitStack() as stack:
        port = free_port()
        for host in hosts:
            stack.enter_context(socket.create_server((host, port)))
        yield port


async def test_of_several_addresses_one_that_accepts_is_taken() -> None:
    async with resolving(Names(engine=["127.0.0.2", "127.0.0.3", "127.0.0.4"])) as addresses:
        with alive("127.0.0.3", "127.0.0.4") as port:
            at = f"tcp://127.0.0.{{}}:{port}".format
            name = f"tcp://engine:{port}"
            assert await found(addresses, name) == at(3)
            assert addresses.place(name) is None, "which of them is alive is not known"
            assert await found(addresses, name, last=at(3)) == at(4), "one of no use comes last"
            assert await found(addresses, name, last=at(2)) == at(3)
            assert await addresses.route(f"http://engine:{port}/dump") == (
                f"http://127.0.0.3:{port}/dump",
                {"host": f"engine:{port}"},
                {"sni_hostname": "engine"},
            )
        assert addresses.unreachable == 0
        assert await found(addresses, name) == at(2), "nobody is there: the first"
        assert await found(addresses, name, last=at(4)) == at(4), "or where somebody was"
        assert await found(addresses, name, last="tcp://10.0.0.1:1") == at(2)
        assert (await addresses.route(f"http://engine:{port}/"))[0] == f"http://127.0.0.2:{port}/"
        assert addresses.unreachable == 4


async def test_only_allowed_addresses_are_tried() -> None:
    names = Names(engine=["127.0.0.2", "127.0.0.3", "127.0.0.4"], bad=["127.0.0.2"] * 2)
    async with resolving(
        names, replace(SETTINGS, deny=[*SETTINGS.deny, "127.0.0.2/32"])
    ) as addresses:
        with alive("127.0.0.2", "127.0.0.4") as port:
            assert await found(addresses, f"tcp://engine:{port}") == f"tcp://127.0.0.4:{port}"
            answer = await found(addresses, f"tcp://bad:{port}")
            assert isinstance(answer, EndpointRefused)


async def test_what_is_judged_is_not_connected_to() -> None:
    async with resolving(
        Names(engine=["127.0.0.2", "127.0.0.3"], bad=["169.254.169.254"])
    ) as addresses:
        with socket.create_server(("127.0.0.2", 0)) as listener:
            listener.setblocking(False)
            port = listener.getsockname()[1]
            future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
            addresses.find(f"tcp://engine:{port}", future.set_result, tries=False)
            assert await future == f"tcp://127.0.0.2:{port}"
            with pytest.raises(BlockingIOError):
                listener.accept()
            bad: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
            addresses.find(f"tcp://bad:{port}", bad.set_result, tries=False)
            assert isinstance(await bad, EndpointRefused)


async def test_the_system_resolves_odd_spellings() -> None:
    addresses = Addresses(EgressSettings(loopback=False))
    for host in ("127.1", "0x7f000001", "localhost"):
        assert isinstance(await found(addresses, f"tcp://{host}:1"), EndpointRefused)
    assert isinstance(await found(addresses, f"tcp://{'a' * 80}.x:1"), HostNotFound)
    addresses.close()
