"""One pair of engines with a plain model through all that happens to engines, callers and services.

The tests of this file share the engines, and follow one another: each is true of engines that
already have a past.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.engines.conftest import Recorder
from tests.engines.exchange import Flavor
from tests.engines.fleet import Fleet, running_fleet
from tests.engines.test_vllm import assert_foretold
from tests.engines.tiny_models import write_adapter
from tests.engines.verdicts import EVICTED
from tests.engines.vllm_engine import EngineConfig
from tests.live.server import OURS_EXTRA, Server
from tests.wait import block_until, run

pytestmark = [pytest.mark.heavy, pytest.mark.e2e]

REQUESTS = 150
BLOCK_SIZE = 16
SHORT_BUFFER = 40
"""Batches: less than what an engine has published when a service starts late."""
FLAVORS = (
    Flavor(),
    Flavor(salt="one"),
    Flavor(salt="two"),
    Flavor(adapter="adapter-a"),
    Flavor(adapter="adapter-b"),
    Flavor(salt="one", adapter="adapter-a"),
)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("plain")
    adapters = {name: write_adapter(folder, name) for name in ("adapter-a", "adapter-b")}
    state = ("--state-dir", str(folder / "state"), "--index-snapshot-interval-s", "1")
    configs = [
        EngineConfig("llama", block_size=BLOCK_SIZE, adapters=adapters, buffer_steps=steps)
        for steps in (10_000, SHORT_BUFFER)
    ]
    with running_fleet(folder, configs, *state) as fleet:
        yield fleet


def test_evictions(fleet: Fleet, recorder: Recorder) -> None:
    verdict = recorder(fleet.drive("evictions", 2 * REQUESTS))
    assert all(fleet.log.removed.values()), "the pools were large enough for everything"
    assert_foretold(verdict)


def test_salts_and_adapters(fleet: Fleet, recorder: Recorder) -> None:
    verdict = recorder(fleet.drive("salts and adapters", REQUESTS, flavors=FLAVORS, prefixes=2))
    assert_foretold(verdict)


def test_cancelled_requests(fleet: Fleet, recorder: Recorder) -> None:
    verdict = recorder(fleet.drive("callers that leave", REQUESTS, cancel_share=0.3, seed=2))
    assert_foretold(verdict)
    assert fleet.server.fleet_load() == (0, 0, 0)


def test_late_service(fleet: Fleet, recorder: Recorder) -> None:
    """It asks for what was published before: all of it from one engine, the end of it from the
    other.

    What the second has forgotten is unknown, and makes nothing that is known less credible.
    """
    newest = fleet.traffic(0, seed=4).words(400)
    for engine in fleet.engines:
        engine.complete(newest)
    with Server(fleet.folder / "late.log", args=OURS_EXTRA) as late:
        fleet.register(late)
        block_until(lambda: fleet.matched(newest, late) == dict.fromkeys((1, 2), _whole(newest)))
        traffic = fleet.traffic(REQUESTS, late)
        run(traffic.run())
        whole = [one for one in traffic.exchanges if one.worker_id == 1]
        part = [one for one in traffic.exchanges if one.worker_id == 2]
        assert whole
        assert part
        traffic.exchanges = whole
        verdict = recorder(fleet.judge("late, whole past", traffic))
        traffic.exchanges = part
        partial = recorder(fleet.judge("late, the past's end", traffic))
        assert_foretold(verdict)
        assert partial.reasons[EVICTED] == len(partial.too_much), partial.differences
        assert min(_trust(late).values()) > 0.9, late.request("GET", "/trust").raw


def test_killed_service(fleet: Fleet, recorder: Recorder) -> None:
    """It has its index from the disk, and what engines published meanwhile from them."""
    fleet.kill_service()
    missed = fleet.traffic(0).beginnings
    for engine in fleet.engines:
        for prompt in missed:
            engine.complete(prompt)
    fleet.start_service()
    block_until(lambda: fleet.matched(missed[-1]) == dict.fromkeys((1, 2), _whole(missed[-1])))
    assert_foretold(recorder(fleet.drive("the service is killed", REQUESTS)))


def test_killed_engine(fleet: Fleet, recorder: Recorder) -> None:
    """Others answer meanwhile; started again it holds nothing, and is credited with nothing."""
    first = fleet.engines[0]
    words = fleet.traffic(0, seed=3)
    old, young = words.words(400), words.words(400)
    first.complete(old)
    block_until(lambda: fleet.matched(old)[1] == _whole(old))

    def fall_and_rise() -> None:
        first.kill()
        fleet.log.forget(first.worker_id)
        first.start()

    rising = {20: fall_and_rise}
    assert_foretold(
        recorder(fleet.drive("an engine is killed", REQUESTS, after=rising, retry=True))
    )
    first.wait_until_up()
    first.complete(young)
    block_until(
        lambda: fleet.matched(young)[1] == _whole(young)
    )  # it has received from the new engine
    assert fleet.matched(old)[1] == 0
    assert_foretold(recorder(fleet.drive("it is back", REQUESTS)))


def _whole(prompt: Sequence[int]) -> int:
    """Blocks of a prompt, without the last tokens that fill none."""
    return len(prompt) // BLOCK_SIZE


def _trust(server: Server) -> dict[int, float]:
    answer: Any = server.request("GET", "/trust").json
    return {row["worker_id"]: row["trust"] for row in answer["ranks"]}
