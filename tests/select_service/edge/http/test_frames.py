"""What one plain request runs from its bytes to the bytes of its answer: Python frames and files.

Few frames are what makes the straight line fast and readable, so the numbers are bounds: lower them
whenever a change allows it. `python -m tests.select_service.edge.http.test_frames` prints them, and
those of a KV event, in order; with SELECT_SERVICE_PURE=1 the event's whole way is Python.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Final

import pytest

from bench.micro.holds import stored
from bench.micro.http_request import rig_of
from indexer.compiled import complaints, kernels_in_use
from indexer.core.packing import pack_u64
from indexer.core.registry import StreamRegistry
from indexer.types import Scope, Tier, WorkerRank

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType


ROOT: Final = Path(__file__).parents[4]
ROW: Final = "W4"
"""Lifecycles, whose first request is a plain POST /select_and_reserve."""
EDGE: Final = "select_service/edge/"
FRAMES_MAX, FILES_MAX = 28, 19
EDGE_FRAMES_MAX, EDGE_FILES_MAX = 10, 7


def _file_of(code: CodeType) -> str | None:
    """Return the product file of a function, relative to the root; None: it is another's."""
    path = Path(code.co_filename)
    if not path.is_relative_to(ROOT):
        return None
    name = path.relative_to(ROOT).as_posix()
    return name if name.startswith(("select_service/", "indexer/")) else None


def frames_of(call: Callable[[], object]) -> list[tuple[str, str]]:
    """Return (file, function) of every Python frame of the product that a call enters, in order."""
    entered: list[CodeType] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            entered.append(frame.f_code)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return [(name, code.co_qualname) for code in entered if (name := _file_of(code)) is not None]


async def _frames_of_one_request() -> list[tuple[str, str]]:
    """Return the frames of one plain POST /select_and_reserve whose head is known already.

    An engine has sent a block: before the first event, prompts are remembered in case it has no
    full attention.
    """
    rig = await rig_of(ROW)
    index = next(index for _, index in rig.service.core.registry.indexes())
    index.store(index.ranks()[0], Tier.DEVICE, None, [1], pack_u64([1]))
    rig.run(3)
    request = rig.operation(100)[0]
    lane = rig.lane

    def ask() -> None:
        lane.data_received(request)
        lane.flush()

    try:
        frames = frames_of(ask)
    finally:
        lane.connection_lost(None)
        await rig.service.close()
    assert rig.answer.startswith(b"HTTP/1.1 200"), rig.answer[:300]
    assert b'"reservation_id"' in rig.answer
    return frames


def _frames_of_one_event() -> list[tuple[str, str]]:
    """Return the frames of the second message of an engine's stream, which stores two blocks."""
    registry, scope, rank = StreamRegistry(), Scope("default", "default"), WorkerRank(1, 0)
    registry.open_index(scope, 16).attach(rank)
    stream = registry.open_stream(scope, rank, worker_ranks=range(1), has_replay=False)
    first, second = ([b"", bytes([*bytes(7), at]), stored(Random(at), 2, "plain")] for at in (0, 1))
    stream.on_live(first, 0.0)
    return frames_of(lambda: stream.on_live(second, 0.0))


def _listed(frames: list[tuple[str, str]]) -> str:
    return "\n".join(f"{name}: {function}" for name, function in frames)


@pytest.mark.skipif(not all(kernels_in_use().values()), reason=f"plain form: {complaints()}")
def test_a_plain_request_runs_few_frames() -> None:
    frames = asyncio.run(_frames_of_one_request())
    listing = _listed(frames)
    at_edge = [(name, function) for name, function in frames if name.startswith(EDGE)]
    facts = (
        len(frames),
        len({name for name, _ in frames}),
        len(at_edge),
        len({name for name, _ in at_edge}),
    )
    bounds = FRAMES_MAX, FILES_MAX, EDGE_FRAMES_MAX, EDGE_FILES_MAX
    assert all(fact <= bound for fact, bound in zip(facts, bounds, strict=True)), (facts, listing)


if __name__ == "__main__":
    for way in (asyncio.run(_frames_of_one_request()), _frames_of_one_event()):
        sys.stdout.write(_listed(way) + "\n\n")
