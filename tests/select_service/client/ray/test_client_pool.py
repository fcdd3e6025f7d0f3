"""New selectors get a new client; the old one stays as long as something is booked through it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from select_service.client.asynchronous import AsyncClient
from select_service.client.core.options import Options
from select_service.client.ray.client_pool import ClientPool, outlet_for

ONE, TWO = "http://127.0.0.1:1", "http://127.0.0.1:2"


def is_closed(client: AsyncClient) -> bool:
    return client._session.is_closed


def test_selectors_come_and_go() -> None:
    found: list[str] = []
    trouble: list[str] = []

    async def find() -> Sequence[str]:
        if trouble:
            raise RuntimeError(trouble[0])
        return found

    async def run() -> None:
        outlet = ClientPool((), Options(), find)
        await outlet.look()
        assert len(outlet._live) == 0
        found.append(ONE)
        await outlet.look()
        first = outlet.client
        assert first is not None
        assert first.selector == ONE
        outlet.hold(first)
        found[:] = [TWO]
        await outlet.look()
        second = outlet.client
        assert second is not None
        assert second.selector == TWO
        assert not is_closed(first), "something is booked through it"
        outlet.free(first, None)
        trouble.append("no Ray any more")
        await outlet.look()
        assert outlet.client is second, "who cannot look keeps whom it has"
        assert is_closed(first)
        assert outlet.failures == 2
        await outlet.aclose()
        assert is_closed(second)
        outlet.free(second, None)  # whatever ends now

    asyncio.run(run())


def test_one_for_everybody_who_asks_the_same() -> None:
    async def run() -> None:
        outlet = outlet_for([ONE], "n")
        assert outlet_for([ONE], "n") is outlet
        assert outlet_for([TWO], "n") is not outlet
        assert outlet_for([ONE], "n", Options(timeout_ms=1.0)) is not outlet

    asyncio.run(run())


def test_no_address() -> None:
    with pytest.raises(ValueError, match="neither http"):
        ClientPool(["nowhere"], Options())
