"""Files an operator names are opened without waiting for anybody."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from indexer.plain_file import check_plain, open_own, open_plain


def test_a_file_is_read_through_links(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    with open_plain(tmp_path / "link") as file:
        assert file.read() == b"content"
    check_plain(tmp_path / "link", 7)
    with pytest.raises(OSError, match="longer than 6 bytes"):
        check_plain(tmp_path / "link", 6)


def test_what_is_no_file_is_refused_at_once_and_leaves_nothing_open(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    before = len(os.listdir("/proc/self/fd"))
    for path in (tmp_path / "fifo", tmp_path, "/dev/zero", tmp_path / "none"):
        with pytest.raises(OSError):
            open_plain(path)
        with pytest.raises(OSError):
            check_plain(path, 7)
    with pytest.raises(ValueError):
        open_plain("a\0b")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_of_our_own_is_made_for_its_owner_and_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "ours"
    os.close(open_own(path, os.O_WRONLY | os.O_CREAT))
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_bytes(b"content")
    os.close(open_own(path, os.O_WRONLY | os.O_CREAT))
    assert path.read_bytes() == b"content"
    os.close(open_own(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
    assert path.read_bytes() == b""


def test_a_file_of_our_own_is_no_link_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="link is a link"):
        open_own(tmp_path / "link", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
        with pytest.raises(OSError, match="fifo is no plain file"):
            open_own(tmp_path / "fifo", flags)
    with pytest.raises(OSError, match="folder is no plain file"):
        open_own(tmp_path / "folder", os.O_RDONLY)
    assert (tmp_path / "file").read_bytes() == b"content"
    assert len(os.listdir("/proc/self/fd")) == before
