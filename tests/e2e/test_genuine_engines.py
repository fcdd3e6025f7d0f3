"""Engines' own publishers drive the running service; the twin says what must be seen.

The publisher publishes one batch per request, so that after each batch every prompt of the script
is asked and compared. See `engines.py` for what is fetched and `genuine_publisher.py` for how the
engines' code is run.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from tests.e2e.engines import ENGINES, PYTHON, Engine, why_missing
from tests.e2e.stage import BLOCK_SIZE, Stage
from tests.live.ports import HOST, free_base, is_free
from tests.models.engine_truth import RankTruth

pytestmark = [pytest.mark.heavy, pytest.mark.e2e]

SCRIPT = Path(__file__).with_name("genuine_publisher.py")
GOLDEN = Path(__file__).parents[1] / "golden" / "events"
SUBSCRIBE_S = 1.0  # a PUB socket cannot see who listens; engines' own tests wait like this too
REPLAY = 50  # offset of the replay port
TAIL = [5] * 7  # prompts end in a partial block

_workers = itertools.count(1)


class Publisher:
    """A genuine publisher process, driven batch by batch."""

    def __init__(self, engine: Engine, port: int, *options: str) -> None:
        self.process = subprocess.Popen(
            [
                *(PYTHON, SCRIPT, "--engine", engine.package, "--version", engine.version),
                *("--port", str(port), "--replay-port", str(port + REPLAY), *options),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._read() == {"ready": True}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line: dict[str, Any] = json.loads(self.process.stdout.readline())
        return line

    def next(self) -> list[dict[str, Any]] | None:
        """Publish the next batch; its meaning, None after the last."""
        assert self.process.stdin is not None
        self.process.stdin.write("next\n")
        self.process.stdin.flush()
        return self._read().get("events")


def prompts() -> list[dict[str, Any]]:
    """Every prompt worth asking about the scripted scenario."""
    sys.path.insert(0, str(GOLDEN))
    try:
        import scenario  # lives beside the publishers, is no package
    finally:
        sys.path.remove(str(GOLDEN))
    first = scenario.toks(1, 4 * BLOCK_SIZE)
    second = first[: 2 * BLOCK_SIZE] + scenario.toks(2, 2 * BLOCK_SIZE)
    named = scenario.toks(5, 2 * BLOCK_SIZE)
    image = scenario.toks(6, BLOCK_SIZE) + [151655] * BLOCK_SIZE
    media = int(scenario.hashlib.sha256(b"image-1").hexdigest()[:16], 16)
    infos = [None, {"mm_objects": [{"mm_hash": media, "offsets": []}]}]
    return [
        {"token_ids": first + TAIL},
        {"token_ids": second + TAIL},
        {"token_ids": named + TAIL},
        {"token_ids": named + TAIL, "lora_name": "sql-adapter"},
        {"token_ids": named + TAIL, "cache_salt": "tenant-a"},
        {"token_ids": named + TAIL, "cache_salt": "tenant-b"},
        {"token_ids": named + TAIL, "lora_name": "sql-adapter", "cache_salt": "tenant-a"},
        {"token_ids": image + TAIL},
        {"token_ids": image + TAIL, "block_mm_infos": infos},
        {"token_ids": scenario.toks(7, 6 * BLOCK_SIZE) + TAIL},
        {"token_ids": scenario.toks(9, BLOCK_SIZE) + TAIL},
    ]


class Watched:
    """One registered worker, its twin, and the comparison of the two."""

    def __init__(self, stage: Stage, port: int) -> None:
        self.stage = stage
        self.tenant = stage.new_tenant()
        self.worker = 2_000_000 + next(_workers)
        self.truth = RankTruth(BLOCK_SIZE)
        self.prompts = prompts()
        stage.register(
            self.worker,
            self.tenant,
            {0: f"tcp://{HOST}:{port}"},
            f"tcp://{HOST}:{port + REPLAY}",
        )
        time.sleep(SUBSCRIBE_S)

    def compare(self, what: str) -> None:
        expected = [(prompt, {(self.worker, 0): self.truth.row(prompt)}) for prompt in self.prompts]
        self.stage.wait_for_rows(self.tenant, expected, what=what)


def hash_modes(engine: Engine) -> list[str]:
    """Which forms of hashes this engine can be set to publish."""
    if engine.package == "sglang":
        return ["int-signed"]
    return ["int"] if engine.version == "0.9.0" else ["int", "bytes"]


def cases() -> list[Any]:
    return [
        pytest.param(engine, mode, id=f"{engine.name}-{mode}")
        for engine in ENGINES
        for mode in hash_modes(engine)
    ]


@pytest.fixture
def port() -> Iterator[int]:
    with free_base([0, REPLAY]) as base:
        yield base


def need(engine: Engine) -> None:
    reason = why_missing(engine)
    if reason:
        pytest.skip(reason)


@pytest.mark.parametrize(("engine", "mode"), cases())
def test_every_batch_of_the_full_scenario_shows(
    engine: Engine, mode: str, port: int, stage: Stage
) -> None:
    need(engine)
    with Publisher(engine, port, "--hash", mode) as publisher:
        watched = Watched(stage, port)
        for number in itertools.count():
            events = publisher.next()
            if events is None:
                break
            watched.truth.apply(events)
            watched.compare(f"after batch {number}")


@pytest.mark.parametrize(("engine", "mode"), cases())
def test_dropped_batches_are_healed_by_replay(
    engine: Engine, mode: str, port: int, stage: Stage
) -> None:
    need(engine)
    lost = {0, 3, 4, 6, 9, 10}
    options = ("--hash", mode, "--drop", ",".join(map(str, lost)))
    with Publisher(engine, port, *options) as publisher:
        watched = Watched(stage, port)
        for number in itertools.count():
            events = publisher.next()
            if events is None:
                break
            watched.truth.apply(events)
            if number not in lost:  # a loss is only visible with the next message
                watched.compare(f"after batch {number}")


@pytest.mark.parametrize("engine", [pytest.param(e, id=e.name) for e in ENGINES])
def test_an_engine_restart_on_the_same_ports_starts_anew(
    engine: Engine, port: int, stage: Stage
) -> None:
    need(engine)
    with Publisher(engine, port) as publisher:
        watched = Watched(stage, port)
        for _ in range(12):
            events = publisher.next()
            assert events is not None
            watched.truth.apply(events)
        watched.compare("before the restart")
    while not (is_free(port) and is_free(port + REPLAY)):
        time.sleep(0.05)
    with Publisher(engine, port, "--scenario", "basic") as publisher:
        time.sleep(SUBSCRIBE_S)  # the subscriber reconnects by itself
        watched.truth = RankTruth(BLOCK_SIZE)
        for number in range(3):
            events = publisher.next()
            assert events is not None
            watched.truth.apply(events)
            watched.compare(f"batch {number} after the restart")
