"""Settings for every test: coroutines are tests, Hypothesis has no clock, machines may be busy."""

import gc
import inspect
import os
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import numpy as np  # here, so that Hypothesis finds its generator below, whatever is collected
import pytest
from _pytest.terminal import TerminalReporter  # pytest names it since 8.4
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import text

from tests import wait
from tests.effort import examples
from tests.tables import TABLES

settings.register_profile(
    "default",
    max_examples=examples(100),
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("default")

MEMORY = Path("/dev/shm")


@given(text())
@settings(max_examples=1, database=None)
def _first_example(_: str) -> None:
    """Let Hypothesis register numpy's generator: it asks who refers to it, which freezing hides."""
    assert np.__version__


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep what is collected from the garbage collector: it is large, and lives until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        _first_example()
        gc.enable()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine on a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    wait.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A folder whose syncs cost nothing, where there is one: for thousands of damaged files."""
    if not os.access(MEMORY, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        yield Path(folder)


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    """Print what suites have measured, if they ran."""
    reports = [
        report
        for kind in ("passed", "failed")
        for report in terminalreporter.getreports(kind)
        if isinstance(report, pytest.TestReport) and report.when == "call"
    ]
    for table in TABLES:
        rows = [row for report in reports for row in table.rows(report.user_properties)]
        if rows:
            terminalreporter.section(table.title)
            for line in [table.headings, *rows]:
                terminalreporter.write_line(line)
