"""The writer's thread: files that rotate, disks and queues that are full, and no surprises."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from indexer.types import Scope
from select_service.core.recording.decoder import RecordedFile
from select_service.core.recording.items import OPENING, End, Gap, Header, ReservationStep
from select_service.core.recording.notes import BirthNote, SlotsNote
from select_service.edge.state import recording_file as module
from select_service.edge.state.recording_file import RecordedRng, Recording, RecordSettings
from select_service.errors import RecordingUnusable
from select_service.simulator.recordings import Played, files_of, play
from select_service.types import RouterConfig, WorkerSpec
from tests import wait

HERE = Scope("m", "t")


@contextmanager
def recorded(path: Path, **bounds: float) -> Iterator[Recording]:
    recording = Recording(RecordSettings(path=path, **bounds), RouterConfig())  # type: ignore[arg-type]
    recording.open()
    try:
        yield recording
    finally:
        asyncio.run(recording.close())


def life(number: int) -> BirthNote:
    return BirthNote(float(number), "booked", os.urandom(8).hex(), HERE, 1, 0, number, 0)


def numbers(played: list[Played]) -> list[int]:
    return [one.item.amount for one in played if isinstance(one.item, ReservationStep)]


def test_files_rotate_and_each_can_be_read_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FRAME_BYTES", 2000)
    path = tmp_path / "recording"
    with recorded(path, bytes_max=8000, files_max=3, queue_bytes_max=1 << 30) as recording:
        recording.put(SlotsNote(HERE, 16, ((WorkerSpec(worker_id=1), ((0, 0),), None),)), 1)
        for number in range(2000):
            recording.put(life(number), 10)
        recording.start(time.monotonic)
    files = files_of(path)
    assert [one.name for one in files[:-1]] == [
        f"recording.{number:06d}" for number in range(recording.files - 2, recording.files)
    ]
    assert len(files) == 3
    assert recording.files > 4
    assert all(one.stat().st_size < 12_000 for one in files)
    assert all(stat.S_IMODE(one.stat().st_mode) == 0o600 for one in files)
    assert recording.notes["written"] == 2001
    last: list[int] = []
    for number, one in enumerate(files, recording.files - 2):
        tapes: list[RecordedFile] = []
        played = list(play([one], tapes))
        header = tapes[0].header
        assert isinstance(header, Header)
        assert header.file == number
        assert set(tapes[0].fleet(0).workers) == {1}, (
            "which workers are there is written in every file"
        )
        end = played[-1].item
        assert isinstance(end, End)
        assert end.is_last == (one == path)
        assert not tapes[0].is_torn
        last += numbers(played)
    assert last == list(range(last[0], 2000)), "nothing is lost between two files"


def test_what_an_earlier_life_recorded_is_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    for number in range(3):
        with recorded(path) as recording:
            recording.start(time.monotonic)
            recording.put(life(number), 10)
    assert numbers(list(play(files_of(path)))) == [0, 1, 2]
    assert len(files_of(path)) == 3


def test_a_file_that_is_no_recording_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "passwd"
    path.write_bytes(b"root:x:0:0")
    with pytest.raises(RecordingUnusable, match="is no recording"), recorded(path):
        pass
    assert path.read_bytes() == b"root:x:0:0"
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(RecordingUnusable), recorded(link):
        pass
    with pytest.raises(RecordingUnusable), recorded(tmp_path):
        pass
    with pytest.raises(RecordingUnusable, match="No such file"), recorded(tmp_path / "a" / "b"):
        pass


def test_two_do_not_record_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    with (
        recorded(path),
        pytest.raises(RecordingUnusable, match="another process records there"),
        recorded(path),
    ):
        pass
    assert [one.name for one in tmp_path.iterdir()] == ["recording"]


def test_what_finds_no_room_in_the_queue_is_counted_and_told(tmp_path: Path) -> None:
    """The writer stands still, as behind a disk that hangs."""
    path = tmp_path / "recording"
    with recorded(path, queue_bytes_max=1000) as recording:
        taken = [recording.put(life(number), 100) for number in range(30)]
        assert taken == [True] * 10 + [False] * 20
        assert recording.queue_bytes == 1000
        recording.start(time.monotonic)
        wait.block_until(lambda: not recording.queue_bytes)
        assert recording.put(life(30), 100)
        wait.block_until(lambda: not recording.queue_bytes)
        assert not recording.put(life(31), 2000)
    played = list(play([path]))
    assert numbers(played) == [*range(10), 30]
    gaps = [one.item for one in played if isinstance(one.item, Gap)]
    assert gaps == [Gap(20, "queue"), Gap(1, "queue")]
    assert recording.notes == {"written": 11, "queue": 21, "disk": 0, "fault": 0}


def decided_about(recording: Recording, notes: int) -> bool:
    return recording.notes["written"] + recording.notes["disk"] == notes


class FullDisk:
    """Takes half of what is written, then nothing for a while."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = False
        monkeypatch.setattr(module, "RETRY_S", 0.0)
        monkeypatch.setattr(Recording, "_write_all", lambda *args: self.write(*args))  # noqa: PLW0108 - bound to it

    def write(self, recording: Recording, data: memoryview) -> None:
        file = recording._file
        assert file is not None
        if self.is_full:
            os.write(file, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.write(file, data)


def test_a_full_disk_costs_what_it_refused_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk, path = FullDisk(monkeypatch), tmp_path / "recording"
    with recorded(path, flush_s=0.01) as recording:
        recording.start(time.monotonic)
        for number in range(6):
            disk.is_full = number in {2, 3, 4}
            recording.put(life(number), 10)
            wait.block_until(partial(decided_about, recording, number + 1))
            assert recording.is_refused == disk.is_full
    played = list(play([path]))
    assert numbers(played) == [0, 1, 5]
    assert [one.item for one in played if isinstance(one.item, Gap)] == [
        Gap(3, "disk", resets=True)
    ]
    assert recording.notes["disk"] == 3
    assert recording.failures >= 3
    assert not recording.is_refused
    complaints = [one for one in caplog.records if "cannot be written" in one.message]
    assert len(complaints) == 1


def test_a_file_that_somebody_took_away_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FRAME_BYTES", 2000)
    monkeypatch.setattr(module, "RETRY_S", 0.0)
    path = tmp_path / "recording"
    with recorded(path, bytes_max=8000, queue_bytes_max=1 << 30) as recording:
        path.unlink()
        for number in range(1000):
            recording.put(life(number), 10)
        recording.start(time.monotonic)
    numbers_read = numbers(list(play(files_of(path))))
    assert numbers_read == list(range(numbers_read[0], 1000))
    assert 0 < numbers_read[0] < 500
    assert recording.failures == 1


def test_what_is_drawn_is_noted_and_what_a_copy_draws_is_not() -> None:
    draws: list[float | int] = []
    one, plain = RecordedRng(draws, 5), random.Random(5)
    other = copy(one)
    said = [one.random(), one.randrange(9), *one.choices(range(3), [1.0, 2.0, 3.0])]
    assert said == [plain.random(), plain.randrange(9), *plain.choices(range(3), [1.0, 2.0, 3.0])]
    noted = list(draws)
    assert len(noted) >= 3
    assert other.random() == said[0]
    one.getrandbits(128)  # a name
    assert draws == noted


def test_a_note_that_cannot_be_written_costs_itself(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    with recorded(path) as recording:
        recording.start(time.monotonic)
        recording.put(life(1), 10)
        recording.put(replace(life(2), reservation_id=7), 10)
        recording.put(life(3), 10)
    played = list(play([path]))
    assert numbers(played) == [1, 3]
    assert [one.item for one in played if isinstance(one.item, Gap)] == [
        Gap(1, "fault", resets=True)
    ]
    assert recording.notes["fault"] == recording.failures == 1


def test_a_file_that_could_not_be_put_aside_is_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory was read-only when it was long enough, and is not any more."""
    monkeypatch.setattr(module, "FRAME_BYTES", 2000)
    monkeypatch.setattr(module, "RETRY_S", 0.0)
    path, rename = tmp_path / "recording", Path.rename
    refused: list[Path] = []

    def refusing(self: Path, target: Path) -> Path:
        if len(refused) < 3:
            refused.append(self)
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refusing)
    with recorded(path, bytes_max=8000, queue_bytes_max=1 << 30) as recording:
        for number in range(1000):
            recording.put(life(number), 10)
        recording.start(time.monotonic)
    numbers_read = numbers(list(play(files_of(path))))
    assert len(refused) == 3
    assert numbers_read[-1] == 999
    assert recording.notes["disk"] == 1000 - len(numbers_read) < 500
    assert recording.failures == 3
    assert [one.name for one in files_of(path)][:2] == ["recording.000001", "recording.000002"]


def test_a_file_that_could_not_be_begun_has_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be missing for whoever reads the others."""
    monkeypatch.setattr(module, "FRAME_BYTES", 2000)
    monkeypatch.setattr(module, "RETRY_S", 0.0)
    path, write = tmp_path / "recording", Recording._write_all
    refused: list[int] = []

    def refusing(self: Recording, rest: memoryview) -> None:
        if self._size == len(OPENING) and self.files == 2 and len(refused) < 3:  # a header
            refused.append(len(rest))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, rest)

    monkeypatch.setattr(Recording, "_write_all", refusing)
    with recorded(path, bytes_max=8000, queue_bytes_max=1 << 30) as recording:
        for number in range(1000):
            recording.put(life(number), 10)
        recording.start(time.monotonic)
    tapes: list[RecordedFile] = []
    list(play(files_of(path), tapes))
    assert len(refused) == 3
    headers = [one.header.file for one in tapes if one.header is not None]
    assert headers == list(range(headers[0], headers[0] + len(headers)))
    assert recording.files == headers[-1]


def test_nobody_waits_for_a_disk_that_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLOSE_S", 0.05)
    recording = Recording(RecordSettings(path=tmp_path / "recording"), RouterConfig())
    recording.open()
    stands, moves = threading.Event(), threading.Event()
    write = recording._write_frame

    def stand_still(raw: bytes) -> None:
        stands.set()
        moves.wait()
        write(raw)

    monkeypatch.setattr(recording, "_write_frame", stand_still)
    recording.start(time.monotonic)
    recording.put(life(1), 10)

    async def leave() -> None:
        await recording.close()
        assert await asyncio.to_thread(stands.wait, wait.PATIENCE_S)
        await recording.close()

    wait.run(leave())
    monkeypatch.setattr(module, "CLOSE_S", wait.PATIENCE_S)
    moves.set()  # what it had in hand is whole, nobody has closed its file
    wait.run(recording.close())
    assert numbers(list(play(files_of(recording.settings.path)))) == [1]
