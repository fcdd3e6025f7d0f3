"""Packs notes into bytes: whatever is unchanged since the last note of a file is not repeated.

Runs in the writer's thread, one item at a time; of files it knows only where one begins.
`decoder.py` is the inverse.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
from msgspec import UNSET

from indexer.core.events import BlockRemoved, BlockStored
from indexer.core.wire import BatchDecoder
from select_service.core.recording.items import (
    CHUNK_BYTES,
    CHUNKS_MAX,
    LENGTH,
    Asked,
    AttachedWorker,
    Column,
    Decided,
    Events,
    Gap,
    Pair,
    PlannedBatch,
    Prompted,
    RecordedMatches,
    RecordedMember,
    ReservationStep,
    SettingsChange,
    SlotsChange,
    Step,
)
from select_service.core.recording.notes import (
    BatchNote,
    BirthNote,
    ChangeNote,
    DecisionNote,
    EventNote,
    SlotsNote,
)
from select_service.types import SelectPairRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from indexer.core.events import Event
    from indexer.types import Scope
    from select_service.core.columns import Rows, Slots
    from select_service.core.decisions.record import UnusualFacts
    from select_service.core.pricing.cost import TierMatches as FoundNow
    from select_service.core.pricing.placement import Seen
    from select_service.core.pricing.prompt import Prompt
    from select_service.core.recording.items import Item
    from select_service.core.recording.notes import Attached, Note
    from select_service.types import SelectRequest

TEXT_MAX: Final = 256
"""Characters written of an id; a selection's id may be as long as a body."""

SEATS_PER_ITEM: Final = 32
"""Workers per item, so that writing one item is quick."""

EVENTS_AT_ONCE: Final = 64
MEMBERS_AT_ONCE: Final = 16
"""Events of a message, and members or steps of a batch, packed between two pauses."""

_VALUE: Final = 8  # bytes
_DIFFERENCE: Final = 12  # bytes of a changed value with its position
_LIVE_FRAMES: Final = 3

_encode = msgspec.msgpack.Encoder().encode

_ORDINARY = Asked()


def message(item: Item) -> bytes:
    """Return an item in the form it has in a frame."""
    body = _encode(item)
    return LENGTH.pack(len(body)) + body


class Packer:
    """Packs the items of successive files."""

    def __init__(self) -> None:
        # the latest of each scope, in whatever file it was
        self._slots: dict[Scope, SlotsNote] = {}
        self.begin()

    def begin(self) -> None:
        """Start a new file, or restart after lost writes: the reader knows nothing."""
        self._scopes: dict[Scope, int] = {}
        self._written: dict[Scope, dict[int, Attached]] = {}
        self._columns: dict[tuple[str, int], bytes] = {}
        self._chunks: dict[bytes, int] = {}

    def pack(self, note: Note) -> Iterator[Item | None]:
        """Yield the items of a note, in order; None where others should get a turn."""
        if isinstance(note, ReservationStep | Gap):
            yield note
        elif isinstance(note, DecisionNote):
            yield from self._name(note.scope)
            yield self._decided(note)
        elif isinstance(note, BirthNote):
            yield from self._name(note.scope)
            yield self._born(note)
        elif isinstance(note, EventNote):
            yield from self._name(note.scope)
            yield from self._events(note)
        elif isinstance(note, SlotsNote):
            self._slots[note.scope] = note
            yield from self._attached(note)
        elif isinstance(note, BatchNote):
            yield from self._name(note.scope)
            yield from self._batch(note)
        else:
            assert isinstance(note, ChangeNote)
            yield SettingsChange(note.at, note.what, note.values)

    # -- fleet ---------------------------------------------------------------------------------

    def _name(self, scope: Scope) -> Iterator[Item]:
        """Write the fleet of a scope, if this file does not have it yet."""
        if scope not in self._scopes:
            yield from self._attached(self._slots.get(scope) or SlotsNote(scope, 0, ()))

    def _attached(self, note: SlotsNote) -> Iterator[Item]:
        is_new = note.scope not in self._scopes
        number = self._scopes.setdefault(note.scope, len(self._scopes))
        known = self._written.setdefault(note.scope, {})
        now = {attached[0].worker_id: attached for attached in note.workers}
        gone = [worker_id for worker_id in known if worker_id not in now]
        fresh = [one for worker_id, one in now.items() if not _is_same(known.get(worker_id), one)]
        self._written[note.scope] = now
        for start in range(0, max(1, len(fresh)), SEATS_PER_ITEM):
            yield SlotsChange(
                number,
                *note.scope,
                note.block_size,
                [
                    AttachedWorker(one, list(slots), why)
                    for one, slots, why in fresh[start:][:SEATS_PER_ITEM]
                ],
                [] if start else gone,
                is_new and not start,
            )

    # -- decisions -------------------------------------------------------------------------------

    def _decided(self, note: DecisionNote) -> Decided:
        scope, unusual = self._scopes[note.scope], note.unusual
        columns, found, shared, trust = note.seen
        request = note.request
        return Decided(
            note.at,
            note.since,
            scope,
            None if note.rows is None else _rows(note.rows),
            self._column("load", scope, columns),
            _found(found),
            None if shared is None else _groups(shared),
            None if trust is None else self._column("trust", scope, trust),
            self._prompt(note.prompt),
            list(note.weights),
            note.slot,
            _short(request.selection_id),
            _short(note.reservation_id),
            _asked(request),
            list(note.draws),
            _pair(note, unusual),
            note.thresholds,
            None if unusual is None or unusual.refusal is None else unusual.refusal.code,
            unusual is not None and unusual.is_threshold,
            note.in_batch,
            isinstance(request, SelectPairRequest),
            note.in_session,
        )

    def _batch(self, note: BatchNote) -> Iterator[Item | None]:
        scope = self._scopes[note.scope]
        places: dict[int, int] = {}
        prompts: list[Prompted] = []
        members: list[RecordedMember] = []
        for number, prompt, request, weights, rows in note.members:
            if id(prompt) not in places:
                places[id(prompt)] = len(prompts)
                prompts.append(self._prompt(prompt))
            at = places[id(prompt)]
            members.append(RecordedMember(number, at, list(weights), _rows(rows), _asked(request)))
            if len(members) % MEMBERS_AT_ONCE == 0:
                yield None
        steps: list[Step] = []
        for step in note.steps:
            load = self._column("load", scope, step.columns)
            requests = self._column("requests", scope, step.requests)
            looked = [self._looked(scope, number, seen) for number, seen in step.looked]
            steps.append(Step(load, requests, looked, list(step.draws), step.planned_ranks))
            if len(steps) % MEMBERS_AT_ONCE == 0:
                yield None
        limits = note.load_limit, note.keep_together
        counted = note.planned_at, note.sequence_blocks
        yield PlannedBatch(note.at, scope, *limits, prompts, members, steps, *counted)

    def _looked(
        self, scope: int, number: int, seen: Seen
    ) -> tuple[int, RecordedMatches | None, list[tuple[int, bytes]] | None, Column | None]:
        _, found, shared, trust = seen
        return (
            number,
            _found(found),
            None if shared is None else _groups(shared),
            None if trust is None else self._column("trust", scope, trust),
        )

    def _column(self, kind: str, scope: int, now: bytes) -> Column:
        """Return the differences from the last column of its kind."""
        before = self._columns.get((kind, scope))
        if before is now:
            return Column()
        self._columns[kind, scope] = now
        if before is None or len(before) != len(now):
            return Column(now)
        values = np.frombuffer(now, np.uint64)
        at = np.flatnonzero(values != np.frombuffer(before, np.uint64))
        if len(at) * _DIFFERENCE >= len(now):
            return Column(now)
        return Column(None, at.astype("<u4").tobytes(), values[at].tobytes())

    def _prompt(self, prompt: Prompt) -> Prompted:
        hashes, chunks = prompt.block_hashes, self._chunks
        written: list[int | bytes] = []
        for start in range(0, len(hashes), CHUNK_BYTES):
            chunk = hashes[start : start + CHUNK_BYTES]
            known = chunks.get(chunk)
            written.append(chunk if known is None else known)
            if known is None and len(chunk) == CHUNK_BYTES:
                if len(chunks) >= CHUNKS_MAX:
                    chunks.clear()
                chunks[chunk] = len(chunks)
        return Prompted(written, prompt.isl_tokens)

    # -- the rest --------------------------------------------------------------------------------

    def _born(self, note: BirthNote) -> ReservationStep:
        name, scope = note.reservation_id[:TEXT_MAX], self._scopes[note.scope]
        facts = note.worker_id, note.dp_rank, note.prefill_tokens, note.isl_tokens
        return ReservationStep(note.at, note.what, name, scope, *facts)

    def _events(self, note: EventNote) -> Iterator[Item | None]:
        """Decode a message; tokens are left out."""
        scope, frames = self._scopes[note.scope], note.frames
        seq, events = -1, []
        if len(frames) >= _LIVE_FRAMES and len(frames[-2]) == _VALUE:
            seq = int.from_bytes(frames[-2], "big", signed=True)
            payload, decoder = frames[-1], BatchDecoder(is_eagle=note.is_eagle)
            while not decoder.read_ahead(payload):
                yield None
            batch = decoder.decode(payload)
            for event in () if batch is None else batch.events:
                events.append(_event(event))
                if len(events) % EVENTS_AT_ONCE == 0:
                    yield None
        yield Events(note.at, scope, *note.rank, seq, note.is_replay, events)


def _is_same(one: Attached | None, other: Attached) -> bool:
    return one is not None and one[0] is other[0] and one[1:] == other[1:]


def _event(event: Event) -> tuple[str, bytes, int | None, int | None, int]:
    if isinstance(event, BlockStored):
        tier = None if event.tier is None else int(event.tier)
        return "stored", _names(event.block_hashes), event.parent, tier, event.group
    if isinstance(event, BlockRemoved):
        tier = None if event.tier is None else int(event.tier)
        return "removed", _names(event.block_hashes), None, tier, event.group
    return event.kind, b"", None, None, 0


def _names(names: Sequence[int] | memoryview[int]) -> bytes:
    return np.array(names, dtype="<u8").tobytes()


def _rows(rows: Rows) -> int | bytes:
    return rows.stop if isinstance(rows, slice) else _slots(rows)


def _slots(slots: Slots) -> bytes:
    return slots.astype("<u4").tobytes()


def _groups(groups: list[tuple[int, Slots]]) -> list[tuple[int, bytes]]:
    return [(int(blocks), _slots(slots)) for blocks, slots in groups]


def _found(found: FoundNow | None) -> RecordedMatches | None:
    if found is None:
        return None
    pulls = None if found.pulls is None else np.array(found.pulls, dtype="<f8").tobytes()
    return RecordedMatches(_groups(found.device), _groups(found.host), _groups(found.disk), pulls)


def _pair(note: DecisionNote, unusual: UnusualFacts | None) -> Pair | None:
    if unusual is None or unusual.plan is None or unusual.legs is None:
        return None
    couple = None if note.couple is None else (note.couple.prefill_slot, note.couple.decode_slot)
    whole, prefill, decode = map(_slots, unusual.legs)
    return Pair(whole, prefill, decode, unusual.plan.mode, couple)


def _asked(request: SelectRequest) -> Asked | None:
    """Return the unusual options of a request; None: it has none."""
    constraints, pinned = request.routing_constraints, request.pinned_worker
    asked = Asked(
        None if pinned is None else (pinned.worker_id, pinned.dp_rank),
        request.allowed_worker_ids,
        override=request.router_config_override,
        cache_hit_threshold=request.cache_hit_threshold,
        cache_hit_scope=request.cache_hit_scope,
        cache_hit_basis=request.cache_hit_basis,
        on_cache_threshold=request.on_cache_threshold,
        attempt=request.attempt,
        expected_output_tokens=request.expected_output_tokens,
        slo_class=_short(request.slo_class),
        slo_ttft_ms=request.slo_ttft_ms,
        priority=request.priority,
        fairness_id=_short(request.fairness_id),
        session_id=_short(request.session_id),
    )
    if constraints is not UNSET:
        asked.has_constraints = True
        asked.required_taints = constraints.required_taints
        asked.preferred_taints = constraints.preferred_taints
    return None if asked == _ORDINARY else asked


def _short(text: str | None) -> str | None:
    return text if text is None else text[:TEXT_MAX]
