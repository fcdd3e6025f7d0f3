"""Converts values for browsers: ids, and integers beyond 2^53, become strings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
import orjson

if TYPE_CHECKING:
    from collections.abc import Iterable

    from select_service.edge.cooperative import TimeSlices

SAFE_MAX: Final = (1 << 53) - 1
"""Larger integers lose precision in a browser."""

_IDS: Final = frozenset({"worker_id", "router_id", "router_ids", "block_hashes", "origin"})
"""Always strings, so that small ids look like all others."""


def for_browser(value: object) -> Any:
    """Convert to plain lists, dicts, strings and numbers that a browser can read from JSON."""
    return _safe(msgspec.to_builtins(value), is_id=False)


async def for_browser_rows(values: Iterable[object], slices: TimeSlices) -> bytes:
    """Encode an array that may be long, in slices."""
    rows = await slices.mapped(lambda value: orjson.dumps(for_browser(value)), values)
    return b"[" + b",".join(rows) + b"]"


def _safe(value: object, *, is_id: bool) -> object:
    if isinstance(value, dict):
        return {str(key): _safe(one, is_id=key in _IDS) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_safe(one, is_id=is_id) for one in value]
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value) if is_id or abs(value) > SAFE_MAX else value
    return value
