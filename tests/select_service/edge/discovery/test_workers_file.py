"""A workers file that is written, replaced, broken and lost."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import BinaryIO

import pytest

from indexer.plain_file import open_plain
from select_service.edge.discovery import workers_file
from select_service.edge.discovery.source import SourceFailed
from select_service.edge.discovery.workers_file import WorkersFile
from tests.harms import Harm, cut, with_a_copy, with_one_more, without


def text_of(*ids: int) -> str:
    return json.dumps([{"worker_id": i, "endpoint": f"http://w{i}"} for i in ids])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "workers.json"


@pytest.fixture
def source(path: Path) -> WorkersFile:
    return WorkersFile(str(path), 0.01)


def look(source: WorkersFile) -> set[int] | None:
    asyncio.run(source.look())
    return None if source.latest is None else set(source.latest)


def test_it_is_followed_as_it_changes(path: Path, source: WorkersFile) -> None:
    with pytest.raises(SourceFailed) as failure:
        look(source)
    assert (failure.value.kind, source.latest) == ("unreadable", None)
    path.write_text(text_of(1, 2))
    assert look(source) == {1, 2}
    assert look(source) == {1, 2}
    assert source.updates == 1, "the same file is not read twice"
    path.write_text(json.dumps({"workers": json.loads(text_of(1, 2, 3))}))
    assert look(source) == {1, 2, 3}
    path.write_text("[]")
    assert look(source) == set()


def test_an_atomic_replacement_is_seen_even_with_the_same_size_and_time(
    path: Path, source: WorkersFile, tmp_path: Path
) -> None:
    new = tmp_path / "new"
    path.write_text(text_of(1))
    about = path.stat()
    assert look(source) == {1}
    new.write_text(text_of(2))
    os.utime(new, ns=(about.st_atime_ns, about.st_mtime_ns))
    new.replace(path)
    assert look(source) == {2}


def test_a_file_that_is_replaced_as_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, new = tmp_path / "workers.json", tmp_path / "new"
    path.write_text(text_of(1))
    new.write_text(text_of(2, 3))
    source = WorkersFile(str(path), 0.01)

    def opened(at: Path) -> BinaryIO:
        file = open_plain(at)
        if new.exists():
            new.replace(path)
        return file

    monkeypatch.setattr(workers_file, "open_plain", opened)
    assert look(source) == {1}
    assert look(source) == {2, 3}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        "{}",
        "[1]",
        '[{"endpoint": "no id"}]',
        '[{"worker_id": -1}]',
        '[{"worker_id": 18446744073709551616}]',
        '[{"worker_id": 1}, {"worker_id": 1}]',
        '[{"worker_id": 1, "block_size": "16"}]',
    ],
)
def test_a_bad_file_keeps_the_last_good_state(path: Path, source: WorkersFile, text: str) -> None:
    path.write_text(text_of(1))
    look(source)
    path.write_text(text)
    with pytest.raises(SourceFailed) as failure:
        look(source)
    assert failure.value.kind == "malformed"
    assert source.latest is not None
    assert set(source.latest) == {1}
    asyncio.run(source.look())  # known to be bad: not read again, not complained of again
    path.unlink()
    with pytest.raises(SourceFailed):
        look(source)
    path.write_text(text_of(1, 2))
    assert look(source) == {1, 2}


def test_a_file_that_is_too_long(tmp_path: Path) -> None:
    path = tmp_path / "workers"
    path.write_text(text_of(1))
    size = path.stat().st_size
    source = WorkersFile(str(path), 0.01, bytes_max=size)
    assert set(look(source) or ()) == {1}
    path.write_text(text_of(1) + " ")
    with pytest.raises(SourceFailed, match="--workers-file-bytes-max") as failure:
        look(source)
    assert failure.value.kind == "too_large"
    assert set(source.latest or ()) == {1}, "what was known stays"


@pytest.mark.parametrize("harm", [cut, without, with_one_more, with_a_copy])
def test_a_file_changed_anywhere_loses_no_worker(memory_path: Path, harm: Harm) -> None:
    """Half a file, or one with a byte too many, changes nothing; values have no checksum."""
    path = memory_path / "workers.json"
    whole, refused = text_of(1, 2, 3).encode(), 0
    for at in range(len(whole)):
        source = WorkersFile(str(path), 0.01)
        path.write_bytes(whole)
        assert look(source) == {1, 2, 3}
        bent = harm(whole, at)
        path.write_bytes(bent + b"  ")  # another size: the time may be the same
        try:
            look(source)
        except SourceFailed:
            refused += 1
        else:
            assert harm is not cut, bent
        assert source.latest is not None
        assert len(source.latest) == 3, bent
    assert refused > len(whole) // 3


def test_members_that_no_worker_has_are_named_once(
    path: Path, source: WorkersFile, caplog: pytest.LogCaptureFixture
) -> None:
    """A misspelled limit was no limit, and nobody said so."""
    for number, form in enumerate(("[%s]", '{"workers": [%s]}', '{"workers": [%s], "more": 1}')):
        endpoint = "http://w" + "1" * number
        text = form % f'{{"worker_id": 1, "endpoint": "{endpoint}", "max_num_seq": 8}}'
        path.write_text(text)
        assert look(source) == {1}
    (line,) = caplog.messages
    path.write_bytes(b'[{"worker_id": 1, "\xff": 1}]')
    with pytest.raises(SourceFailed, match="utf-8"):
        look(source)
    assert line.endswith("unknown members of workers are ignored: 'max_num_seq'")
    path.write_text(text_of(1))
    assert look(source) == {1}
    path.write_text(text_of(1).replace("endpoint", "endpoimt"))
    assert look(source) == {1}
    assert len(caplog.messages) == 2
    assert "'endpoimt'" in caplog.messages[1]
