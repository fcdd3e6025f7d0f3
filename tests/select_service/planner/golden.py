"""Recorded answers of the reference planner: tests/golden/planner."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parents[2] / "golden" / "planner"
PROFILE = GOLDEN / "profile_a"


def golden(name: str) -> Any:
    return json.loads((GOLDEN / f"{name}.json").read_text())
