"""Ctrl-C while a command is loaded ends it at once, and shows no traceback."""

from __future__ import annotations

import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from tests.wait import PATIENCE_S

# The signal comes to a process of its own at the moment when it begins to import a module.
AT_AN_IMPORT = """
import os, runpy, signal, sys
handler, moment, module, *arguments = sys.argv[1:]
signal.signal(signal.SIGINT, getattr(signal, handler))

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == moment:
            os.write(2, b"now\\n")
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
sys.argv[1:] = arguments
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
AT_THE_END = "import atexit, gc; atexit.register(lambda: print('frozen', gc.get_freeze_count()))"
SERVICE = "select_service"
SIMULATOR = "select_service.simulator"
PLANNER = "select_service.planner"
NUMPY = (
    f"numpy.{'_core' if int(np.__version__.partition('.')[0]) > 1 else 'core'}._multiarray_umath"
)


def _run(handler: str, moment: str, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", AT_AN_IMPORT, handler, moment, *command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.mark.parametrize(
    ("moment", "command"),
    [
        ("select_service.cli", (SERVICE, "--port", "0")),
        ("select_service.settings", (SERVICE, "--port", "0")),
        (NUMPY, (SERVICE, "--port", "0")),
        ("select_service.edge.server", (SERVICE, "--port", "0")),
        ("msgspec", (SERVICE, "doctor")),
        ("httpx", (SERVICE, "doctor")),
        ("select_service.demo.cli", (SERVICE, "demo", "--requests", "1")),
        ("httpcore", (SERVICE, "demo", "--requests", "1")),
        ("select_service.simulator.cli", (SIMULATOR, "run")),
        (NUMPY, (SIMULATOR, "run")),
        ("select_service.core.service", (SIMULATOR, "run")),
        ("select_service.planner.cli", (PLANNER, "plan")),
        (NUMPY, (PLANNER, "plan")),
    ],
)
def test_an_interrupted_command_ends_by_the_signal(moment: str, command: tuple[str, ...]) -> None:
    ended = _run("default_int_handler", moment, *command)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "now\n")


def test_where_the_signal_is_ignored_it_stays_so() -> None:
    """A shell ignores it for what runs in its background."""
    ended = _run("SIG_IGN", "select_service.settings", SERVICE, "--help")
    assert (ended.returncode, ended.stderr) == (0, "now\n")


def test_once_loaded_a_command_handles_it() -> None:
    """Then there may be something to say, and is something to end in order."""
    begins = "now\nselect-planner"
    late = "select_service.planner.edge.what_if"
    ended = _run("default_int_handler", late, PLANNER, "predict", "--predictor", "kalman")
    said = f"{begins} predict: stopped by Ctrl-C before it was done: there is no result\n"
    assert (ended.returncode, ended.stderr) == (130, said)
    late = "select_service.planner.edge.run_command"
    flags = ("--model-name", "llama", "--profile-results-dir", "profile")
    ended = _run("default_int_handler", late, PLANNER, "run", *flags)
    said = f"{begins} run: stopped by Ctrl-C before its first plan: it has scaled nothing\n"
    assert (ended.returncode, ended.stderr) == (130, said)


@pytest.mark.parametrize("project", ["pyproject.toml", "deploy/client/pyproject.toml"])
def test_scripts_begin_where_dash_m_begins(project: str) -> None:
    """Those see to the signal before they load, and end without a search for garbage."""
    scripts = tomllib.loads(Path(project).read_text("utf-8"))["project"]["scripts"]
    assert scripts
    for name, entry in scripts.items():
        module, _, function = entry.partition(":")
        assert module.endswith(".__main__")
        code = f"{AT_THE_END}; from {module} import {function}; {function}()"
        said = subprocess.check_output([sys.executable, "-c", code, "--version"], text=True)
        assert said.startswith(f"{name} ")
        assert int(said.partition("frozen ")[2]) > 0
