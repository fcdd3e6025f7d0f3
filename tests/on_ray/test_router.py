"""Serve sends requests where their prefix is, keeps the books right, and does without selectors."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.on_ray.cluster import Cluster, Selectors, kill_replicas, wait_until
from tests.on_ray.engine import BLOCK, Engine

pytestmark = [pytest.mark.heavy, pytest.mark.e2e]

ENGINES = 2
PREFIXES = [[1000 * n + one for one in range(4 * BLOCK)] for n in range(8)]


def test_requests_go_where_their_prefix_is(cluster: Cluster) -> None:
    selectors = cluster.run_selectors("routed")
    engine = _run_engines("routed")
    wait_until(lambda: _schedulable(selectors) == ENGINES, "both engines are known everywhere")
    holders = [_ask(engine, prompt)[0] for prompt in PREFIXES]
    wait_until(lambda: _are_known(selectors, holders), "the index has every prefix")
    _are_held(engine, holders, selectors)

    _a_request_is_booked_while_it_lasts(engine, selectors)
    _a_cancelled_request_is_freed(engine, selectors)

    urls = selectors.urls()
    assert kill_replicas("routed", "selector", 2) == 2
    wait_until(lambda: all(map(_is_dead, urls)), "both are dead")
    answers = [_ask(engine, prompt) for prompt in PREFIXES]  # nobody selects: Serve chooses
    assert {selection for *_, selection in answers} == {None}
    wait_until(lambda: _schedulable(selectors) == ENGINES, "selectors are back, and know them")
    wait_until(lambda: _selects(engine), "the router has found the new selectors")
    wait_until(lambda: _all_overlap(selectors), "and their index is recovered from replays")
    for prompt in PREFIXES:
        wait_until(selectors.loads_are_zero, "all is freed, as before")
        _, cached, selection = _ask(engine, [*prompt, 7])
        assert selection is not None
        assert cached == len(prompt)
    wait_until(selectors.loads_are_zero, "all is freed again")


def _run_engines(namespace: str) -> Any:
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    deployment = serve.deployment(
        name="engine",
        num_replicas=ENGINES,
        ray_actor_options={"num_cpus": 0.1},
        request_router_config=RequestRouterConfig(
            request_router_class="select_service.client.ray.request_router:SelectServiceRouter",
            request_router_kwargs={
                "namespace": namespace,
                "selection_keyword": "selection",
                "timeout_ms": 2_000.0,
            },
        ),
    )(Engine)
    return serve.run(deployment.bind(namespace), name="engines", route_prefix=None)


def _ask(engine: Any, prompt: list[int], seconds: float = 0.0) -> tuple[int, int, str | None]:
    worker_id, cached, selection = engine.remote(
        token_ids=prompt, seconds=seconds, selection=None
    ).result(timeout_s=30)
    if selection is None:
        return worker_id, cached, None
    assert selection["worker_id"] == worker_id
    return worker_id, cached, selection["reservation_id"]


def _schedulable(selectors: Selectors) -> int:
    """How many engines every selector would choose from."""
    urls = selectors.urls()
    if len(urls) < 2:
        return 0
    counts: list[int] = []
    for url in urls:
        records = httpx.get(f"{url}/workers").json()
        counts.append(sum(one["lifecycle"] == "schedulable" for one in records))
    return min(counts)


def _overlaps(url: str, prompt: list[int]) -> dict[int, int]:
    body = {"token_ids": prompt}
    scores = httpx.post(f"{url}/overlap_scores", json=body).raise_for_status().json()
    return {one["worker_id"]: BLOCK * one["device_blocks"] for one in scores["workers"]}


def _are_known(selectors: Selectors, holders: list[int]) -> bool:
    return all(
        _overlaps(url, prompt).get(holder, 0) >= len(prompt)
        for url in selectors.urls()
        for prompt, holder in zip(PREFIXES, holders, strict=True)
    )


def _all_overlap(selectors: Selectors) -> bool:
    return all(
        max(_overlaps(url, prompt).values(), default=0) >= len(prompt)
        for url in selectors.urls()
        for prompt in PREFIXES
    )


def _are_held(engine: Any, holders: list[int], selectors: Selectors) -> None:
    assert len(set(holders)) == ENGINES, "both have some, or there is nothing to choose"
    for number in range(3):
        for prompt, holder in zip(PREFIXES, holders, strict=True):
            wait_until(selectors.loads_are_zero, "no load that would weigh more than a prefix")
            chosen, cached, selection = _ask(engine, [*prompt, number])
            assert (chosen, cached) == (holder, len(prompt))
            assert selection is not None


def _is_dead(url: str) -> bool:
    try:
        httpx.get(f"{url}/health")
    except httpx.ConnectError:
        return True
    return False


def _selects(engine: Any) -> bool:
    return _ask(engine, PREFIXES[0])[2] is not None


def _a_request_is_booked_while_it_lasts(engine: Any, selectors: Selectors) -> None:
    fresh = list(range(50_000, 50_000 + 20 * BLOCK))
    running = engine.remote(token_ids=fresh, seconds=3.0)
    for url in selectors.urls():
        wait_until(lambda: selectors.active(url) == 1, "it is booked, everywhere")
        wait_until(
            lambda: not any(r["potential_prefill_tokens"] for r in selectors.rows(url)),
            "its prompt is computed",
        )
        assert any(row["potential_decode_blocks"] for row in selectors.rows(url))
    running.result(timeout_s=30)
    wait_until(selectors.loads_are_zero, "it is over")
    streamed = engine.options(stream=True).stream.remote(token_ids=fresh, count=20)
    assert len(set(streamed)) == 1
    wait_until(selectors.loads_are_zero, "the stream is over")


def _a_cancelled_request_is_freed(engine: Any, selectors: Selectors) -> None:
    running = engine.remote(token_ids=PREFIXES[0], seconds=600.0)
    (url, _) = selectors.urls()
    wait_until(lambda: selectors.active(url) == 1, "it is booked")
    running.cancel()
    wait_until(selectors.loads_are_zero, "nobody waits for it any more")
