"""Files an operator names are opened without waiting for anybody."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from indexer.edge.plain_file import check_plain, open_plain


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
