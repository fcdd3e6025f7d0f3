"""The planner's memory across restarts: one JSON file with a checksum, replaced as a whole.

A file that is unreadable or was changed is set aside and reported: neither trusted nor lost.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import msgspec
import xxhash

from select_service.planner.core.demand import Interval, resampled
from select_service.planner.core.engine_speed import KnownEngines, Phase
from select_service.planner.errors import PlannerError
from select_service.planner.types import ModelKey, Moments, PoolKey, PoolState, Role

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from select_service.planner.core.fleet_plan import FleetPlan

VERSION: Final = 1
"""Of the meaning of the numbers; a file of another version counts as damaged."""

_SINCE_MOST: Final = 1_000_000
"""Intervals; a longer absence means a clock that was never set."""


_SIGNED: Final = re.compile(rb'(\{.*),"checksum":"([0-9a-f]{16})"\}', re.DOTALL)
"""The checksum is the last member, over everything before it."""


class _LineMemory(msgspec.Struct):
    """Measurements, and how long before the end of the last interval the latest of them came."""

    sums: Moments
    age_s: float


class _ModelMemory(msgspec.Struct):
    model: ModelKey
    history: list[Interval]
    computed: float
    p_correction: float
    d_correction: float
    missed: int = 0
    """Unknown intervals in a row, at the end."""
    learnt: dict[Phase, _LineMemory] = {}
    """How fast its engines were measured to be."""
    engines: KnownEngines | None = None
    """What else was learnt of them; None: an older file."""


class _PoolMemory(msgspec.Struct):
    """The replicas requested, and those ready, at the time of writing."""

    model: ModelKey
    role: Role
    desired: int
    ready: int


class Memory(msgspec.Struct):
    """The contents of the file."""

    version: int = VERSION
    interval_s: float = 0.0
    """The interval of the histories; 0: an older file, taken to have the present one."""
    at: float = 0.0
    """When the last interval ended, in seconds since 1970; 0: an older file without it."""
    decision_id: int = 0
    models: list[_ModelMemory] = []
    pools: list[_PoolMemory] = []

    @property
    def states(self) -> dict[PoolKey, PoolState]:
        """The replicas of every pool."""
        return {
            PoolKey(one.model, one.role): PoolState(one.desired, one.ready) for one in self.pools
        }


class _Unsigned(Memory, forbid_unknown_fields=True):
    """As an older build wrote it, without a checksum: an unknown member may be a damaged one."""


_decode_signed: Final = msgspec.json.Decoder(Memory).decode
_decode_unsigned: Final = msgspec.json.Decoder(_Unsigned).decode


class StateFile:
    """Reads and writes the memory of one fleet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged = False
        """Whether the file that was read is damaged."""

    @property
    def aside(self) -> Path:
        """Where a damaged file goes."""
        return self.path.with_suffix(".damaged")

    def read(self, fleet: FleetPlan, at: float = 0.0) -> Memory:
        """Give a fleet its past; returns the rest of the memory.

        Args:
            fleet: to be given its past.
            at: now, in seconds since 1970, to compute the age of the past. If 0, or if the clock
                was set back, the past counts as just ended.

        Raises:
            PlannerError: the file cannot be opened, or is damaged and cannot be set aside.
        """
        try:
            memory = _decoded(self.path.read_bytes())
        except FileNotFoundError:
            return Memory()
        except OSError as error:
            raise PlannerError(f"{self.path}: {error.strerror}") from error
        if memory is None or not _makes_sense(memory):
            self.damaged = True
            try:
                os.replace(self.path, self.aside)
            except OSError as error:
                why = f"damaged, and cannot be set aside: {error.strerror}"
                raise PlannerError(f"{self.path}: {why}") from error
            return Memory()
        known = {one.model: one for one in memory.models}
        for model in fleet.models:
            if model.key in known:
                one = known[model.key]
                had_s = memory.interval_s or fleet.interval_s
                model.recall(
                    resampled(one.history, had_s, fleet.interval_s),
                    one.computed,
                    one.p_correction,
                    one.d_correction,
                    fleet.interval_s,
                    _since(memory, one, at, fleet.interval_s),
                )
                away_s, engines = _away_s(memory, at), one.engines or KnownEngines()
                model.speed.recall(
                    replace(engines, room_age_s=engines.room_age_s + away_s),
                    {phase: (line.sums, line.age_s + away_s) for phase, line in one.learnt.items()},
                    model.goals.itl_ms,
                )
        return memory

    def write(
        self,
        fleet: FleetPlan,
        decision_id: int,
        states: Mapping[PoolKey, PoolState],
        at: float = 0.0,
    ) -> None:
        """Replace the file; after a crash it is either the old or the new one.

        Args:
            fleet: to be remembered.
            decision_id: of the last decision.
            states: of pools.
            at: when its last interval ended, in seconds since 1970.

        Raises:
            PlannerError: it cannot be written.
        """
        models = [
            _ModelMemory(
                one.key,
                one.demand.history,
                one.demand.computed,
                one.p_correction.factor,
                one.d_correction.factor,
                one.demand.missed,
                {
                    phase: _LineMemory(line.sums, line.age_s)
                    for phase, line in one.speed.learnt.items()
                    if line.sums.samples
                },
                one.speed.known,
            )
            for one in fleet.models
        ]
        pools = [
            _PoolMemory(pool.model, pool.role, state.desired, state.ready)
            for pool, state in states.items()
        ]
        aside = self.path.with_suffix(".new")
        try:
            with aside.open("wb") as file:
                memory = Memory(VERSION, fleet.interval_s, at, decision_id, models, pools)
                file.write(signed(msgspec.json.encode(memory)))
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, self.path)
        except OSError as error:
            with contextlib.suppress(OSError):  # it would waste scarce space
                aside.unlink(missing_ok=True)
            raise PlannerError(f"{self.path}: {error.strerror}") from error


def signed(text: bytes) -> bytes:
    """Append the checksum to a JSON object with members."""
    body = text[:-1]
    return body + b',"checksum":"%s"}' % xxhash.xxh3_64_hexdigest(body).encode()


def _decoded(text: bytes) -> Memory | None:
    """Return the contents; None: they are not what was written."""
    found = _SIGNED.fullmatch(text)
    if found is not None and text != signed(found[1] + b"}"):
        return None
    decode = _decode_unsigned if found is None else _decode_signed
    try:
        return decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _makes_sense(memory: Memory) -> bool:
    """Whether the memory is usable: hand-written numbers may be invalid."""
    missed = (one.missed for one in memory.models)
    counts = (
        memory.decision_id,
        *missed,
        *(n for one in memory.pools for n in (one.desired, one.ready)),
    )
    return (
        memory.version == VERSION
        and memory.interval_s >= 0
        and memory.at >= 0
        and all(count >= 0 for count in counts)
        and all(map(_is_past, memory.models))
    )


def _since(memory: Memory, one: _ModelMemory, at: float, interval_s: float) -> int:
    """Return the intervals since the last known one; clocks may have been set in the meantime."""
    away_s = _away_s(memory, at)
    return round(min((away_s + one.missed * memory.interval_s) / interval_s, _SINCE_MOST))


def _away_s(memory: Memory, at: float) -> float:
    return max(0.0, at - memory.at) if memory.at else 0.0


def _is_past(one: _ModelMemory) -> bool:
    factors = [one.computed, one.p_correction, one.d_correction]
    numbers = [n for line in one.learnt.values() for n in (*line.sums, line.age_s)]
    if one.engines is not None:
        known = one.engines
        factors += [n for n in (known.kv_tokens, known.room) if n is not None]
        factors += [*known.ranks.values(), *known.wrong.values()]
        numbers.append(known.room_age_s)
    return (
        all(0 < factor < math.inf for factor in factors)
        and all(0 <= number < math.inf for number in numbers)
        and all(
            value is None or value >= 0
            for interval in one.history
            for value in (*interval[:3], *interval.parts)
        )
    )
