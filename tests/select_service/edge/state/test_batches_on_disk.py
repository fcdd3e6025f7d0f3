"""A batch that is booked all or none is on disk in one commit, or not at all."""

import asyncio
import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import httpx
import pytest

from select_service.edge.driver.driver import Driver
from select_service.edge.state import journal as journal_module
from select_service.settings import Durability
from tests.coroutines import within
from tests.select_service.edge.serving import PROMPT, worker
from tests.select_service.edge.state.disk import Disk
from tests.select_service.edge.state.lives import body, life, post
from tests.wait import until


def batch(name: str, **fields: Any) -> dict[str, Any]:
    item = {**PROMPT, "reservation_id": name, "n": BATCH, **fields}
    return {"requests": [item], "reserve": True, "atomic": True}


BATCH = 3 * journal_module.BATCH_ROWS_MAX


"""More than a commit has otherwise."""


@pytest.mark.parametrize("durability", list(Durability))
async def test_all_or_none_is_one_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: Durability
) -> None:
    commits: list[set[str]] = []
    async with life(tmp_path, durability=durability) as (client, service):
        assert service.keeper is not None
        store = service.keeper.journal.store
        commit = store.commit

        def note(batch: Any) -> None:
            commits.append({name for (_, name), value in batch if value is not None})
            commit(batch)

        monkeypatch.setattr(store, "commit", note)
        await post(client, "/workers", worker())
        names = [f"alone-{number}" for number in range(40)]
        calls = [post(client, "/reservations", body(name, worker_id=1)) for name in names]
        batches = [post(client, "/select_batch", batch(name)) for name in ("a", "b")]
        answers = await asyncio.gather(*calls[:20], *batches, *calls[20:])
        assert {one.status_code for one in answers} == {200, 201}
        early = await client.delete("/reservations/a.0")
        assert early.status_code == 200
    for name in "ab":
        whole = {f"{name}.{number}" for number in range(BATCH)}
        assert any(whole <= commit for commit in commits)
        begun = next(commit for commit in commits if whole & commit)
        assert whole <= begun, "nothing of it is there before all of it is"
    async with life(tmp_path) as (_, service):
        assert len(service.core.lifecycle.bookings) == 2 * BATCH - 1 + 40


async def test_a_batch_that_is_undone_leaves_no_booking(tmp_path: Path) -> None:
    async with life(tmp_path) as (client, service):
        await post(client, "/workers", worker())
        wants = batch("a")
        wants["requests"].append({**PROMPT, "reservation_id": "other", "allowed_worker_ids": [9]})
        refused = await post(client, "/select_batch", wants)
        assert refused.status_code >= 400
        cut = asyncio.create_task(post(client, "/select_batch", batch("b")))
        while not len(service.core.lifecycle.bookings):
            await asyncio.sleep(0)
        cut.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await cut
        await until(lambda: not len(service.core.lifecycle.bookings))
        assert (await post(client, "/select_batch", batch("c"))).status_code == 200
    async with life(tmp_path) as (client, service):
        live = {
            one.reservation.reservation_id for one in service.core.lifecycle.bookings.newest(10_000)
        }
        assert live == {f"c.{number}" for number in range(BATCH)}
        assert (await client.delete("/reservations/b.0")).status_code == 200, "it is remembered"


@within(life, "tmp_path")
async def test_a_disk_that_refuses_a_batch_has_none_of_it(
    client: httpx.AsyncClient, service: Driver, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    await post(client, "/workers", worker())
    disk = Disk(service, monkeypatch)
    disk.code = sqlite3.SQLITE_FULL
    assert (await post(client, "/select_batch", batch("a"))).status_code == 503
    assert not len(service.core.lifecycle.bookings)
    await disk.heals()
    assert (await post(client, "/select_batch", batch("a"))).status_code == 200
    assert len(service.core.lifecycle.bookings) == BATCH
