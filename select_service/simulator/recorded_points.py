"""What a recording of the service says of its engines: lives of reservations, as points of a fit.

A reservation tells when its prompt was placed and computed, how much of it was cached, and when its
answer ended, with so many blocks. Lives that were alike are one point: by prompt to compute and by
how many were on the rank, each to a factor of two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from select_service.core.recording.items import ReservationStep
from select_service.simulator.measured_points import Point
from select_service.simulator.recordings import files_of, play

if TYPE_CHECKING:
    from collections.abc import Iterable

_ALIKE_MIN: Final = 5
"""Lives of a point; fewer are chance."""

_BEGINNINGS: Final = frozenset({"booked", "learnt"})
_ENDS: Final = frozenset({"freed", "told"})
_LOST: Final = frozenset({"expired", "lease_ended", "dropped"})  # how long they took says nothing


@dataclass(slots=True)
class _Rank:
    """The requests on a rank: how many, and summed over time."""

    count: int = 0
    seconds: float = 0.0
    at: float = 0.0

    def change(self, by: int, now: float) -> float:
        """Add requests; returns the request-seconds until now."""
        self.seconds += self.count * (now - self.at)
        self.at = now
        self.count += by
        return self.seconds


@dataclass(slots=True)
class _Life:
    rank: _Rank
    at: float
    isl: int
    new: int
    block_size: int
    before: float  # request-seconds of its rank
    first: float | None = None


def recorded_points(path: str) -> list[Point]:
    """Return the points of all files of a recording.

    Raises:
        BadRecording, OSError: it cannot be read.
        ValueError: no reservation in it tells enough.
    """
    steps = (
        (one.recorded_file.house(one.item.scope).block_size, one.item)
        if one.item.scope is not None
        else (0, one.item)
        for one in play(files_of(Path(path)))
        if isinstance(one.item, ReservationStep)
    )
    points = points_of_lives(steps)
    if not points:
        raise ValueError(
            f"{path}: fewer than {_ALIKE_MIN} reservations that are alike told of their first "
            "token (prefill_complete), their output (output_block) and their end"
        )
    return points


def points_of_lives(steps: Iterable[tuple[int, ReservationStep]]) -> list[Point]:
    """Return the points of reservations, given as steps with the block size where they begin."""
    ranks: dict[tuple[int | None, int | None], _Rank] = {}
    lives: dict[str, _Life] = {}
    found: dict[tuple[int, int], list[Point]] = {}
    for block_size, step in steps:
        name, now = step.reservation_id, step.at
        if step.what in _BEGINNINGS:
            rank = ranks.setdefault((step.worker_id, step.dp_rank), _Rank())
            before = rank.change(1, now)
            new = max(1, min(step.amount, step.isl_tokens))
            lives[name] = _Life(rank, now, step.isl_tokens, new, block_size, before)
        elif name in lives and step.what == "prefill_complete":
            lives[name].first = now
        elif name in lives and step.what in _ENDS | _LOST:
            life = lives.pop(name)
            seconds = life.rank.change(-1, now) - life.before
            osl = step.amount * life.block_size
            if step.what in _ENDS and osl > 1 and life.first is not None and now > life.first:
                one = Point(
                    isl=life.isl,
                    osl=osl,
                    concurrency=max(1.0, seconds / (now - life.at)),
                    ttft_s=life.first - life.at,
                    itl_s=(now - life.first) / (osl - 1),
                    cached=life.isl - life.new,
                )
                place = round(math.log2(life.new)), round(math.log2(one.concurrency))
                found.setdefault(place, []).append(one)
    return [
        Point(*(sum(values) / len(alike) for values in zip(*alike, strict=True)))
        for _, alike in sorted(found.items())
        if len(alike) >= _ALIKE_MIN
    ]
