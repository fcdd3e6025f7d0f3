"""Repeats a recording: are its decisions the same, and what would other weights have done?

Every decision is made by the real code from its recorded inputs (`core/decision_replay.py`), with
other weights from the same inputs. This is open-loop: loads, caches and candidates stay as
recorded, whatever the other weights would have made of them. `replay_findings.py` holds the
results.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

import numpy as np
from typing_extensions import override

from select_service.core.ledger.loads import ranks_in
from select_service.core.recording.decoder import BadRecording, DamagedFile, RecordedFile
from select_service.core.recording.items import (
    Asked,
    Decided,
    Events,
    Gap,
    PlannedBatch,
    ReservationStep,
    SettingsChange,
    SlotsChange,
)
from select_service.simulator.core.decision_replay import (
    DecisionReplay,
    changed_weights,
    recorded_choice,
)
from select_service.simulator.recordings import play
from select_service.simulator.replay_findings import (
    RankWork,
    RecordingGap,
    ReplayDifference,
    ReplayPlace,
    ReplayResult,
    Spread,
    WhatIf,
)
from select_service.simulator.time_series import Clock, TimeSeries

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from select_service.core.columns import Floats
    from select_service.core.recording.decoder import ScopeFleet
    from select_service.simulator.core.decision_replay import Rank, ReplayChoice, WeightsFor
    from select_service.simulator.recordings import Played

_ORDINARY: Final = Asked()


class RecordedRandom(random.Random):
    """Replays recorded draws; beyond them, draws from a seed."""

    def __init__(self, draws: Sequence[float | int], seed: int) -> None:
        self._draws = iter(draws)
        super().__init__(seed)

    @override
    def random(self) -> float:
        drawn = next(self._draws, None)
        return drawn if isinstance(drawn, float) and 0.0 <= drawn < 1.0 else super().random()

    @override
    def getrandbits(self, k: int, /) -> int:
        drawn = next(self._draws, None)
        is_fit = isinstance(drawn, int) and 0 <= drawn < 1 << k
        return int(drawn) if is_fit and drawn is not None else super().getrandbits(k)


_ITEMS_PER_LOOK: Final = 256
"""Items between two reports of the progress."""


def replay(
    files: Sequence[Path],
    changes: Mapping[str, object] | None = None,
    *,
    scope: Callable[[str, str], bool] = lambda _, __: True,
    examples: int = 10,
    progress: Callable[[float], None] = lambda _: None,
) -> ReplayResult:
    """Repeat all decisions of some files.

    Args:
        files: of one recording, in order.
        changes: weights to try as well, by name.
        scope: selects models and tenants.
        examples: changed decisions to report.
        progress: called occasionally with the bytes that were read.

    Damage ends its file: what is before it counts, and the other files.

    Raises:
        BadRecording: none of them can be read, or one holds what no service records, with file and
            offset.
        OSError: one of them does not exist.
    """
    player = _Player(files, dict(changes or {}), scope, examples)
    recorded_files: list[RecordedFile] = []
    damaged: dict[int, DamagedFile] = {}
    before = 0
    for number, path in enumerate(files):
        try:
            for at, played in enumerate(play([path], recorded_files)):
                player.take(played)
                if not at % _ITEMS_PER_LOOK:
                    progress(before + played.recorded_file.offset)
        except DamagedFile as error:
            damaged[number] = error
        before += path.stat().st_size
        progress(before)
    if damaged and all(recorded_file.header is None for recorded_file in recorded_files):
        raise next(iter(damaged.values()))
    return player.end(recorded_files, damaged)


class _Tally:
    """Work by rank."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, str, int, int], int] = {}
        self.tokens: dict[tuple[str, str, int, int], int] = {}
        self.sizes: dict[int, int] = {}
        self.total = 0

    def note(self, fleet: ScopeFleet, choice: ReplayChoice) -> None:
        rank = choice.rank if choice.prefill_rank is None else choice.prefill_rank
        assert rank is not None
        at, tokens = (*fleet.scope, *rank), choice.prefill_tokens or 0
        self.requests[at] = self.requests.get(at, 0) + 1
        self.tokens[at] = self.tokens.get(at, 0) + tokens
        size = _rough(tokens)
        self.sizes[size] = self.sizes.get(size, 0) + 1
        self.total += tokens

    def among(self, ranks: set[tuple[str, str, int, int]]) -> list[tuple[str, str, int, int]]:
        scopes = {at[:2] for at in self.requests}
        return sorted(at for at in ranks if at[:2] in scopes)

    def spread(self, ranks: set[tuple[str, str, int, int]]) -> Spread | None:
        if not self.requests:
            return None
        among = self.among(ranks)
        requests = np.array([self.requests.get(at, 0) for at in among], dtype=float)
        tokens = np.array([self.tokens.get(at, 0) for at in among], dtype=float)
        return Spread(*_evenness(requests), *_evenness(tokens))


def _rough(tokens: int) -> int:
    """Round to about three per cent, so that there are few distinct values."""
    coarse = max(0, tokens.bit_length() - 6)
    return tokens >> coarse << coarse


def _evenness(values: Floats) -> tuple[float, float]:
    mean = float(values.mean())
    return (float(values.std()) / mean, float(values.max()) / mean) if mean else (0.0, 0.0)


class _Player:
    """Processes the items in order."""

    def __init__(
        self,
        files: Sequence[Path],
        changes: dict[str, object],
        scope: Callable[[str, str], bool],
        examples: int,
    ) -> None:
        self.result = ReplayResult(list(map(str, files)), [], 0.0)
        self._changes = changes
        self._is_meant = scope
        self._examples_max = examples
        self._stages: dict[int, DecisionReplay] = {}
        self._recorded_file: RecordedFile | None = None
        self._clock, self._course = Clock(), TimeSeries()
        self._ranks: set[tuple[str, str, int, int]] = set()
        self._then, self._now = _Tally(), _Tally()
        self._isl_tokens = 0
        if changes:
            self.result.what_if = WhatIf(changes)
        self._as_was: WeightsFor
        self._other: WeightsFor | None = None

    def take(self, played: Played) -> None:
        """Process one item."""
        recorded_file, path, item = played
        if recorded_file is not self._recorded_file:
            self._open(recorded_file, path)
        result = self.result
        if isinstance(item, Decided):
            self._guarded(path, lambda: self._decided(recorded_file, path, item))
        elif isinstance(item, PlannedBatch):
            self._guarded(path, lambda: self._batch(recorded_file, path, item))
        elif isinstance(item, ReservationStep):
            result.life[item.what] = result.life.get(item.what, 0) + 1
        elif isinstance(item, Events):
            for what, *_ in item.events:
                result.events[what] = result.events.get(what, 0) + 1
        elif isinstance(item, SlotsChange):
            scope = item.model_name, item.tenant_id
            for one in item.workers:
                self._ranks.update((*scope, one.spec.worker_id, rank) for rank, _ in one.slots)
        elif isinstance(item, Gap):
            why = "workers" if item.why == "seats" else item.why  # as early files have it
            result.missing.append(RecordingGap(str(path), why, item.notes))
        else:
            result.changes += isinstance(item, SettingsChange)

    def _guarded(self, path: Path, step: Callable[[], None]) -> None:
        """Run a step; report errors of the core as faults of the file."""
        try:
            step()
        except BadRecording as error:
            where = f"{path}, decision {self.result.decisions + 1}"
            raise BadRecording(f"{where}: {error}") from None
        except (ValueError, LookupError, AssertionError, ArithmeticError) as error:
            where = f"{path}, decision {self.result.decisions + 1}"
            why = f"what decided it does not fit together ({type(error).__name__}: {error})"
            raise BadRecording(f"{where}: {why}") from None

    def _open(self, recorded_file: RecordedFile, path: Path) -> None:
        before = None if self._recorded_file is None else self._recorded_file.header
        self._recorded_file = recorded_file
        header = recorded_file.header
        assert header is not None
        if before is not None and before.recording == header.recording:
            absent = header.file - before.file - 1
            if absent > 0:
                self.result.missing.append(RecordingGap(str(path), "files before it", files=absent))
        if header.service not in self.result.service:
            self.result.service.append(header.service)
        if self.result.config is None:
            self.result.config = header.config
        self._clock.open(header)
        self._stages.clear()
        self._as_was = changed_weights(header.config, {})
        self._other = changed_weights(header.config, self._changes) if self._changes else None

    def _decision_replay(
        self, recorded_file: RecordedFile, scope: int, loads: bytes | None
    ) -> DecisionReplay:
        fleet, capacity = recorded_file.fleet(scope), ranks_in(loads or b"")
        decision_replay = self._stages.get(scope)
        if (
            decision_replay is None
            or decision_replay.fleet is not fleet
            or decision_replay.capacity != capacity
        ):
            assert recorded_file.header is not None
            decision_replay = self._stages[scope] = DecisionReplay(
                fleet, capacity, recorded_file.header.config
            )
        return decision_replay

    # -- single decisions ------------------------------------------------------------------------

    def _decided(self, recorded_file: RecordedFile, path: Path, item: Decided) -> None:
        fleet = recorded_file.fleet(item.scope)
        if not self._is_meant(*fleet.scope):
            return
        result = self.result
        decision_replay = self._decision_replay(recorded_file, item.scope, item.load.whole)
        recorded = recorded_choice(decision_replay, item)
        asked, seed = item.asked or _ORDINARY, result.decisions
        weights = self._as_was(item.weights, asked)
        again = decision_replay.choose(item, weights, RecordedRandom(item.draws, seed))
        part = self._course.at(self._clock.since(item.at))
        result.decisions += 1
        self._count(recorded)
        part.decided[recorded.kind] = part.decided.get(recorded.kind, 0) + 1
        if again.where == recorded.where:
            result.reproduced += 1
        else:
            result.differing += 1
            if result.first_difference is None:
                result.first_difference = self._difference(path, fleet, item, recorded, again)
        if self._other is None or again.rank is None or item.in_batch:
            return
        weights = self._other(item.weights, asked)
        other = decision_replay.choose(item, weights, RecordedRandom(item.draws, seed))
        self._compare(path, fleet, item, again, other)

    def _compare(
        self,
        path: Path,
        fleet: ScopeFleet,
        item: Decided,
        again: ReplayChoice,
        other: ReplayChoice,
    ) -> None:
        what_if = self.result.what_if
        assert what_if is not None, "there are other weights"
        what_if.decisions += 1
        what_if.in_session += item.in_session
        isl = item.prompt.isl_tokens
        self._then.note(fleet, again)
        if other.rank is not None:
            self._now.note(fleet, other)
        self._isl_tokens += isl
        part = self._course.at(self._clock.since(item.at))
        part.compared += 1
        part.prompt_tokens += isl
        part.prefill_tokens_recorded += again.prefill_tokens or 0
        part.prefill_tokens += other.prefill_tokens or 0
        if other.where != again.where:
            what_if.changed += 1
            part.changed += 1
            if len(what_if.examples) < self._examples_max:
                what_if.examples.append(self._difference(path, fleet, item, again, other))

    def _count(self, choice: ReplayChoice) -> None:
        result = self.result
        if choice.kind == "placed":
            result.placed += 1
        elif choice.kind == "pair":
            result.pairs += 1
        elif choice.kind == "cache_threshold":
            result.cache_thresholds += 1
        else:
            result.refused[choice.code] = result.refused.get(choice.code, 0) + 1

    def _difference(
        self,
        path: Path,
        fleet: ScopeFleet,
        item: Decided,
        recorded: ReplayChoice,
        again: ReplayChoice,
    ) -> ReplayDifference:
        rows = item.rows
        return ReplayDifference(
            file=str(path),
            decision=self.result.decisions,
            at_s=self._clock.since(item.at),
            model_name=fleet.scope.model_name,
            tenant_id=fleet.scope.tenant_id,
            selection_id=item.selection_id,
            reservation_id=item.reservation_id,
            isl_tokens=item.prompt.isl_tokens,
            candidates=len(rows) // 4 if isinstance(rows, bytes) else rows or 0,
            recorded=_place(recorded),
            replayed=_place(again),
        )

    # -- batches -----------------------------------------------------------------------------------

    def _batch(self, recorded_file: RecordedFile, path: Path, item: PlannedBatch) -> None:
        fleet = recorded_file.fleet(item.scope)
        if not item.steps or not self._is_meant(*fleet.scope):
            return
        result = self.result
        decision_replay = self._decision_replay(recorded_file, item.scope, item.steps[0].load.whole)
        seed = result.decisions
        made = decision_replay.plan(
            item, self._as_was, lambda step: RecordedRandom(step.draws, seed)
        )
        result.batches += 1
        result.batch_members += len(item.members)
        for number, rank in made.recorded.items():
            result.decisions += 1
            if made.planned.get(number) == rank:
                result.reproduced += 1
                continue
            result.differing += 1
            if result.first_difference is None:
                there = made.planned.get(number)
                result.first_difference = self._moved_member(path, fleet, item, number, rank, there)
        if self._other is not None and result.what_if is not None:
            other = decision_replay.plan(
                item, self._other, lambda step: RecordedRandom(step.draws, seed)
            )
            result.what_if.batch_members += len(item.members)
            result.what_if.batch_members_moved += sum(
                other.planned.get(number) != rank for number, rank in made.planned.items()
            )

    def _moved_member(
        self,
        path: Path,
        fleet: ScopeFleet,
        item: PlannedBatch,
        number: int,
        then: Rank,
        now: Rank | None,
    ) -> ReplayDifference:
        member = next(one for one in item.members if one.number == number)
        rows = member.rows
        return ReplayDifference(
            file=str(path),
            decision=self.result.decisions,
            at_s=self._clock.since(item.at),
            model_name=fleet.scope.model_name,
            tenant_id=fleet.scope.tenant_id,
            selection_id=None,
            reservation_id=None,
            isl_tokens=item.prompts[member.prompt].isl_tokens,
            candidates=len(rows) // 4 if isinstance(rows, bytes) else rows,
            recorded=ReplayPlace("planned", *then),
            replayed=ReplayPlace("unplanned") if now is None else ReplayPlace("planned", *now),
            batch_member=number,
        )

    # -- the end ---------------------------------------------------------------------------------

    def end(
        self, recorded_files: Sequence[RecordedFile], damaged: Mapping[int, DamagedFile]
    ) -> ReplayResult:
        """Return the results.

        Args:
            recorded_files: of all files, read as far as possible.
            damaged: what ended some of them, by position.
        """
        result = self.result
        result.seconds = self._clock.latest
        result.course = self._course.parts(result.seconds)
        result.is_damaged = bool(damaged)
        for number, (name, recorded_file) in enumerate(
            zip(result.files, recorded_files, strict=True)
        ):
            why = _why_incomplete(recorded_file, damaged.get(number))
            if why is not None:
                result.missing.append(RecordingGap(name, why))
        if result.what_if is not None:
            self._conclude(result.what_if)
        return result

    def _conclude(self, what_if: WhatIf) -> None:
        """Add what follows from all that was compared."""
        then, now = self._then, self._now
        if what_if.decisions:
            what_if.agreement = 1.0 - what_if.changed / what_if.decisions
        what_if.prefill_tokens_recorded, what_if.prefill_tokens = then.total, now.total
        what_if.cached_tokens_recorded = self._isl_tokens - then.total
        what_if.cached_tokens = self._isl_tokens - now.total
        what_if.spread_recorded = then.spread(self._ranks)
        what_if.spread = now.spread(self._ranks)
        what_if.ranks = [_rank_work(at, then, now) for at in then.among(self._ranks)]
        what_if.sizes = [
            (size, then.sizes.get(size, 0), now.sizes.get(size, 0))
            for size in sorted(then.sizes.keys() | now.sizes.keys())
        ]


def _why_incomplete(recorded_file: RecordedFile, damage: DamagedFile | None) -> str | None:
    """Return why a file ends too early; None: it does not."""
    if damage is not None:
        return f"damaged, frame at byte {damage.at}: {damage.why}"
    if recorded_file.is_torn:
        return "cut off"
    return None if recorded_file.is_ended else "killed, cut off, or still recording"


def _rank_work(at: tuple[str, str, int, int], then: _Tally, now: _Tally) -> RankWork:
    counts = (then.requests, now.requests, then.tokens, now.tokens)
    return RankWork(*at, *(one.get(at, 0) for one in counts))


def _place(choice: ReplayChoice) -> ReplayPlace:
    worker_id, dp_rank = (None, None) if choice.rank is None else choice.rank
    prefill_worker_id, prefill_dp_rank = (
        (None, None) if choice.prefill_rank is None else choice.prefill_rank
    )
    return ReplayPlace(
        outcome=choice.kind,
        worker_id=worker_id,
        dp_rank=dp_rank,
        prefill_worker_id=prefill_worker_id,
        prefill_dp_rank=prefill_dp_rank,
        code=choice.code or None,
        cost=choice.cost,
        prefill_tokens=choice.prefill_tokens,
    )
