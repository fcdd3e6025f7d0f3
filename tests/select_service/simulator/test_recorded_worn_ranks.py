"""Which ranks are worn is recorded with each decision, and decides it again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from select_service.core.ledger.loads import unpacked
from select_service.core.ledger.rank_speeds import RankSpeeds
from select_service.core.recording.items import Decided
from select_service.simulator.recording_replay import replay
from select_service.simulator.recordings import play
from tests.models.recorded_fleet import RecordedFleet

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def slow(speeds: RankSpeeds) -> dict[int, float]:
    """Nearly all that were measured, one more than the other."""
    return {slot: 2.5 + slot % 3 for slot in speeds.by_slot}


def test_ranks_that_are_worn_decide_what_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not learnt again: whoever replays has no lifecycle calls."""
    worn = otherwise = 0
    for seed in (0, 1, 29):
        with monkeypatch.context() as patch:
            patch.setattr(RankSpeeds, "worn", slow)
            fleet = RecordedFleet(seed, block_size=64)
            fleet.play(200)
        path = fleet.recorded_file.into(tmp_path / f"recording{seed}")
        told = replay([path], {"slowness_scale": 0.0})
        assert told.first_difference is None
        assert told.reproduced == told.decisions
        assert told.what_if is not None
        otherwise += told.what_if.changed
        for one in play([path]):
            if isinstance(one.item, Decided) and one.item.load.whole is not None:
                worn += unpacked(one.item.load.whole).slowness is not None
    assert worn > 20
    assert otherwise > 0
