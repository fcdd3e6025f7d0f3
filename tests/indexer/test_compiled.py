"""Which kernels are taken, and why not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

import indexer.core.hashing  # noqa: F401 - it takes one
from indexer.compiled import (
    PURE_VARIABLE,
    complaints,
    kernels_in_use,
    kernels_text,
    objections,
    usable,
)
from select_service.core.diagnostics.fleet_checks import look_at_kernels

_REPORT = (
    "import indexer.core.hashing, indexer.compiled as c; print(c.objections()['indexer._speed'])"
)


@pytest.fixture(autouse=True)
def unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PURE_VARIABLE, raising=False)
    monkeypatch.setattr("indexer.compiled._OBJECTIONS", {})


def _built(monkeypatch: pytest.MonkeyPatch, abi: int) -> None:
    module = ModuleType("a_kernel")
    module.ABI = abi  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_kernel", module)


def test_a_kernel_is_taken_when_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    _built(monkeypatch, 7)
    assert usable("a_kernel", 7)
    assert kernels_in_use() == {"a_kernel": True}
    assert not objections()


def test_a_kernel_of_other_source_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    _built(monkeypatch, 6)
    assert not usable("a_kernel", 7)
    assert kernels_in_use() == {"a_kernel": False}
    assert "stale" in complaints()[0]


def test_kernels_are_for_machines_that_write_the_lowest_byte_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _built(monkeypatch, 7)
    monkeypatch.setattr(sys, "byteorder", "big")
    assert not usable("a_kernel", 7)
    assert "little-endian" in complaints()[0]
    monkeypatch.setenv(PURE_VARIABLE, "1")
    assert not usable("a_kernel", 7)
    assert not complaints(), "the plain forms were asked for"


@pytest.mark.parametrize("fault", ["TypeError", "ValueError", "AttributeError", "KeyError"])
def test_a_kernel_that_finds_other_classes_than_it_was_built_for_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """It looks at our classes while it is loaded, before anybody can read its ABI."""
    (tmp_path / "left_over.py").write_text(f"raise {fault}('_spoke is no member of Ledger')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not usable("left_over", 7)
    (told,) = complaints()
    assert "stale" in told
    assert "_spoke is no member of Ledger" in told
    assert "install again" in told


def test_a_kernel_may_be_missing() -> None:
    assert not usable("there_is_no_such_kernel", 1)
    assert objections() == {"there_is_no_such_kernel": "not built"}
    assert not usable("nor_this_one", 1)
    (told,) = complaints()
    assert told.startswith("2 OF 2 COMPILED KERNELS ARE MISSING")
    assert "(nor_this_one, there_is_no_such_kernel)" in told
    assert kernels_text() == "0/2"
    ((cause, _, what),) = look_at_kernels()
    assert (cause.code, cause.severity) == ("kernels-missing", "warning")
    assert "0/2" in what


@pytest.mark.parametrize(
    ("value", "taken"), [("1", False), ("yes", False), ("0", True), ("", True)]
)
def test_the_variable_forces_the_plain_twin(
    monkeypatch: pytest.MonkeyPatch, value: str, taken: bool
) -> None:
    _built(monkeypatch, 7)
    monkeypatch.setenv(PURE_VARIABLE, value)
    assert usable("a_kernel", 7) is taken


def test_the_variable_reaches_a_whole_process() -> None:
    said = subprocess.run(
        [sys.executable, "-c", _REPORT],
        env=os.environ | {PURE_VARIABLE: "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.strip() == f"{PURE_VARIABLE} is set"


_FOUND = objections()  # before the fixture hides it


def test_no_kernel_is_stale_and_none_is_missing_where_there_is_a_compiler() -> None:
    """`make test` says whether there is one; other runs may well be without kernels."""
    allowed = {f"{PURE_VARIABLE} is set"}
    headers = Path(sysconfig.get_paths()["include"], "Python.h")
    if not os.environ.get("KERNELS_EXPECTED") or not headers.exists():
        allowed.add("not built")
    assert set(_FOUND.values()) <= allowed, _FOUND


def test_everybody_asks_for_the_kernel_that_is_built() -> None:
    """Who asks for another one runs in plain Python, and only /metrics would say so."""
    here, asked = Path(__file__).parents[2], dict[str, set[int]]()
    for file in [*here.glob("indexer/**/*.py"), *here.glob("select_service/**/*.py")]:
        for kernel, abi in re.findall(r'usable\("([\w.]+)", (\d+)\)', file.read_text()):
            asked.setdefault(kernel, set()).add(int(abi))
    assert len(asked) >= 3
    for kernel, abis in asked.items():
        source = here.joinpath(*kernel.split(".")).with_suffix(".pyx").read_text()
        (built,) = re.findall(r"^ABI = (\d+)", source, re.MULTILINE)
        assert abis == {int(built)}, kernel
