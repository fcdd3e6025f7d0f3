"""The snapshot file: cut, bent and mixed up anywhere, it gives back what was written or nothing."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from indexer.core.cursor import StreamMemory
from indexer.edge.snapshot_file import (
    NAME,
    NEW,
    BadSnapshot,
    RankEnd,
    RankHead,
    RankSnapshot,
    SnapshotReader,
    SnapshotWriter,
)
from tests.harms import HARMS, Harm

Found = dict[int, list[bytes]]


def rank(number: int) -> RankSnapshot:
    memory = StreamMemory(number, [number], None, 0, [], {}, 1.5)
    head = RankHead("m", "t", 16, False, number, 0, "tcp://a:1", None, 0, False, memory)
    dice = random.Random(number)
    pieces = [dice.randbytes(dice.randrange(1, 60)) for _ in range(number)]
    return RankSnapshot(msgspec.msgpack.encode(head), pieces, RankEnd(number, [number, 0, 0, 0]))


RANKS = [rank(number) for number in range(4)]
WHOLE: Found = {number: list(one.pieces) for number, one in enumerate(RANKS)}


def write(directory: Path) -> bytes:
    writer = SnapshotWriter(directory)
    for one in RANKS:
        writer.add(one)
    writer.finish()
    writer.abandon()
    data = (directory / NAME).read_bytes()
    assert len(data) == writer.written
    return data


def read(directory: Path, data: bytes) -> tuple[Found, dict[str, int]]:
    path = directory / NAME
    path.write_bytes(data)
    reader = SnapshotReader(path)
    try:
        entries = reader.entries.values()
        return {entry.head.worker_id: reader.read(entry) for entry in entries}, reader.damage
    finally:
        reader.close()


def test_what_was_written_is_read(tmp_path: Path) -> None:
    assert read(tmp_path, write(tmp_path)) == (WHOLE, {})


def test_cut_anywhere(tmp_path: Path) -> None:
    data = write(tmp_path)
    for length in range(len(data)):
        found, damage = read(tmp_path, data[:length])
        assert found.items() <= WHOLE.items()
        assert damage, f"a file cut at {length} of {len(data)} looks whole"


def test_one_bit_anywhere(tmp_path: Path) -> None:
    data = write(tmp_path)
    for at in range(len(data)):
        bent = bytearray(data)
        bent[at] ^= 1 << at % 8
        found, damage = read(tmp_path, bytes(bent))
        assert found.items() <= WHOLE.items()
        assert damage, f"byte {at} of {len(data)} is wrong and nobody says so"


@pytest.mark.parametrize("harm", HARMS)
def test_changed_anywhere(memory_path: Path, harm: Harm) -> None:
    data = write(memory_path)
    for at in range(len(data)):
        found, damage = read(memory_path, harm(data, at))
        assert found.items() <= WHOLE.items()
        assert damage or found == WHOLE, f"changed at {at} of {len(data)}, and nobody says so"


def test_what_follows_the_end_changes_nothing(tmp_path: Path) -> None:
    data = write(tmp_path)
    for more in (b"\0", b"\x5a" * 5000):
        assert read(tmp_path, data + more) == (WHOLE, {})


def test_damage_in_the_middle_costs_one_rank(tmp_path: Path) -> None:
    data = bytearray(write(tmp_path))
    at = data.find(RANKS[1].pieces[0])
    data[at] ^= 0xFF
    found, damage = read(tmp_path, bytes(data))
    assert set(found) == {0, 2, 3}
    assert damage == {"frame": 1}


@pytest.mark.parametrize(
    "mix",
    [
        lambda new, old: new[: len(new) // 2] + old[len(new) // 2 :],
        lambda new, old: old[:16] + new[16:],
        lambda new, _: new[:16] + new[16:] + new[16:],
    ],
)
def test_pieces_of_another_file_do_not_pass(
    mix: Callable[[bytes, bytes], bytes], tmp_path: Path
) -> None:
    old, new = write(tmp_path), write(tmp_path)
    assert len(old) == len(new)
    assert old != new, "each file has a number of its own"
    found, damage = read(tmp_path, mix(new, old))
    assert found.items() <= WHOLE.items()
    assert damage or found == WHOLE


@pytest.mark.parametrize("head", [b"", b"\x90", b"\xc1", b"\x91\xa1\xff", b"\x91" * 5000])
def test_a_head_that_another_program_wrote_costs_its_rank_only(head: bytes, tmp_path: Path) -> None:
    writer = SnapshotWriter(tmp_path)
    for one in (RANKS[1]._replace(head=head), RANKS[2]):
        writer.add(one)
    writer.finish()
    found, damage = read(tmp_path, (tmp_path / NAME).read_bytes())
    assert found == {2: WHOLE[2]}
    assert damage == {"frame": 1}


def test_a_file_that_changes_after_it_was_looked_at(tmp_path: Path) -> None:
    data = bytearray(write(tmp_path))
    path = tmp_path / NAME
    reader = SnapshotReader(path)
    entry = next(one for one in reader.entries.values() if one.head.worker_id == 3)
    data[entry.start + 20] ^= 1
    path.write_bytes(data)
    with pytest.raises(BadSnapshot):
        reader.read(entry)
    reader.close()


def test_a_link_is_neither_written_through_nor_read(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"somebody else's")
    for name in (NEW, NAME):
        (tmp_path / name).symlink_to(elsewhere)
    with pytest.raises(OSError, match=f"{NEW} is a link"):
        SnapshotWriter(tmp_path)
    with pytest.raises(OSError, match=f"{NAME} is a link"):
        SnapshotReader(tmp_path / NAME)
    assert elsewhere.read_bytes() == b"somebody else's"


def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    for name in (NEW, NAME):
        os.mkfifo(tmp_path / name)
    with pytest.raises(OSError, match=f"{NEW} is no plain file"):
        SnapshotWriter(tmp_path)
    with pytest.raises(OSError, match=f"{NAME} is no plain file"):
        SnapshotReader(tmp_path / NAME)


def test_an_abandoned_file_leaves_the_old_one(tmp_path: Path) -> None:
    data = write(tmp_path)
    writer = SnapshotWriter(tmp_path)
    writer.add(RANKS[1])
    assert (tmp_path / NEW).exists()
    writer.abandon()
    writer.add(RANKS[2])
    writer.finish()
    assert not (tmp_path / NEW).exists()
    assert (tmp_path / NAME).read_bytes() == data
