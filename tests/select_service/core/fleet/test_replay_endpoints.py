"""Where each rank's replay is asked for, by what a record says."""

from __future__ import annotations

import pytest

from select_service.core.fleet.replay_endpoints import replay_endpoints

ON_ONE_HOST = {rank: f"tcp://h:{5557 + rank}" for rank in range(3)}


@pytest.mark.parametrize(
    ("events", "single", "asked"),
    [
        pytest.param(
            ON_ONE_HOST,
            "tcp://h:6557",
            {0: "tcp://h:6557", 1: "tcp://h:6558", 2: "tcp://h:6559"},
            id="port-and-rank",
        ),
        pytest.param(
            {4: "tcp://[fd00::1]:5561", 5: "tcp://[fd00::1]:5562"},
            "tcp://[fd00::1]:6557",
            {4: "tcp://[fd00::1]:6561", 5: "tcp://[fd00::1]:6562"},
            id="of-later-ranks",
        ),
        pytest.param(
            {0: "tcp://a:5557", 1: "tcp://b:5558"},
            "tcp://a:6557",
            {0: "tcp://a:6557", 1: "tcp://b:6558"},
            id="a-host-for-each-rank",
        ),
        pytest.param(
            {0: "tcp://a:5557", 1: "tcp://b:5557"},
            "tcp://a:6557",
            {0: "tcp://a:6557", 1: "tcp://b:6557"},
            id="an-engine-for-each-rank",
        ),
        pytest.param(
            ON_ONE_HOST,
            "tcp://proxy:6557",
            {0: "tcp://proxy:6557", 1: "tcp://proxy:6558", 2: "tcp://proxy:6559"},
            id="another-host",
        ),
        pytest.param({3: "tcp://h:5560"}, "tcp://h:6560", {3: "tcp://h:6560"}, id="one-rank"),
        pytest.param(
            dict.fromkeys(range(2), "tcp://h:5557"),
            "tcp://h:6557",
            dict.fromkeys(range(2), "tcp://h:6557"),
            id="one-publisher",
        ),
        pytest.param(
            {0: "tcp://h:5557", 1: "tcp://h:7001"},
            "tcp://h:6557",
            dict.fromkeys(range(2), "tcp://h:6557"),
            id="in-no-order",
        ),
        pytest.param(
            {0: "ipc:///a", 1: "ipc:///b"},
            "tcp://h:6557",
            dict.fromkeys(range(2), "tcp://h:6557"),
            id="events-by-ipc",
        ),
        pytest.param(
            ON_ONE_HOST, "ipc:///r", dict.fromkeys(range(3), "ipc:///r"), id="replay-by-ipc"
        ),
        pytest.param(ON_ONE_HOST, "x", dict.fromkeys(range(3), "x"), id="malformed"),
        pytest.param(ON_ONE_HOST, None, {}, id="none"),
        pytest.param({}, "tcp://h:6557", {}, id="no-events"),
    ],
)
def test_the_single_endpoint(
    events: dict[int, str], single: str | None, asked: dict[int, str]
) -> None:
    assert replay_endpoints(events, single, {}) == asked


def test_an_entry_of_a_rank_counts_before_the_single_endpoint() -> None:
    by_rank = {1: "tcp://r:1", 9: "tcp://r:9"}
    assert replay_endpoints(ON_ONE_HOST, None, by_rank) == {1: "tcp://r:1"}
    assert replay_endpoints(ON_ONE_HOST, "tcp://h:6557", by_rank) == {
        0: "tcp://h:6557",
        1: "tcp://r:1",
        2: "tcp://h:6559",
    }
