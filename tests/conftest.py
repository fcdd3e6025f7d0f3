"""Settings for every test: Hypothesis without a clock, on machines that may be busy."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "default", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("default")

MEMORY = Path("/dev/shm")


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A folder whose syncs cost nothing, where there is one: for thousands of damaged files."""
    if not os.access(MEMORY, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        yield Path(folder)
