"""How many Python frames and files one plain selection passes: a stranger must be able to read it.

The bounds only ever go down. They count calls and source files, which no busy machine changes.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from indexer.compiled import kernels_in_use
from indexer.core.hashing import pack_u64
from indexer.core.registry import StreamRegistry
from select_service.core.service import SelectionCore
from select_service.types import RouterConfig, SelectAndReserveRequest, Selection, WorkerSpec

if TYPE_CHECKING:
    from types import FrameType

FRAMES_MAX, FILES_MAX = 20, 12

ROOT = Path(__file__).parents[4]


def _frames_of_one_selection() -> list[str]:
    registry = StreamRegistry()
    core = SelectionCore(registry, RouterConfig(), random.Random(1))
    for worker_id in (1, 2):
        worker = WorkerSpec(
            worker_id=worker_id,
            endpoint=f"http://w{worker_id}",
            block_size=16,
            kv_events_endpoint=f"tcp://127.0.0.1:{5000 + worker_id}",
        )
        core.workers.upsert_worker(worker, 0.0)
    frames: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            frames.append(f"{path.relative_to(ROOT)}: {frame.f_code.co_qualname}")

    hashes = pack_u64([1, 2, 3, 4])
    for number in range(1, 5):  # the first ones fill caches
        request = SelectAndReserveRequest(
            reservation_id=f"r{number}",
            block_hashes=hashes,
            sequence_hashes=hashes,
            isl_tokens=64,
        )
        frames.clear()
        sys.setprofile(note)
        try:
            answer, _ = core.selection.select_and_reserve(request, 1.0 + number / 1000)
        finally:
            sys.setprofile(None)
        assert isinstance(answer, Selection)
    return [one for one in frames if one.startswith(("select_service/", "indexer/"))]


@pytest.mark.skipif(not all(kernels_in_use().values()), reason="plain leaves are frames, too")
def test_a_plain_selection_passes_few_frames_and_files() -> None:
    frames = _frames_of_one_selection()
    files = {one.partition(":")[0] for one in frames}
    listing = "\n".join(["", *frames, f"{len(frames)} frames in {len(files)} files"])
    assert len(frames) <= FRAMES_MAX, listing
    assert len(files) <= FILES_MAX, listing
