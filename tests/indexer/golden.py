"""Reads the vectors that came with the specification; they are never edited."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

_FOLDER = Path(__file__).parents[1] / "golden"


def golden(name: str) -> Any:
    """The decoded JSON file of that name below tests/golden."""
    return msgspec.json.decode((_FOLDER / name).read_bytes())
