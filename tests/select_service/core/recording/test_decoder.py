"""What is packed is read back; what is no recording is refused, whatever it is."""

from __future__ import annotations

import contextlib
import io
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from indexer.types import Scope
from select_service.core.columns import Slots
from select_service.core.ledger.loads import COLUMNS, ranks_in
from select_service.core.pricing.cost import TierMatches
from select_service.core.pricing.prompt import prompt_of
from select_service.core.pricing.weights import weights_in_force
from select_service.core.recording import decoder, encoder
from select_service.core.recording.decoder import BadRecording, RecordedFile, hashes_of, slots_of
from select_service.core.recording.encoder import Packer, message
from select_service.core.recording.items import (
    FRAME,
    LENGTH,
    OPENING,
    Decided,
    Gap,
    Header,
    Item,
    ReservationStep,
    SettingsChange,
    SlotsChange,
)
from select_service.core.recording.notes import BirthNote, ChangeNote, DecisionNote, Note, SlotsNote
from select_service.simulator.recording_replay import replay
from select_service.types import RouterConfig, SelectRequest, WorkerSpec
from tests.effort import examples
from tests.models.recorded_fleet import RecordedFleet

WEIGHTS = weights_in_force(RouterConfig(), None)
SCOPES = [Scope("m", "t"), Scope("n", "t")]
HASHES = st.lists(st.integers(0, 5), max_size=300).map(lambda own: np.array(own, "<u8").tobytes())


def file_of(items: list[Item]) -> bytes:
    raw = b"".join(map(message, [Header("v", "r", 1, 0.0, 0.0, RouterConfig()), *items]))
    return OPENING + framed(raw)


def framed(raw: bytes) -> bytes:
    body = zlib.compress(raw, 1)
    return FRAME.pack(len(body), zlib.crc32(body)) + body


def read(data: bytes) -> list[Item]:
    return list(RecordedFile(io.BytesIO(data).read, "it"))


@st.composite
def decisions(draw: st.DrawFn) -> DecisionNote:
    ranks = draw(st.sampled_from([3, 3, 3, 5]))
    count = COLUMNS * ranks + 2
    values = st.lists(st.sampled_from([0.0, 1.0, 512.0]), min_size=count, max_size=count)
    columns = np.array(draw(values)).tobytes()
    slots = st.lists(st.integers(0, ranks - 1), unique=True, max_size=ranks).map(np.array)
    groups = st.none() | st.lists(st.tuples(st.integers(1, 99), slots), min_size=1, max_size=2)
    device, shared = draw(groups), draw(groups)
    found = (
        None if device is None else TierMatches(device, draw(groups.map(lambda one: one or [])), [])
    )
    trust = draw(st.none() | st.just(np.ones(ranks).tobytes()))
    rows = draw(st.just(slice(0, ranks)) | slots.filter(len))
    return DecisionNote(
        *(draw(st.floats(0, 9)), -1.0, draw(st.sampled_from(SCOPES)), rows),
        (columns, found, shared, trust),
        prompt_of(draw(HASHES), None, draw(st.integers(0, 1 << 60))),
        *(WEIGHTS, draw(st.integers(-1, ranks - 1))),
        SelectRequest(selection_id=draw(st.none() | st.text(max_size=3))),
        *(None, None, None, None),
        draw(st.lists(st.floats(0, 1, exclude_max=True) | st.integers(0, 9), max_size=3)),
        in_batch=draw(st.booleans()),
        in_session=draw(st.booleans()),
    )


def told_of(groups: list[tuple[int, bytes]] | None, ranks: int) -> list[Any] | None:
    return groups and [(blocks, *slots_of(slots, ranks).tolist()) for blocks, slots in groups]


def noted(groups: list[tuple[int, Slots]] | None) -> list[Any] | None:
    return groups and [(blocks, *slots.tolist()) for blocks, slots in groups]


@given(notes=st.lists(decisions() | st.none(), max_size=12))
@settings(max_examples=examples(30), deadline=None)
def test_what_differs_is_enough_to_know_all_of_it(notes: list[DecisionNote | None]) -> None:
    """None: the reader has lost what came before."""
    with pytest.MonkeyPatch.context() as patched:
        for module in (encoder, decoder):
            patched.setattr(module, "CHUNKS_MAX", 3)
        packer, expected = Packer(), list[DecisionNote]()
        items: list[Item] = []
        for note in notes:
            if note is None:
                packer.begin()
                items.append(Gap(1, "fault", resets=True))
                continue
            items += [item for item in packer.pack(note) if item is not None]
            expected.append(note)
        read_items = [one for one in read(file_of(items)) if isinstance(one, Decided)]
    assert len(read_items) == len(expected)
    for one, note in zip(read_items, expected, strict=True):
        columns, found, shared, trust = note.seen
        ranks = ranks_in(columns)
        assert one.load.whole == columns
        assert (None if one.trust is None else one.trust.whole) == trust
        assert hashes_of(one.prompt) == note.prompt.block_hashes
        assert one.prompt.isl_tokens == note.prompt.isl_tokens
        assert (one.found is None) == (found is None)
        if one.found is not None and found is not None:
            tiers = one.found.device, one.found.host, one.found.disk
            assert [told_of(tier, ranks) for tier in tiers] == [noted(tier) for tier in found[:3]]
        assert told_of(one.shared, ranks) == noted(shared)
        assert one.draws == list(note.draws)
        assert (one.slot, one.in_batch, one.at) == (note.slot, note.in_batch, note.at)
        assert one.selection_id == note.request.selection_id


def planned_ranks(*workers: tuple[int, int], drains: str | None = None) -> SlotsNote:
    specs = [(WorkerSpec(worker_id=id_), ((0, slot),), drains) for id_, slot in workers]
    return SlotsNote(SCOPES[0], 16, tuple(specs))


def test_who_sits_where_is_told_once_and_then_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "SEATS_PER_ITEM", 2)
    first = planned_ranks((1, 0), (2, 1), (3, 2))
    second = replace(first, workers=(*first.workers[1:], *planned_ranks((4, 0)).workers))
    packer = Packer()
    booked = BirthNote(1.0, "booked", "r", SCOPES[0], 2, 0, 7, 9)
    notes: list[Note] = [first, booked, second, ChangeNote(2.0, "settings", {"a": 1})]
    items = [item for note in notes for item in packer.pack(note) if item is not None]
    assert [len(one.workers) for one in items if isinstance(one, SlotsChange)] == [2, 1, 1]
    recorded_file = RecordedFile(io.BytesIO(file_of(items)).read, "it")
    read_items = list(recorded_file)
    fleet = recorded_file.fleet(0)
    assert {id_: one.slots for id_, one in fleet.workers.items()} == {
        2: [(0, 1)],
        3: [(0, 2)],
        4: [(0, 0)],
    }
    life = next(one for one in read_items if isinstance(one, ReservationStep))
    assert life == ReservationStep(1.0, "booked", "r", 0, 2, 0, 7, 9)
    assert read_items[-1] == SettingsChange(2.0, "settings", {"a": 1})
    packer.begin()  # another file: whoever speaks of the scope says who is there
    again = [item for item in packer.pack(booked) if item is not None]
    assert [type(one) for one in again] == [SlotsChange, SlotsChange, ReservationStep]


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    fleet = RecordedFleet(3)
    fleet.play(40)
    return fleet.recorded_file.into(tmp_path_factory.mktemp("tape") / "recording").read_bytes()


@dataclass(frozen=True)
class Recorded:
    """The bytes of a recording; a failure must not print them all."""

    data: bytes = field(repr=False)


@pytest.fixture(scope="module")
def recorded(recording: bytes) -> Recorded:
    return Recorded(recording)


def test_a_file_that_was_cut_off_ends_with_its_last_whole_frame(recording: bytes) -> None:
    ends, at = [len(OPENING)], len(OPENING)
    while at < len(recording):
        at += FRAME.size + FRAME.unpack_from(recording, at)[0]
        ends.append(at)
    assert len(ends) > 4
    counts = []
    around = {end + by for end in ends for by in (-9, -1, 0, 1, 8, 9)}
    cuts = {min(cut, len(recording)) for cut in around.union(range(0, len(recording), 397))}
    for cut in sorted(cuts):
        recorded_file = RecordedFile(io.BytesIO(recording[:cut]).read, "it")
        counts.append(len(list(recorded_file)))
        assert recorded_file.frames == max(0, sum(end <= cut for end in ends) - 1)
        assert recorded_file.is_torn == (cut not in ends)
    assert counts == sorted(counts)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"GIF89a", "no recording"),
        (OPENING + FRAME.pack(3, 0) + b"abc", "checksum"),
        (OPENING + FRAME.pack(1 << 31, 0), "a frame of"),
        (OPENING + FRAME.pack(3, zlib.crc32(b"abc")) + b"abc", "decompressed"),
        (OPENING + framed(b"\0\0"), "without its length"),
        (OPENING + framed(LENGTH.pack(9) + b"\x90"), "longer than its frame"),
        (OPENING + framed(LENGTH.pack(1) + b"\x90"), "cannot be read"),
        (OPENING + framed(message(Gap(1, "queue"))), "begin with a header"),
        (file_of([Header("v", "r", 1, 0.0, 0.0, RouterConfig())]), "second header"),
        (file_of([ReservationStep(0.0, "booked", "r", 3)]), "scope 3 was never named"),
        (file_of([SlotsChange(0, "m", "t", 1, [], [], is_whole=False)]), "nothing is known"),
    ],
)
def test_what_is_no_recording_is_refused_with_its_place(data: bytes, why: str) -> None:
    with pytest.raises(BadRecording, match=f"^it, frame at byte [0-9]+: .*{why}"):
        read(data)


def test_a_frame_that_would_fill_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "FRAME_RAW_MAX", 10_000)
    with pytest.raises(BadRecording, match="too long"):
        read(OPENING + framed(bytes(20_000)))


@given(st.integers(0, 1 << 30), st.binary(min_size=1, max_size=4))
@settings(max_examples=examples(50), deadline=None)
def test_damage_behind_right_checksums_is_refused_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, recorded: Recorded, at: int, other: bytes
) -> None:
    """Nothing but BadRecording comes of what somebody has made up."""
    recording = recorded.data
    raw, offset = b"", len(OPENING)
    while offset < len(recording):
        (size, _), start = FRAME.unpack_from(recording, offset), offset + FRAME.size
        raw += zlib.decompress(recording[start : start + size])
        offset = start + size
    at %= len(raw)
    damaged = raw[:at] + other + raw[at + len(other) :]
    path: Path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_bytes(OPENING + framed(damaged))
    with contextlib.suppress(BadRecording):
        replay([path], {"overlap_score_credit": 0.5})
