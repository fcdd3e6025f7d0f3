"""The table of settings: one row each, and nothing else of the package names a setting."""

from __future__ import annotations

import inspect
import re
import tokenize
from collections import defaultdict
from pathlib import Path

import pytest

import select_service.settings
from select_service.settings import FLAGS, SECTIONS
from select_service.settings.table import SECTION_CLASSES

PACKAGE = Path(select_service.settings.__file__).parent
COMBINED = {"service_settings.py", "layers.py"}
"""Where a component has another name for a setting, and where one setting implies another."""


def mentions() -> dict[str, dict[str, int]]:
    """How often each file of the package has each identifier, or text that is nothing else."""
    found: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for path in PACKAGE.rglob("*.py"):
        with path.open("rb") as file:
            previous = ""
            for token in tokenize.tokenize(file.readline):
                if token.type in (tokenize.NAME, tokenize.STRING) and previous != ".":
                    word = token.string.strip("'\"").removeprefix("--").replace("-", "_")
                    found[word][path.name] += 1
                previous = token.string
    return found


def test_a_flag_is_named_by_its_row_alone() -> None:
    """A new one takes one row in one file, and its use."""
    found = mentions()
    for section, flags in SECTIONS.items():
        for flag in flags:
            file = Path(inspect.getfile(SECTION_CLASSES[section]))
            rows = file.read_text("utf-8")
            assert rows.count(f"    {flag.field}: Annotated[") == 1, flag.name
            if "_" in flag.field:  # others are common words
                assert set(found[flag.field]) <= {file.name} | COMBINED, flag.name


def test_something_reads_every_setting() -> None:
    """By its name, or as the field of a component's limits that has its name without a prefix."""
    prefixes = re.findall(r'"([a-z_]+_)"', (PACKAGE / "service_settings.py").read_text("utf-8"))
    sources = [*PACKAGE.parent.rglob("*.py"), *(PACKAGE.parents[1] / "indexer").rglob("*.py")]
    readers = [one for one in sources if PACKAGE not in one.parents or one.name in COMBINED]
    words = {word for one in readers for word in re.findall(r"\w+", one.read_text("utf-8"))}
    unread = [
        flag.name
        for flag in FLAGS
        if flag.field not in words
        and not any(
            flag.field.startswith(one) and flag.field.removeprefix(one) in words for one in prefixes
        )
    ]
    assert not unread


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_rows_are_whole(flag: select_service.settings.Flag) -> None:
    assert flag.help
    assert not flag.help.endswith(".")
    assert (flag.type.parse is None) == (flag.type.metavar == "")
    assert flag.type.parse is not None or flag.default is False
