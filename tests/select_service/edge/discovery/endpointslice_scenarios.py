"""What discovery makes of EndpointSlices of today, of Kubernetes' current library.

See `apiserver_scenarios.py`; the server is `tests/live/endpointslice_server/main.go`.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from typing import Final
from unittest import mock

import httpx

from select_service.edge.discovery import kubernetes
from tests.live.apiserver import Admin
from tests.live.recorded_apiserver import Scenario, World
from tests.select_service.edge.discovery import apiserver_scenarios as cluster
from tests.select_service.edge.discovery.apiserver_scenarios import SLICES, followed, hosts
from tests.wait import PATIENCE_S, until

TOO_LARGE: Final = "99999999"


def made(*numbers: int) -> Callable[[Admin], object]:
    """Slices of one endpoint each."""
    slices = (
        cluster.endpoint_slice(
            f"vllm-{one}", "IPv4", cluster.endpoint(f"w-{one}", f"10.1.0.{one}", ready=True)
        )
        for one in numbers
    )
    return cluster.put(SLICES, *slices)


def removed(number: int) -> Callable[[Admin], object]:
    return lambda admin: admin.do("DELETE", f"{SLICES}/vllm-{number}")


def restart(admin: Admin) -> None:
    """It remembers nothing before."""
    admin.cluster.stop(admin.cluster.SERVER)
    admin.cluster.start_server()


async def end_of_a_watch(world: World) -> None:
    """A bookmark comes before the end, and the next watch begins there."""
    await world.step("a slice, and another", cluster.both(made(1, 9), labelled(9, "other")))
    with mock.patch.object(kubernetes, "WATCH_S", 5):
        async with followed(world, SLICES) as source:
            await until(lambda: hosts(source) == {"10.1.0.1"})
            await world.step("others change for two watches", busy_elsewhere)
            await until(lambda: source.progress >= 1)
            assert source.updates == 1, "nothing but bookmarks"
            await world.step("a slice comes", made(2))
            await until(lambda: hosts(source) == {"10.1.0.1", "10.1.0.2"})
            await world.step("the first has another label", labelled(1, "other"))
            await until(lambda: hosts(source) == {"10.1.0.2"})
            assert source.failures == {}


def labelled(number: int, app: str, **more: str) -> Callable[[Admin], object]:
    labels = {"metadata": {"labels": {"app": app, **more}}}
    return cluster.patch(f"{SLICES}/vllm-{number}", labels)


def busy_elsewhere(admin: Admin) -> None:
    for number in range(24):
        labelled(9, "other", n=str(number))(admin)
        time.sleep(0.5)


async def gone(world: World) -> None:
    """The version watched from is too old."""
    await world.step("three slices", made(1, 2, 3))
    async with followed(world, SLICES) as source:
        await until(lambda: hosts(source) == {"10.1.0.1", "10.1.0.2", "10.1.0.3"})
        changes = cluster.both(removed(1), made(4), restart)
        await world.step("nobody watches", changes, cut=True)
        await until(lambda: hosts(source) == {"10.1.0.2", "10.1.0.3", "10.1.0.4"})
        assert source.failures.get("gone"), source.failures
        await world.step("one more", made(5))
        await until(lambda: len(hosts(source)) == 4)


async def expired_pages(world: World) -> None:
    """What is left of a list can expire before it is read."""
    await world.step("three slices", made(1, 2, 3))
    world.before("continue=", expire)
    async with followed(world, SLICES) as source:
        await until(lambda: hosts(source) == {"10.1.0.1", "10.1.0.2", "10.1.0.3"})
        assert source.failures == {"gone": 1}
        await world.step("one more", made(4))
        await until(lambda: len(hosts(source)) == 4)


def expire(admin: Admin) -> None:
    """No version before this is known to etcd or to the server."""
    made(8)(admin)
    removed(8)(admin)
    admin.cluster.compact()
    restart(admin)


async def restored(world: World) -> None:
    """Etcd is restored from a backup: versions go back."""
    slices = cluster.both(made(1, 9), labelled(9, "other"))
    await world.step("two slices", cluster.both(slices, lambda admin: admin.cluster.save_etcd()))
    with (
        mock.patch.object(kubernetes, "WATCH_S", 5),
        mock.patch.object(kubernetes, "WATCH_SHORT_S", 0.0),  # played again, it takes no time
    ):
        async with followed(world, SLICES) as source:
            await until(lambda: hosts(source) == {"10.1.0.1"})
            many = [labelled(9, "other", n=str(number)) for number in range(9)]
            await world.step("one that will not have been", cluster.both(made(2), *many))
            await until(lambda: hosts(source) == {"10.1.0.1", "10.1.0.2"})
            await world.step("back", lambda admin: admin.cluster.restore_etcd(), cut=True)
            await until(lambda: hosts(source) == {"10.1.0.1"})
            await world.step("one more", made(3))
            await until(lambda: hosts(source) == {"10.1.0.1", "10.1.0.3"})


async def refusals(world: World) -> None:
    """What else it may say."""
    await world.step("a slice", made(1))
    async with httpx.AsyncClient(base_url=world.url, timeout=PATIENCE_S) as client:

        async def asked(**query: str) -> httpx.Response:
            return await client.get(SLICES, params=query)

        assert (await asked(resourceVersion=TOO_LARGE)).status_code == 504
        assert (await asked(limit="1", **{"continue": "nonsense"})).status_code == 400
        begins = {"sendInitialEvents": "true", "resourceVersionMatch": "NotOlderThan"}
        begins |= {"watch": "1", "allowWatchBookmarks": "true", "resourceVersion": TOO_LARGE}
        answer = await asked(**begins, timeoutSeconds="10")
        assert answer.status_code == 200
        (line,) = answer.text.splitlines()
        assert json.loads(line)["type"] == "ERROR"


CURRENT: Final[dict[str, Scenario]] = {
    "current_slices": functools.partial(cluster.slices, path=SLICES),
    "current_end_of_a_watch": end_of_a_watch,
    "current_gone": gone,
    "current_expired_pages": expired_pages,
    "current_restored": restored,
    "current_refusals": refusals,
}
