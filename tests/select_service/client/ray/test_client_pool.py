"""New selectors get a new client; the old one stays as long as something is booked through it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from select_service.client.asynchronous import AsyncClient
from select_service.client.core.options import Options
from select_service.client.ray.client_pool import ClientPool, client_pool_for

ONE, TWO = "http://127.0.0.1:1", "http://127.0.0.1:2"


def is_closed(client: AsyncClient) -> bool:
    return client._session.is_closed


async def test_selectors_come_and_go() -> None:
    found: list[str] = []
    trouble: list[str] = []

    async def find() -> Sequence[str]:
        if trouble:
            raise RuntimeError(trouble[0])
        return found

    # whatever ends now
    client_pool = ClientPool((), Options(), find)
    await client_pool.look()
    assert len(client_pool._live) == 0
    found.append(ONE)
    await client_pool.look()
    first = client_pool.client
    assert first is not None
    assert first.selector == ONE
    client_pool.hold(first)
    found[:] = [TWO]
    await client_pool.look()
    second = client_pool.client
    assert second is not None
    assert second.selector == TWO
    assert not is_closed(first), "something is booked through it"
    client_pool.free(first, None)
    trouble.append("no Ray any more")
    await client_pool.look()
    assert client_pool.client is second, "who cannot look keeps whom it has"
    assert is_closed(first)
    assert client_pool.failures == 2
    await client_pool.aclose()
    assert is_closed(second)
    client_pool.free(second, None)


async def test_one_for_everybody_who_asks_the_same() -> None:
    client_pool = client_pool_for([ONE], "n")
    assert client_pool_for([ONE], "n") is client_pool
    assert client_pool_for([TWO], "n") is not client_pool
    assert client_pool_for([ONE], "n", Options(timeout_ms=1.0)) is not client_pool


def test_no_address() -> None:
    with pytest.raises(ValueError, match="neither http"):
        ClientPool(["nowhere"], Options())
