"""Where the reference service is looked for, and what is said when it is not there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from bench.compare import peer
from tests.live import peer as opponent


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    """An interpreter that claims to have version 9.9.9."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 9.9.9\n", "utf-8")
    python.chmod(0o755)
    return python


def test_an_interpreter_that_is_named_is_used(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEER_PYTHON", os.pathsep.join([str(fake)]))
    assert peer.installed("9.9.9") == fake
    assert peer.peer_pythons(("9.9.9",)) == {"9.9.9": fake}
    assert peer.command(fake)[0] == str(fake)
    assert peer.main(("9.9.9",)) == 0
    assert peer.installed("9.9.8") is None


def test_an_interpreter_without_the_package_is_no_peer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PEER_PYTHON", sys.executable)
    assert "has no ai-dynamo-runtime" in (opponent.why_missing() or "")
    assert peer.main(("9.9.9",)) == 1
    assert "PEER_PYTHON" in capsys.readouterr().err
