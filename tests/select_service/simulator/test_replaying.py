"""A replay makes every decision again, and says so of no decision that it does not."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from select_service.core.tape.items import Decided, Wave
from select_service.core.tape.reading import BadRecording, Tape
from select_service.simulator.recordings import files_of, play, requests_of
from select_service.simulator.replaying import Replay, replay
from tests.models.recorded_fleet import RecordedFleet


def made_again(fleet: RecordedFleet, folder: Path, **changes: object) -> Replay:
    return replay([fleet.tape.into(folder / "recording")], changes)


@pytest.mark.parametrize("seed", range(12))
def test_every_decision_of_a_random_service_is_made_again(tmp_path: Path, seed: int) -> None:
    fleet = RecordedFleet(seed)
    fleet.play(250)
    told = made_again(fleet, tmp_path)
    assert told.first_difference is None
    assert told.reproduced == told.decisions > 50
    assert not told.missing


def test_what_is_recorded_is_what_callers_were_answered(tmp_path: Path) -> None:
    kinds: Counter[str] = Counter()
    for seed in range(6):
        fleet = RecordedFleet(seed)
        fleet.play(200)
        path = fleet.tape.into(tmp_path / f"recording{seed}")
        told = replay([path])
        answers = Counter(answer[0] for answer in fleet.answers)
        single = [one.item for one in play([path]) if isinstance(one.item, Decided)]
        alone = [one for one in single if not one.in_wave and one.refused is None]
        asked = [one for one in fleet.answers if one[0] != "refused"]
        assert len(alone) == len(asked)
        assert told.cache_thresholds >= answers["cache_threshold"]
        kinds.update(answers)
        kinds["waves"] += told.waves
        kinds["queued"] += sum(one.since >= 0.0 for one in single)
        kinds["trust"] += sum(one.trust is not None for one in single)
        kinds["tiers"] += sum(bool(one.found and (one.found.host or one.found.disk)) for one in single)
        kinds["draws"] += sum(bool(one.draws) for one in single)
        kinds["shared"] += sum(one.shared is not None for one in single)
    wanted = {"placed", "pair", "refused", "cache_threshold", "waves", "queued", "trust", "tiers"}
    assert all(kinds[kind] for kind in wanted | {"draws", "shared"}), kinds
