"""Whole runs against a selector that knows the pools, and against ones with faults."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import pytest

from select_service.demo.client import SelectorClient
from select_service.demo.session import ChatShape, DemoSession, DemoSettings
from select_service.demo.worker import EngineShape
from tests.live.simulated_transport import answered_by
from tests.wait import PATIENCE_S

if TYPE_CHECKING:
    from select_service.demo.stats import Summary
    from select_service.demo.worker import SimulatedWorker

SETTINGS = DemoSettings(
    url="http://selector",
    requests=40,
    rate=400.0,
    engines=2,
    restart_down_s=0.02,
    settle_timeout_s=PATIENCE_S,
    engine=EngineShape(blocks=256, step_s=0.001),
    chat=ChatShape(system_tokens=(32, 64), think_mean_s=0.01),
)

IMPATIENT = replace(SETTINGS, settle_timeout_s=0.2)  # for what never settles


class Selector:
    """As little of the API as the demo needs; looks into the pools instead of at events."""

    def __init__(self) -> None:
        self.workers: dict[int, SimulatedWorker] = {}
        self.registered: set[int] = set()
        self.live: dict[str, int] = {}
        self.third_is_freed = asyncio.Event()
        self.freed = 0
        self.output_blocks = 0
        self.prefills = 0
        self.rng = Random(1)
        # faults
        self.lifecycle = "schedulable"
        self.forgets_to_free = False
        self.keeps_workers = False
        self.draining: set[int] = set()  # by an operator, at the end
        self.index_error = 0
        self.refuse_after: int | None = None
        self.loads_fail_after: int | None = None
        self.restarted = False  # without its state

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = msgspec.json.decode(request.content) if request.content else {}
        head, _, rest = request.url.path.strip("/").partition("/")
        answer = getattr(self, f"{request.method.lower()}_{head}")(rest, body)
        return answer if isinstance(answer, httpx.Response) else httpx.Response(200, json=answer)

    def post_workers(self, _: str, body: dict[str, Any]) -> object:
        self.registered.add(body["worker_id"])
        return {"lifecycle": self.lifecycle}

    def get_workers(self, _: str, __: object) -> object:
        return [
            {"worker_id": w, "lifecycle": "draining" if w in self.draining else self.lifecycle}
            for w in self.workers
        ]

    def delete_workers(self, worker_id: str, _: object) -> object:
        if self.keeps_workers:
            return httpx.Response(404, json={"error": "no"})
        self.registered.remove(int(worker_id))
        return {}

    def post_select_and_reserve(self, _: str, body: dict[str, Any]) -> object:
        if self.refuse_after is not None:
            self.refuse_after -= 1
            if self.refuse_after < 0:
                return httpx.Response(503, json={"error": "no", "code": "no_eligible_worker"})
        allowed = body.get("allowed_worker_ids", list(self.workers))
        worker_id = self.rng.choice(allowed)
        self.live[body["reservation_id"]] = worker_id
        blocks = self._match(worker_id, body["token_ids"])
        return {
            "worker_id": worker_id,
            "dp_rank": 0,
            "overlap": {"dp": {"0": 16 * blocks}},
        }

    def post_reservations(self, rest: str, _: object) -> object:
        reservation_id, _, verb = rest.partition("/")
        assert reservation_id in self.live
        self.prefills += verb == "prefill_complete"
        self.output_blocks += verb == "output_block"
        return {}

    def delete_reservations(self, reservation_id: str, _: object) -> object:
        self.freed += 1
        if self.freed == 3:
            self.third_is_freed.set()
        if not self.forgets_to_free:
            del self.live[reservation_id]
        return {}

    def get_loads(self, _: str, __: object) -> object:
        if self.loads_fail_after is not None:
            self.loads_fail_after -= 1
            if self.loads_fail_after < 0 and self.loads_fail_after > -2:
                return httpx.Response(500, text="broken")
        if self.restarted:
            return []
        counts = [(w, list(self.live.values()).count(w)) for w in self.workers]
        rows = [
            {
                "worker_id": worker_id,
                "potential_prefill_tokens": 0,
                "potential_decode_blocks": count,
                "active_requests": count,
            }
            for worker_id, count in counts
        ]
        return [{"loads": rows}]

    def post_overlap_scores(self, _: str, body: dict[str, Any]) -> object:
        rows = [
            {"worker_id": w, "device_blocks": self._match(w, body["token_ids"])}
            for w in self.workers
            if w not in self.draining
        ]
        return {"workers": rows}

    def _match(self, worker_id: int, tokens: list[int]) -> int:
        return self.workers[worker_id].engine.match(tokens) + self.index_error


def client_of(selector: Selector) -> SelectorClient:
    client = SelectorClient("http://selector", model_name="demo")
    answered_by(client._sdk, httpx.MockTransport(selector))
    return client


def run(selector: Selector, settings: DemoSettings = SETTINGS) -> tuple[DemoSession, Summary]:
    async def main() -> tuple[DemoSession, Summary]:
        session = DemoSession(settings, client_of(selector))
        selector.workers = session.workers
        return session, await session.run()

    return asyncio.run(main())


def test_requests_of_a_restarted_engine_are_placed_again() -> None:
    selector = Selector()
    session, summary = run(
        selector,
        DemoSettings(
            url="http://selector",
            requests=60,
            rate=600.0,
            engines=2,
            restart_every=7,
            restart_down_s=0.05,
            settle_timeout_s=PATIENCE_S,
            engine=EngineShape(blocks=256, step_s=0.002),
            chat=ChatShape(system_tokens=(600, 800), think_mean_s=0.01),
        ),
    )
    assert summary.restarts > 0
    assert summary.lost > 0
    fewest, most = sorted(worker.restarts for worker in session.workers.values())
    assert most - fewest <= 1, "they restart in turn"
    assert summary.load_left is None
    assert summary.finished + summary.failed == summary.requests


def test_a_request_that_finds_no_engine_up_is_given_up_and_freed() -> None:
    selector = Selector()

    async def main() -> Summary:
        client = client_of(selector)
        session = DemoSession(SETTINGS, client)
        selector.workers = session.workers
        for worker in session.workers.values():
            worker.up = False
        return await session.run()

    summary = asyncio.run(main())
    assert summary.failed == summary.requests == 40
    assert "lost 5 engines" in (summary.first_failure or "")
    assert summary.load_left is None


def test_load_that_stays_is_found() -> None:
    selector = Selector()
    selector.forgets_to_free = True
    _, summary = run(selector, IMPATIENT)
    assert summary.load_left is not None
    assert "load did not return to zero" in summary.problems()[0]


def test_a_wrong_index_is_found() -> None:
    selector = Selector()
    selector.index_error = 1
    _, summary = run(selector, IMPATIENT)
    assert summary.audit_wrong == summary.audit_checks > 0


def test_a_worker_that_drains_is_not_asked_about() -> None:
    selector = Selector()
    selector.draining = {2}
    _, summary = run(selector)
    assert summary.audit_checks == 40
    assert summary.problems() == []


def test_refusals_are_counted_and_end_their_conversation() -> None:
    selector = Selector()
    selector.refuse_after = 10
    _, summary = run(selector)
    assert summary.failed == summary.requests - 10
    assert "503" in (summary.first_failure or "")


def test_broken_loads_are_a_failure() -> None:
    selector = Selector()
    selector.loads_fail_after = 0
    _, summary = run(selector)
    assert "GET /loads" in (summary.first_failure or "")


@pytest.mark.parametrize("lost", ["silent", "restarted"])
def test_a_demo_without_end_ends_when_its_service_is_gone(lost: str) -> None:
    selector = Selector()
    if lost == "silent":
        selector.loads_fail_after = 0
    else:
        selector.restarted = True

    async def main() -> Summary:
        session = DemoSession(replace(SETTINGS, requests=None), client_of(selector))
        selector.workers = session.workers
        async with asyncio.timeout(PATIENCE_S):
            return await session.run()

    said = "GET /loads" if lost == "silent" else "no longer knows the demo's engines"
    assert said in asyncio.run(main()).problems()[0]


def test_a_worker_that_cannot_be_scheduled_ends_the_run() -> None:
    selector = Selector()
    selector.lifecycle = "incomplete"
    with pytest.raises(ExceptionGroup) as caught:
        run(selector)
    assert [str(error) for error in caught.value.exceptions] == ["worker 1 is incomplete"]
    assert selector.registered == set()


def test_a_service_that_keeps_its_workers_does_not_spoil_the_run() -> None:
    selector = Selector()
    selector.keeps_workers = True
    _, summary = run(selector)
    assert summary.problems() == []


def test_stop_ends_an_endless_run() -> None:
    selector = Selector()

    async def main() -> Summary:
        client = client_of(selector)
        session = DemoSession(
            DemoSettings(url="http://selector", rate=300.0, engines=2, engine=SETTINGS.engine),
            client,
        )
        selector.workers = session.workers
        async with asyncio.TaskGroup() as group:
            run = group.create_task(session.run())
            await selector.third_is_freed.wait()
            session.stop()
        return run.result()

    summary = asyncio.run(main())
    assert summary.finished == summary.requests >= 3
    assert summary.problems() == []
    assert not selector.live
