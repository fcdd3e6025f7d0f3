"""The doctor at the edge: /ready with and without it, its bound, metric, log and pauses."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx
import msgspec
import pytest

from select_service.core.diagnostics.causes import CAUSES
from select_service.edge import cooperative
from select_service.edge import doctor as doctors
from select_service.edge.driver.driver import Driver
from select_service.settings.environment import RouterSettings
from select_service.types import RouterConfig, WorkerSpec
from tests.coroutines import within
from tests.select_service.edge.serving import add_worker, app_client
from tests.wait import until

NO_EVENTS = RouterSettings(RouterConfig(use_kv_events=False), None, ())


def _raise() -> Any:
    raise ZeroDivisionError


def incomplete(service: Driver, worker_id: int) -> None:
    service.upsert_worker(WorkerSpec(worker_id=worker_id))


def age(service: Driver, seconds: float) -> None:
    doctor = service.doctor()
    clock = doctor._clock
    doctor._clock = lambda: clock() + seconds


async def grown(service: Driver) -> None:
    """Examine, and again when what was suspected is a finding."""
    await service.doctor().examine()
    age(service, 100.0)
    await service.doctor().examine()


@within(app_client, router=NO_EVENTS, doctor_interval_s=0.0)
async def test_ready_without_verbose_says_nothing_of_it(
    client: httpx.AsyncClient, service: Driver
) -> None:
    add_worker(service)
    before = await client.get("/ready")
    incomplete(service, 2)
    service.delete_worker(2)
    await grown(service)
    for query in ("", "?verbose=false", "?verbose=0", "?verbose="):
        after = await client.get("/ready" + query)
        assert (after.status_code, after.content) == (200, before.content)
        assert after.headers == before.headers
    refused = await client.get("/ready?verbose=maybe")
    assert (refused.status_code, refused.json()["field"]) == (400, "verbose")


@within(app_client, router=NO_EVENTS, doctor_interval_s=0.0)
async def test_ready_verbose_adds_findings(client: httpx.AsyncClient, service: Driver) -> None:
    add_worker(service)
    plain = (await client.get("/ready")).json()
    verbose = await client.get("/ready?verbose=true")
    assert verbose.status_code == 200
    assert verbose.json() == plain | {"findings": []}
    incomplete(service, 2)
    await grown(service)
    answer = await client.get("/ready?verbose=1", headers={"accept": "application/json"})
    (finding,) = answer.json()["findings"]
    assert finding["code"] == "worker-incomplete"
    assert finding["subject"] == {
        "model_name": "default",
        "tenant_id": "default",
        "worker_id": 2,
    }
    assert "findings_left_out" not in answer.json()
    packed = await client.get("/ready?verbose=true", headers={"accept": "application/msgpack"})
    assert msgspec.msgpack.decode(packed.content)["findings"][0]["code"] == finding["code"]


@within(app_client, doctor_interval_s=0.0)
async def test_a_service_that_is_not_ready_tells_as_well(
    client: httpx.AsyncClient, service: Driver
) -> None:
    await grown(service)
    answer = await client.get("/ready?verbose=true")
    assert answer.status_code == 503
    assert "retry-after" in answer.headers
    assert [one["code"] for one in answer.json()["findings"]] == ["no-workers"]


@within(app_client, router=NO_EVENTS, doctor_interval_s=0.0, doctor_findings_max=3)
async def test_no_more_findings_than_allowed(client: httpx.AsyncClient, service: Driver) -> None:
    add_worker(service)
    for number in range(2, 9):
        incomplete(service, number)
    await grown(service)
    answer = (await client.get("/ready?verbose=true")).json()
    assert len(answer["findings"]) == 3
    assert answer["findings_left_out"] == 4
    metrics = (await client.get("/metrics")).text
    name = 'select_service_doctor_findings{code="worker-incomplete",severity="error"}'
    assert f"{name} 7.0" in metrics
    assert 'limit_hits_total{name="doctor_findings_max"} 4.0' in metrics
    assert "select_service_doctor_examinations_total 2.0" in metrics


@within(app_client, doctor_interval_s=0.0)
async def test_every_code_has_a_series_before_anything_was_looked_at(
    client: httpx.AsyncClient, service: Driver
) -> None:
    metrics = (await client.get("/metrics")).text
    for cause in CAUSES:
        labels = f'code="{cause.code}",severity="{cause.severity}"'
        assert f"select_service_doctor_findings{{{labels}}} 0.0" in metrics
    assert service.diagnosed is None


async def test_what_comes_and_goes_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "select_service")
    async with app_client(router=NO_EVENTS, doctor_interval_s=0.0) as (_, service):
        add_worker(service)
        incomplete(service, 2)
        await grown(service)
        await service.doctor().examine()
        add_worker(service, 2)
        await service.doctor().examine()
        await service.doctor().examine()
        records = [one for one in caplog.records if one.message.startswith("doctor: ")]
        came, went = records
        assert (came.levelno, came.__dict__["code"]) == (logging.ERROR, "worker-incomplete")
        assert came.__dict__["worker_id"] == 2
        assert "endpoint is required" in came.message
        assert (went.levelno, went.message) == (
            logging.INFO,
            "doctor: worker-incomplete is over",
        )


@within(app_client, doctor_interval_s=0.0)
async def test_a_flood_of_findings_does_not_flood_the_log(
    client: httpx.AsyncClient, service: Driver, *, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(doctors.LOGGED_MAX + 5):
        incomplete(service, number)
    await grown(service)
    records = [one for one in caplog.records if one.message.startswith("doctor: ")]
    assert len(records) == doctors.LOGGED_MAX + 1
    assert "6 more" in records[-1].message  # that there is no worker at all, too


@within(app_client, doctor_interval_s=0.0)
async def test_who_asks_at_once_shares_an_examination(
    client: httpx.AsyncClient, service: Driver
) -> None:
    await grown(service)
    incomplete(service, 2)
    age(service, 100.0)
    await service.doctor().examine()
    age(service, 100.0)
    answers = await asyncio.gather(*(client.get("/ready?verbose=true") for _ in range(5)))
    for answer in answers:  # also who came while it was under way
        codes = [one["code"] for one in answer.json()["findings"]]
        assert codes == ["worker-incomplete", "no-workers"]
    assert service.doctor().examiner.rounds == 4


@within(app_client, router=NO_EVENTS, doctor_interval_s=0.0)
async def test_it_examines_when_it_is_asked_to(client: httpx.AsyncClient, service: Driver) -> None:
    """What was wired a moment ago is reported, apart from what has lasted."""
    add_worker(service)
    path = "/ready?verbose=true&examine=true"
    assert (await client.get(path)).json()["suspected"] == []
    incomplete(service, 2)
    answer = (await client.get(path)).json()
    assert [one["code"] for one in answer["suspected"]] == ["worker-incomplete"]
    assert answer["findings"] == []
    assert service.doctor().examiner.rounds == 2
    age(service, 100.0)
    answer = (await client.get(path)).json()
    assert [one["code"] for one in answer["findings"]] == ["worker-incomplete"]
    assert answer["suspected"] == []
    refused = await client.get("/ready?examine=true")
    assert (refused.status_code, refused.json()["field"]) == (400, "examine")


@within(app_client, doctor_interval_s=0.01)
async def test_a_failed_examination_is_counted_and_not_the_last(
    client: httpx.AsyncClient, service: Driver, *, caplog: pytest.LogCaptureFixture
) -> None:
    await until(lambda: service.diagnosed is not None)
    doctor = service.doctor()
    good = doctor._peers
    doctor._peers = _raise
    await until(lambda: doctor.faults > 0)
    doctor._peers = good
    rounds = doctor.examiner.rounds
    await until(lambda: doctor.examiner.rounds > rounds)


@within(app_client, doctor_interval_s=0.0)
async def test_a_large_fleet_is_examined_in_slices(
    client: httpx.AsyncClient, service: Driver, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every pause lets the loop go: counted in steps, not in time."""
    for number in range(300):
        incomplete(service, number)
    monkeypatch.setattr(cooperative, "SLICE_S", 0.0)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.ensure_future(count())
    await service.doctor().examine()
    counting.cancel()
    assert turns > 100


@within(app_client, router=NO_EVENTS, doctor_interval_s=0.0)
async def test_a_client_that_goes_breaks_an_examination_off_and_nothing_else(
    client: httpx.AsyncClient, service: Driver, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_worker(service)
    for number in range(2, 50):
        incomplete(service, number)
    doctor = service.doctor()
    ticks = iter(range(10**9))
    doctor._clock = lambda: 2000.0 + 60 * next(ticks)  # everything lasts
    monkeypatch.setattr(cooperative, "SLICE_S", 0.0)  # every step is late: pause after each
    asking = asyncio.ensure_future(doctor.examine())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert doctor.examiner.rounds == 0
    await doctor.examine()
    await doctor.examine()
    answer = (await client.get("/ready?verbose=true")).json()
    assert len(answer["findings"]) == 48
