"""How long the fuzzers run: bounded and the same every time, unless the environment says more."""

from __future__ import annotations

import os
from typing import Final

SECONDS: Final = float(os.environ["FUZZ_SECONDS"]) if os.environ.get("FUZZ_SECONDS") else None
"""Of each fuzzer; None: as much as `make test-full` has time for."""

SEED: Final = int(os.environ.get("FUZZ_SEED", "20261122"))
