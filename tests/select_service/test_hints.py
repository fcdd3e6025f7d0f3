"""What an error says to install can be installed, however this was: nothing of ours is on PyPI."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
SOURCES = [
    file
    for room in ("select_service", "indexer")
    for file in sorted((ROOT / room).rglob("*.py"))
    if re.search(r"pip install|MissingExtra\(", file.read_text("utf-8"))
]


def test_there_are_hints() -> None:
    assert len(SOURCES) >= 6


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_what_is_to_be_installed_is_what_the_project_asks_for(file: Path) -> None:
    """Requirements by themselves: an extra of ours could only be had from where we came from."""
    text = file.read_text("utf-8")
    known = {*PROJECT["dependencies"]}
    known |= {one for extra in PROJECT["optional-dependencies"].values() for one in extra}
    assert "select-service[" not in text
    for named in re.findall(r"pip install '([^']*)'", text):
        assert all(one in known or one == "{requirement}" for one in named.split()), named
    for named in re.findall(r'(?:MissingExtra|_imported)\([^()]*, "([^"]*)"\)', text):
        assert named in known
