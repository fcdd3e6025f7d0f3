"""`select-sim calibrate`: an engine's times out of what was measured of it.

The simulated engine's formula is fitted to means of runs: the time between tokens by the requests
that decode, what they attend to, and the prompts that are computed in between; the first token by
the prompt's own time, where few run. A term that the runs do not bear out is left out. The result
is a directory in the planner's format, for `--engine profile=DIR` and for the planner itself.
"""

from __future__ import annotations

import math
import sys
from codecs import BOM_UTF8
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from select_service.core.recording.items import MAGIC, ReservationStep
from select_service.settings.command_line import read_section
from select_service.simulator.command_options import CalibrateOptions
from select_service.simulator.comparison import as_text
from select_service.simulator.core.latency import AnalyticLatency
from select_service.simulator.measured_points import BadResult, Point, read_points
from select_service.simulator.profiles import write_profile
from select_service.simulator.recordings import files_of, play

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

_TERMS: Final = AnalyticLatency.__slots__
_FEW: Final = 1.5
"""Requests at a time, as a multiple of the fewest, up to which a first token is no queue's."""

_BETTER: Final = 0.98
"""A further term must take the error to this share of it: fewer terms guess better elsewhere."""


class Calibration(NamedTuple):
    """Times of an engine, and what they make of each point: first token, between tokens."""

    latency: AnalyticLatency
    fitted: list[tuple[float, float]]


def execute(args: Namespace) -> int:
    """Run the command; returns the exit code.

    Raises:
        BadResult, BadRecording, OSError: a file cannot be read.
        ValueError: they do not say enough.
        NotWritten: the profile cannot be written.
    """
    options = read_section(CalibrateOptions, args)
    points = [point for path in args.files for point in _read(path)]
    found = fit(points)
    head = ["isl", "osl", "at a time", "TTFT, ms", "fitted", "ITL, ms", "fitted"]
    rows = [
        [
            f"{one.isl:.0f}",
            f"{one.osl:.0f}",
            f"{one.concurrency:.1f}",
            f"{1e3 * one.ttft_s:.1f}",
            f"{1e3 * ttft_s:.1f}",
            f"{1e3 * one.itl_s:.2f}",
            f"{1e3 * itl_s:.2f}",
        ]
        for one, (ttft_s, itl_s) in zip(points, found.fitted, strict=True)
    ]
    terms = ",".join(f"{name}={getattr(found.latency, name):.4g}" for name in _TERMS)
    sys.stdout.write(as_text(head, rows))
    longest = max(one.isl + one.osl for one in points)
    write_profile(Path(options.out), found.latency, options.kv_tokens, int(longest))
    sys.stdout.write(f"\n{terms}\n--engine profile={options.out}\n")
    return 0


def _read(path: str) -> list[Point]:
    """Read JSON of a load generator, or a recording.

    Raises:
        BadResult, BadRecording, OSError: it is neither, or cannot be read.
    """
    if Path(path).is_file():
        with Path(path).open("rb") as file:
            begin = file.read(64).removeprefix(BOM_UTF8).lstrip()
        if begin[:1] in (b"{", b"[", b""):
            return read_points(path)
        if not begin.startswith(MAGIC[: len(begin)]):
            raise BadResult(
                f"{path} begins with {begin[:20].decode(errors='replace')!r}: neither JSON of "
                "vLLM's bench, guidellm or AIPerf, nor a recording (select-service --record FILE)"
            )
    return recorded_points(path)


def fit(points: Sequence[Point]) -> Calibration:
    """Fit the formula to points.

    Raises:
        ValueError: they say too little.
    """
    if len(points) < 2:  # noqa: PLR2004 - one of few requests, one of many
        raise ValueError("one run is not enough: give several, with few and with many at a time")
    between = np.array([_between(one) for one in points])
    first = np.array([_first(one) for one in points])
    # with many at a time first tokens come when queues allow, which no term of a step says
    few = _FEW * min(one.concurrency for one in points)
    alone = [at for at, one in enumerate(points) if one.concurrency <= few]
    rows = np.vstack([between, first[alone]])
    measured = np.array(
        [one.itl_s for one in points] + [points[at].ttft_s - _wait_s(points[at]) for at in alone]
    )
    if not (measured > 0.0).all():
        raise ValueError("a first token is sooner than a step: are its times of another unit?")
    values = _solved(rows / measured[:, None])
    latency = AnalyticLatency(**dict(zip(_TERMS, values.tolist(), strict=True)))
    fitted = [
        (float(a @ values) + _wait_s(one), float(b @ values))
        for one, a, b in zip(points, first, between, strict=True)
    ]
    return Calibration(latency, fitted)


def _between(one: Point) -> list[float]:
    """Return what multiplies each term of a step: of those that decode, and prompts of others."""
    seconds = one.ttft_s + one.osl * one.itl_s
    decoding = one.concurrency * one.osl * one.itl_s / seconds
    context = decoding * (one.isl + one.osl / 2)
    others = max(one.concurrency - 1.0, 0.0) / seconds * one.itl_s  # prompts in a step
    new, pairs = one.computed
    return [1.0, others * new, others * pairs, max(decoding, 1.0), context]


def _first(one: Point) -> list[float]:
    """Return what multiplies each term of the step that computes a prompt."""
    return [1.0, *one.computed, 0.0, 0.0]


def _wait_s(one: Point) -> float:
    """Return the rest of the step that is in progress where others are."""
    return 0.5 * one.itl_s * max(one.concurrency - 1.0, 0.0) / one.concurrency


def _solved(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the values, none below 0, whose relative errors are least; few terms before many."""
    wanted = np.ones(len(rows))
    best, least = np.zeros(len(_TERMS)), float("inf")
    for number in range(1, len(_TERMS) + 1):
        here, here_least = best, least
        for chosen in combinations(range(len(_TERMS)), number):
            if not {0, 3} & set(chosen):
                continue  # a step takes time
            some = rows[:, chosen]
            scale = np.linalg.norm(some, axis=0)
            if not scale.all():
                continue
            values = np.linalg.lstsq(some / scale, wanted, rcond=None)[0] / scale
            error = float(np.sum((some @ values - wanted) ** 2))
            if (values >= 0.0).all() and error < here_least:
                here, here_least = np.zeros(len(_TERMS)), error
                here[list(chosen)] = values
        if here_least < _BETTER * least:
            best, least = here, here_least
    return best


# What a recording of the service says of its engines: lives of reservations, as points of a fit. A
# reservation shows when its prompt was placed and computed, how much of it was cached, and when its
# answer ended, with so many blocks. Lives that were alike are one point: by prompt to compute and
# by how many were on the rank, each to a factor of two.

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
        ValueError: no reservation in it shows enough.
    """
    steps = (
        (one.recorded_file.fleet(one.item.scope).block_size, one.item)
        if one.item.scope is not None
        else (0, one.item)
        for one in play(files_of(Path(path)))
        if isinstance(one.item, ReservationStep)
    )
    points = points_of_lives(steps)
    if not points:
        raise ValueError(
            f"{path}: fewer than {_ALIKE_MIN} reservations that are alike report their first "
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
