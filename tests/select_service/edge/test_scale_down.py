"""GET /scale_down_candidates: who is cheapest to lose, and what demand is counted."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from indexer.core.packing import pack_u64
from indexer.types import Scope, Tier, WorkerRank
from select_service.core.ledger.demand_tally import UnservedDemand
from select_service.edge.driver.driver import Driver
from select_service.planner.edge.sources.selector import SelectorSource
from select_service.planner.types import Missing, ModelKey, Value
from select_service.types import CoreLimits
from tests.coroutines import within
from tests.select_service.edge.metrics.test_exposition import SCOPE, Samples, scrape, value
from tests.select_service.edge.serving import PROMPT, add_worker, app_client

SHARED = [1, 2, 3, 4]


def hold(service: Driver, worker_id: int, chain: list[int], tier: Tier = Tier.DEVICE) -> None:
    index = service.core.partitions[Scope("default", "default")].index
    names = [1000 * worker_id + one for one in chain]
    index.store(WorkerRank(worker_id, 0), tier, None, names, pack_u64(chain))


def prompt(chain: list[int], worker_id: int, name: str | None = None) -> dict[str, Any]:
    body = {
        "block_hashes": chain,
        "sequence_hashes": chain,
        "isl_tokens": 16 * len(chain),
        "allowed_worker_ids": [worker_id],
    }
    return body if name is None else body | {"reservation_id": name}


async def candidates(client: httpx.AsyncClient, **query: object) -> list[dict[str, Any]]:
    answer = await client.get(
        "/scale_down_candidates", params={k: str(v) for k, v in query.items()}
    )
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["candidates"]
    return found


@within(app_client)
async def test_the_cheapest_to_lose_holds_nothing_hot_and_does_nothing(
    client: httpx.AsyncClient, service: Driver
) -> None:
    for worker_id in (1, 2, 3, 4):
        add_worker(service, worker_id)
    hold(service, 1, SHARED)
    hold(service, 2, SHARED)  # the same: cheap to lose once
    hold(service, 3, [10, 11, 12])  # alone, and in use
    hold(service, 4, [20, 21, 22])  # alone, and nobody asks for it
    hold(service, 4, [20, 21], Tier.HOST_PINNED)
    for _ in range(3):
        await client.post("/select", json=prompt([10, 11, 12, 13], 3))
    await client.post("/select_and_reserve", json=prompt([77], 1, "r"))
    found = await candidates(client, count=4)
    assert [one["worker_id"] for one in found] == [2, 4, 1, 3]
    assert [one["sole_blocks"] for one in found] == [0, 3, 4, 3]
    assert found[1]["blocks"] == 5
    # with 2 gone, 1 is the last to hold what they shared
    assert (await candidates(client))[0]["worker_id"] == 2
    assert found[2]["reservations"] == 1
    assert found[2]["cost_tokens"] >= 16
    assert found[3]["reused_tokens"] == 3 * 48
    costs = [one["pod_deletion_cost"] for one in found]
    assert costs == sorted(costs)


@within(app_client)
async def test_one_holder_of_a_longer_prefix_is_alone_with_the_rest(
    client: httpx.AsyncClient, service: Driver
) -> None:
    add_worker(service, 1)
    add_worker(service, 2)
    hold(service, 1, [1, 2, 3, 4, 5, 6])
    hold(service, 2, [1, 2])
    found = {one["worker_id"]: one for one in await candidates(client, count=2)}
    assert found[2]["sole_blocks"] == 0
    assert found[1]["sole_blocks"] == 6  # it goes second: then nobody has the first two either
    found = {one["worker_id"]: one for one in await candidates(client, count=1)}
    assert list(found) == [2]


@within(app_client)
async def test_who_drains_goes_first_and_scopes_are_kept_apart(
    client: httpx.AsyncClient, service: Driver
) -> None:
    add_worker(service, 1)
    add_worker(service, 2)
    add_worker(service, 3, model_name="other")
    hold(service, 2, SHARED)
    await client.post("/workers/2/drain")
    found = await candidates(client, count=9)
    assert (found[0]["worker_id"], found[0]["drains"]) == (2, True)
    assert len(found) == 3
    assert [one["worker_id"] for one in await candidates(client, model_name="other")] == [3]
    assert await candidates(client, model_name="nobody") == []
    for wrong in ({"count": 0}, {"count": 65}, {"role": "both"}):
        answer = await client.get("/scale_down_candidates", params=wrong)
        assert answer.status_code == 400


@within(app_client)
async def test_a_pool_is_asked_for_by_its_role(client: httpx.AsyncClient, service: Driver) -> None:
    for worker_id, role in ((1, "prefill"), (2, "prefill"), (3, "decode"), (4, None)):
        add_worker(service, worker_id, **({} if role is None else {"role": role}))
    hold(service, 1, SHARED)
    hold(service, 2, [10, 11])
    hold(service, 3, SHARED)
    found = await candidates(client, count=9, role="prefill")
    assert [one["worker_id"] for one in found] == [1, 2]
    assert [one["sole_blocks"] for one in found] == [0, 2], "a decode worker has the others"
    assert [one["worker_id"] for one in await candidates(client, role="decode")] == [3]
    assert [one["worker_id"] for one in await candidates(client, role="aggregated")] == [4]
    assert len(await candidates(client, count=9)) == 4


@within(app_client)
async def test_who_is_advised_takes_along_little_of_the_hit_rate(
    client: httpx.AsyncClient, service: Driver
) -> None:
    for worker_id in (1, 2, 3):
        add_worker(service, worker_id)
    assert all(one["advised"] for one in await candidates(client, count=3)), "nothing is asked"
    hold(service, 1, SHARED)
    hold(service, 2, [10])
    for chain, worker_id in ((SHARED, 1), ([10, 11], 2), ([20, 21, 22, 23], 3)):
        # 160 tokens, 80 of them found
        await client.post("/select", json=prompt(chain, worker_id))
    found = await candidates(client, count=3)
    assert [one["worker_id"] for one in found] == [3, 2, 1]
    assert [one["hit_rate_loss_so_far"] for one in found] == [0.0, 0.1, 0.5]
    assert [one["advised"] for one in found] == [True, False, False], "two points, unless said"
    for most, advised in (("0", 1), ("0.1", 2), ("0.49", 2), ("1", 3)):
        found = await candidates(client, count=3, hit_rate_loss_max=most)
        assert [one["advised"] for one in found] == [True] * advised + [False] * (3 - advised)
    demand = service.core.partitions[Scope("default", "default")].demand
    demand.fades_at = 0.0
    for now in (1.0, 601.0, 1201.0):  # what is forgotten is forgotten of both
        demand.fade(now)
    assert demand.asked_lately == 40
    found = await candidates(client, count=3)
    assert [one["hit_rate_loss_so_far"] for one in found] == [0.0, 0.1, 0.5]
    for wrong in ("-0.1", "1.01", "two", "", "nan", "1e-2"):
        answer = await client.get("/scale_down_candidates", params={"hit_rate_loss_max": wrong})
        assert (answer.status_code, answer.json()["field"]) == (400, "hit_rate_loss_max")


@within(app_client)
async def test_who_comes_back_under_its_id_has_nothing_in_its_cache(
    client: httpx.AsyncClient, service: Driver
) -> None:
    for worker_id in (1, 2):
        add_worker(service, worker_id)
    hold(service, 1, SHARED)
    hold(service, 2, [10])
    await client.post("/select", json=prompt(SHARED, 1))
    await client.post("/select_and_reserve", json=prompt([10, 11], 2, "r"))
    service.delete_worker(1)
    add_worker(service, 1)
    found = await candidates(client, count=2)
    assert [one["worker_id"] for one in found] == [1, 2]
    assert [one["reused_tokens"] for one in found] == [0, 16]
    assert [one["advised"] for one in found] == [True, False]
    # of 96 tokens 80 were found, on whomever: the second computes all that is computed
    assert found[1]["hit_rate_loss_so_far"] == (16 / 96 + 80 / 96) / 2
    demand = service.core.partitions[Scope("default", "default")].demand
    demand.fades_at = 0.0
    for now in (1.0, 601.0):
        demand.fade(now)
    assert demand.found_lately / demand.asked_lately == 80 / 96


@within(app_client)
async def test_what_is_found_for_a_pair_is_found_where_its_prompt_is_computed(
    client: httpx.AsyncClient, service: Driver
) -> None:
    for worker_id, role in ((1, "prefill"), (2, "decode"), (3, "prefill")):
        add_worker(service, worker_id, role=role)
    hold(service, 1, SHARED)
    body = prompt(SHARED, 1) | {"allowed_worker_ids": [1, 2]}
    answer = await client.post("/select_pair", json=body | {"reservation_id": "pair"})
    assert answer.status_code == 200, answer.text
    found = await candidates(client, count=2, role="prefill")
    assert [one["worker_id"] for one in found] == [3, 1]
    assert [one["reused_tokens"] for one in found] == [0, 64]


@within(app_client)
async def test_heat_fades(client: httpx.AsyncClient, service: Driver) -> None:
    add_worker(service, 1)
    hold(service, 1, SHARED)
    await client.post("/select", json=prompt(SHARED, 1))
    demand = service.core.partitions[Scope("default", "default")].demand
    demand.fades_at = 0.0
    for now, tokens in ((1.0, 64), (600.0, 64), (601.0, 32), (1200.0, 32), (1201.0, 16)):
        demand.fade(now)
        assert demand.reused[1] == tokens


@within(app_client)
async def test_demand_is_counted_with_what_was_refused(
    client: httpx.AsyncClient, service: Driver
) -> None:
    add_worker(service, 1)
    hold(service, 1, [1])
    await client.post("/select_and_reserve", json=prompt([1, 2], 1, "r"))
    await client.post("/select", json=PROMPT)
    await client.post("/select", json=prompt([1], 99))
    await client.post("/reservations/r/prefill_complete")
    await client.post("/reservations/r/prefill_complete")
    for _ in range(3):
        await client.post("/reservations/r/output_block", json={})
    await client.delete("/reservations/r")
    await client.delete("/reservations/r")
    samples = await scrape(client)
    assert value(samples, "demand_requests_total", **SCOPE, outcome="placed") == 2
    assert value(samples, "demand_requests_total", **SCOPE, outcome="refused") == 1
    assert value(samples, "demand_isl_tokens_sum", **SCOPE) == 64
    assert value(samples, "demand_isl_tokens_bucket", **SCOPE, le="31") == 0
    assert value(samples, "demand_isl_tokens_bucket", **SCOPE, le="63") == 2
    assert value(samples, "demand_prefill_tokens_sum", **SCOPE) == 32
    assert value(samples, "demand_ttft_seconds_count", **SCOPE) == 1
    assert value(samples, "demand_output_tokens_sum", **SCOPE) == 48
    assert value(samples, "demand_output_tokens_count", **SCOPE) == 1
    assert value(samples, "demand_itl_seconds_count", **SCOPE) == 48
    assert value(samples, "demand_request_seconds_count", **SCOPE) == 1
    ttft = value(samples, "demand_ttft_seconds_sum", **SCOPE)
    assert 0 < ttft <= value(samples, "demand_request_seconds_sum", **SCOPE)


async def test_a_fleet_at_zero_is_still_asked_for() -> None:
    """Or nobody would ever start it again: its scope is given up, and what was refused with it."""

    def asked(service_reports: Samples) -> dict[frozenset[tuple[str, str]], float]:
        return {
            labels: count
            for (name, labels), count in service_reports.items()
            if name == "select_service_demand_requests_total"
        }

    ours = frozenset({**SCOPE, "outcome": "unserved"}.items())
    async with app_client() as (client, service):
        add_worker(service, 1)
        assert (await client.post("/select", json=PROMPT)).status_code == 200
        assert ours not in asked(await scrape(client))
        await client.delete("/workers/1")
        source = SelectorSource(["http://test"], client=client, clock=lambda: 0.0)
        key = ModelKey("default")
        await source.windows([key], 180.0)
        for count in (1, 2, 3):
            assert (await client.post("/select", json=PROMPT)).status_code == 503
            strange = {**PROMPT, "model_name": f"made up {count}"}
            assert (await client.post("/select", json=strange)).status_code == 503
            found = asked(await scrape(client))
            assert found.pop(ours) == count
            assert {dict(labels)["model_name"]: one for labels, one in found.items()} == {
                f"made up {number}": 1 for number in range(1, count + 1)
            }, "it may be one whose fleet was at zero when this process started"
            assert (await source.loads([key]))[key].arrived == Value(1.0)
            if count == 2:
                core = service.core
                for turn in range(100):  # a linger, and the time to sweep
                    core.tick(asyncio.get_running_loop().time() + 11.0 * turn)
                assert not core.partitions
        window = (await source.windows([key], 180.0))[key]
        assert window.requests == Value(3.0)
        assert isinstance(window.isl, Missing), "held, and not nothing"


@within(app_client)
async def test_the_first_request_after_a_start_is_counted(client: httpx.AsyncClient) -> None:
    """By whatever way it comes, and with no worker anywhere; once each, and per tenant."""
    ways: tuple[tuple[str, dict[str, Any]], ...] = (
        ("/select", PROMPT),
        ("/select_and_reserve", {**PROMPT, "reservation_id": "r"}),
        ("/select_pair", {**PROMPT, "reservation_id": "p"}),
        ("/select_batch", {"requests": [PROMPT]}),
    )

    def asked_of(samples: Samples, model: str) -> float:
        labels = {"model_name": model, "tenant_id": "t", "outcome": "unserved"}
        return value(samples, "demand_requests_total", **labels)

    scope = {"tenant_id": "t"}
    for number, (path, body) in enumerate(ways):
        named = {**scope, "model_name": f"m{number}"}
        if "requests" in body:
            sent: dict[str, Any] = {"requests": [{**one, **named} for one in body["requests"]]}
        else:
            sent = {**body, **named}
        answer = await client.post(path, json=sent)
        if path != "/select_batch":  # which answers for each of its requests
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert asked_of(await scrape(client), f"m{number}") == 1, path


@pytest.mark.parametrize("is_known", [False, True])
def test_those_that_are_unserved_are_few(is_known: bool) -> None:
    most = CoreLimits().unserved_scopes_max
    unserved = UnservedDemand(CoreLimits())
    for number in range(3 * most):
        for _ in range(2):
            unserved.note(Scope(f"m{number}", "t"), is_known=is_known)
    rows = unserved.rows()
    assert len(rows) == most
    assert {count for _, count in rows} == {2}
    assert rows[-1][0].model_name == f"m{3 * most - 1}"
    assert (unserved.evicted, unserved.elsewhere) == (2 * most, 4 * most), "none is lost"


def test_made_up_names_displace_neither_the_known_nor_other_tenants() -> None:
    unserved = UnservedDemand(CoreLimits(unserved_scopes_max=4))
    known, new, asked = Scope("known", "t"), Scope("new", "other"), Scope("asked", "t")
    unserved.note(known, is_known=True)
    unserved.note(new, is_known=False)
    for number in range(100):
        unserved.note(asked, is_known=False)
        unserved.note(Scope(f"made up {number}", "t"), is_known=False)
    rows = dict(unserved.rows())
    assert (rows[known], rows[new], rows[asked], len(rows)) == (1, 1, 100, 5)


def test_a_scope_that_gets_a_worker_keeps_its_count() -> None:
    unserved = UnservedDemand(CoreLimits())
    scope = Scope("m", "t")
    for is_known in (False, True, True, False):
        unserved.note(scope, is_known=is_known)
    assert unserved.rows() == [(scope, 4)]


@pytest.mark.parametrize("name", ["m" * 257, "a\nb", "\x7f"])
@within(app_client)
async def test_names_that_cannot_be_told_are_counted_together(
    client: httpx.AsyncClient, *, name: str
) -> None:
    for strange in (name, "other"):
        sent = {**PROMPT, "model_name": strange, "tenant_id": "other"}
        assert (await client.post("/select", json=sent)).status_code == 503
    samples = await scrape(client)
    rest = {"model_name": "other", "tenant_id": "other", "outcome": "unserved"}
    assert value(samples, "demand_requests_total", **rest) == 2
