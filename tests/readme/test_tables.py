"""The tables of README.md are what the program says."""

from __future__ import annotations

import re

import pytest

from select_service.config import FLAGS
from tests.readme import tables
from tests.readme.document import README


@pytest.mark.parametrize("name", tables.TABLES)
def test_a_table_is_up_to_date(name: str) -> None:
    shown = tables.shown(name, README.read_text("utf-8"))
    assert shown == tables.written(name), f"run: {tables.COMMAND}"


def test_what_to_watch_exists() -> None:
    exposed = set(re.findall(r"^\| `(\w+)`", tables.written("metrics"), re.MULTILINE))
    for flag in FLAGS:
        if flag.watch:
            assert flag.watch.partition("{")[0] in exposed, flag.name


def test_pictures_exist() -> None:
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", README.read_text("utf-8"))
    assert pictures
    for picture in pictures:
        assert (README.parent / picture).is_file(), picture
