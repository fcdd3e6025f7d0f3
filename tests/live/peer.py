"""The reference service as an opponent: where it is installed, how it is started, why it is not.

It lives in a virtualenv of its own (`make test-full` makes it) and is only ever asked questions
over HTTP.
"""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

DEFAULT = Path(__file__).parents[2] / ".venv-peer-1.3.1" / "bin" / "python"
PYTHON = os.environ.get("PEER_PYTHON", str(DEFAULT))
COMMAND = (PYTHON, "-m", "dynamo.select_service")
CHECK_TIMEOUT_S = 60


@functools.cache
def why_missing() -> str | None:
    """None if the reference can be started, else the reason."""
    if not Path(PYTHON).exists():
        return "the reference service is not installed; make test-full does"
    check = [PYTHON, "-c", "import importlib.util as u; assert u.find_spec('dynamo._core')"]
    done = subprocess.run(check, capture_output=True, timeout=CHECK_TIMEOUT_S, check=False)
    return None if done.returncode == 0 else "the reference service is not installable here"
