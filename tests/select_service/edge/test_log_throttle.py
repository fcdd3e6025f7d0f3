"""Failures that others cause are logged so often and no oftener."""

import logging

import pytest

from select_service.edge.logs import LINES_MAX, PARTIES_REMEMBERED, PERIOD_S, LogThrottle
from tests.select_service.edge.serving import app_client, worker


def test_each_party_has_its_lines_and_says_what_it_left_out() -> None:
    said: list[str] = []
    now = 1.0
    sparing = LogThrottle(said.append, lambda: now)
    for number in range(10):
        sparing.log("a", f"a {number}")
        sparing.log("b", f"b {number}")
    assert said == [f"{who} {number}" for number in range(LINES_MAX) for who in "ab"]
    now += PERIOD_S
    sparing.log("a", "again")
    sparing.log("a", "once more")
    assert said[-2:] == [f"again ({10 - LINES_MAX} more since the last line)", "once more"]


def test_of_so_many_parties_it_is_remembered() -> None:
    said: list[str] = []
    sparing = LogThrottle(said.append, lambda: 1.0)
    for number in range(2 * PARTIES_REMEMBERED):
        sparing.log(str(number), "failed")
    assert len(said) == 2 * PARTIES_REMEMBERED
    assert len(sparing._logged) == PARTIES_REMEMBERED


async def test_who_registers_what_may_not_be_connected_to_writes_no_log_of_ours(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    async with app_client(connect_deny=("169.254.0.0/16",)) as (client, _):
        for number in range(50):
            record = worker(number, kv_events_endpoint=f"tcp://169.254.169.254:{number + 1}")
            answer = await client.post("/workers", json=record)
            assert answer.json()["lifecycle"] != "schedulable", "its record says why"
    lines = [one for one in caplog.messages if "event source refused" in one]
    assert len(lines) == LINES_MAX
