"""What waits until the port is open is there soon after, and nobody waits for all of it."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Iterator
from importlib import import_module

import pytest

from select_service.edge import cooperative, lazy_imports
from select_service.edge.http.openapi_document import OpenApiDocument
from select_service.edge.http.routes import ROUTES
from tests.live.http import exchange
from tests.select_service.edge.http.openapi_made import describe
from tests.select_service.edge.serving import listening
from tests.wait import until


async def test_one_module_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(lazy_imports, "import_module", loaded.append)
    monkeypatch.setattr(lazy_imports, "PAUSE_S", 0.0)
    loading = asyncio.ensure_future(lazy_imports.load_in_turns())
    seen = []
    while not loading.done():
        seen.append(len(loaded))
        await asyncio.sleep(0)
    await loading
    steps = {
        later - sooner for sooner, later in itertools.pairwise([*seen, len(lazy_imports.LATE)])
    }
    assert steps <= {0, 1}, "others have their turn between two"
    assert tuple(loaded) == lazy_imports.LATE


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), MemoryError()])
async def test_what_breaks_is_told_and_the_rest_loaded(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With no descriptors left the first one that failed ended it for all behind it."""
    loaded: list[str] = []

    def load(name: str) -> None:
        if name == lazy_imports.LATE[2]:
            raise error
        loaded.append(name)

    def steps() -> Iterator[None]:
        yield
        raise ValueError("odd")

    monkeypatch.setattr(lazy_imports, "import_module", load)
    monkeypatch.setattr(lazy_imports, "PAUSE_S", 0.0)
    await lazy_imports.load_in_turns(steps())
    assert loaded == [name for name in lazy_imports.LATE if name != lazy_imports.LATE[2]]
    assert [record.getMessage() for record in caplog.records] == [
        f"loaded when it is asked for: {lazy_imports.LATE[2]}: {error!r}",
        "made when it is asked for: ValueError('odd')",
    ]


def test_every_name_is_one() -> None:
    lazy_imports.load()
    for name in lazy_imports.LATE:
        assert sys.modules[name] is import_module(name)


async def test_a_server_loads_it_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(lazy_imports, "import_module", loaded.append)
    monkeypatch.setattr(lazy_imports, "PAUSE_S", 0.0)
    async with listening() as (port, _, _):
        await until(lambda: tuple(loaded) == lazy_imports.LATE)
        answer = await asyncio.to_thread(exchange, port, "GET", "/metrics")
        assert answer.status == 200


async def test_the_document_is_made_before_anybody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asked first held the loop for 30 ms."""
    monkeypatch.setattr(OpenApiDocument, "_made", {})
    monkeypatch.setattr(lazy_imports, "PAUSE_S", 0.0)
    monkeypatch.setattr(lazy_imports, "STEP_PAUSE_S", 0.0)
    async with listening() as (port, _, _):
        await until(lambda: bool(OpenApiDocument._made))
        answer = await asyncio.to_thread(exchange, port, "GET", "/openapi.json")
        assert answer.raw == OpenApiDocument._made[503, False] == describe(with_tokens=False)


def test_who_asks_before_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenApiDocument, "_made", {})
    document = OpenApiDocument(529, with_tokens=True)
    steps = document.steps()
    for _ in range(10):
        next(steps)
    assert not OpenApiDocument._made
    assert asyncio.run(document.text()) == describe(529)
    assert list(steps) == []


async def test_who_asks_before_lets_others_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first to ask, in the first seconds, held the loop for 30 ms."""
    monkeypatch.setattr(OpenApiDocument, "_made", {})
    monkeypatch.setattr(cooperative, "SLICE_S", 0.0)
    document, turns = OpenApiDocument(503, with_tokens=True), 0
    both = [asyncio.ensure_future(document.text()) for _ in range(2)]
    while not all(one.done() for one in both):
        await asyncio.sleep(0)
        turns += 1
    assert [one.result() for one in both] == [describe(503)] * 2
    assert turns > len(ROUTES), "not all at once"


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), MemoryError("no room")])
def test_a_document_that_could_not_be_made_is_made_later(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a MemoryError who asked next turned for ever, and the loop with them."""

    def describing(_: int, *, with_tokens: bool) -> Iterator[None]:
        yield
        raise error

    monkeypatch.setattr(OpenApiDocument, "_made", {})
    document = OpenApiDocument(503, with_tokens=True)
    with monkeypatch.context() as without:
        without.setattr("select_service.edge.http.openapi.describing", describing)
        for _ in range(2):
            with pytest.raises(type(error)):
                asyncio.run(document.text())
        asyncio.run(lazy_imports.load_in_turns(document.steps()))
    assert asyncio.run(document.text()) == describe(503)
