"""The "Selected worker" line of a service's log: the only place where the cost itself is visible.

The reference writes coloured text, the product one JSON object per line; both become dicts here.
"""

from __future__ import annotations

import json
import re
from typing import Any

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
FIELD = re.compile(r"(\w+)[=:] ?\"?([^\s\",]+)")
EVENT = "Selected worker"
PINNED = "Selected pinned worker"
TOLERANCE = 1e-9
COMPARED = (
    "worker_id",
    "dp_rank",
    "logit",
    "effective_cached_blocks",
    "host_pinned_blocks",
    "disk_blocks",
)


def selections(log: str) -> list[dict[str, Any]]:
    """Every selection that was logged, oldest first."""
    found = []
    for line in log.splitlines():
        plain = COLOUR.sub("", line)
        if EVENT not in plain and PINNED not in plain:
            continue
        if plain.startswith("{"):
            found.append(json.loads(plain))
        else:
            text = plain.partition("Selected ")[2].replace("effective cached blocks", "cached")
            found.append(dict(FIELD.findall(text)))
    return found


def mismatch(expected: dict[str, str], got: dict[str, Any]) -> str | None:
    """Compare the numbers of two lines; None for equal."""
    for name in COMPARED:
        if name not in expected or name not in got:  # the line of a pinned selection has fewer
            continue
        wanted = float(expected[name].rstrip(","))
        if abs(wanted - float(got[name])) > TOLERANCE:
            return f"log {name}: expected {wanted}, got {got[name]}"
    return None
