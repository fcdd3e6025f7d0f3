"""The recorded vectors of other people's admission control."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parents[3] / "golden" / "admission"


def load(name: str) -> dict[str, Any]:
    with (GOLDEN / name).open("rb") as file:
        loaded: dict[str, Any] = json.load(file)
    return loaded


SIMULATOR = load("simulator_admission_golden.json")
BUSY = load("busy_threshold_cases.json")
CASES = load("admission_cases.json")
TRACE = load("token_bucket_trace_golden.json")
