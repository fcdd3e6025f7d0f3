"""When an answer equals a recorded one, and how to say where it does not.

The rules are those of tests/golden/contract/README.md, "Not to be compared". Each function returns
None for equal, else a sentence that names the place.
"""

from __future__ import annotations

import re
from typing import Any
from uuid import UUID

# Words of the JSON layer and of its framework: status and the presence of `error` count.
FREE_TEXTS = ("Failed to parse", "Failed to deserialize", "Invalid URL")
ANY_TEXT = "<any>"  # in differences.json
# The reference prints a Rust struct behind the id; the text is fixed up to here.
FREE_TAIL = re.compile(r"(Request .* already exists).*")


def mismatch(path: str, expected: object, got: object) -> str | None:
    """Compare the body of an answer to `path` with the recorded one."""
    if path.startswith("/dump") and isinstance(expected, dict):
        return _dump_mismatch(expected, got)
    return _value_mismatch("", expected, got)


def _value_mismatch(where: str, expected: object, got: object) -> str | None:
    if isinstance(expected, dict):
        return _object_mismatch(where, expected, got)
    if isinstance(expected, list):
        return _list_mismatch(where, expected, got)
    if where.endswith(".error") and isinstance(expected, str):
        return _error_mismatch(where, expected, got)
    if where.endswith(".reservation_id") and _is_uuid(expected):
        return None if _is_uuid(got) else f"{where}: expected a UUID, got {got!r}"
    return None if _equal_scalars(expected, got) else f"{where}: expected {expected!r}, got {got!r}"


def _equal_scalars(expected: object, got: object) -> bool:
    """JSON equality: 1 equals 1.0, but true is not 1."""
    return isinstance(expected, bool) == isinstance(got, bool) and expected == got


def _object_mismatch(where: str, expected: dict[str, Any], got: object) -> str | None:
    if not isinstance(got, dict):
        return f"{where or 'body'}: expected an object, got {got!r}"
    for key, value in expected.items():
        if key not in got:
            return f"{where}.{key}: missing"
        found = _value_mismatch(f"{where}.{key}", value, got[key])
        if found:
            return found
    return None


def _list_mismatch(where: str, expected: list[Any], got: object) -> str | None:
    if not isinstance(got, list):
        return f"{where or 'body'}: expected a list, got {got!r}"
    if len(expected) != len(got):
        return f"{where or 'body'}: expected {len(expected)} elements, got {len(got)}"
    if _has_no_order(expected):
        expected, got = _by_rank(expected), _by_rank(got)
    if where.endswith(".taints"):  # a set
        expected, got = sorted(expected), sorted(got)
    for index, (one, other) in enumerate(zip(expected, got, strict=True)):
        found = _value_mismatch(f"{where}[{index}]", one, other)
        if found:
            return found
    return None


def _has_no_order(rows: list[Any]) -> bool:
    """Rows of loads, whose order is open; records of workers, sorted by id here, by scope there."""
    return all(isinstance(r, dict) and ("active_requests" in r or "lifecycle" in r) for r in rows)


def _by_rank(rows: list[Any]) -> list[Any]:
    return sorted(rows, key=lambda row: (row.get("worker_id", -1), row.get("dp_rank", -1)))


def _error_mismatch(where: str, expected: str, got: object) -> str | None:
    if not isinstance(got, str):
        return f"{where}: expected a text, got {got!r}"
    if expected == ANY_TEXT or expected.startswith(FREE_TEXTS):
        return None
    fixed = FREE_TAIL.sub(r"\1", expected)
    if fixed != expected:
        return None if got.startswith(fixed) else f"{where}: expected {fixed!r}…, got {got!r}"
    return None if expected == got else f"{where}: expected {expected!r}, got {got!r}"


def _is_uuid(value: object) -> bool:
    try:
        return UUID(str(value)).version == 4
    except ValueError:
        return False


# -- /dump: the grouping of blocks into events is free, the blocks are not ----------------------

Edge = tuple[int, int, str, int | None, int, int]


def _dump_mismatch(expected: dict[str, Any], got: object) -> str | None:
    if not isinstance(got, dict):
        return f"expected an object, got {got!r}"
    if expected.keys() != got.keys():
        return f"scopes: expected {sorted(expected)}, got {sorted(got)}"
    for scope, entry in expected.items():
        if entry["block_size"] != got[scope]["block_size"]:
            return f"{scope}: block_size {got[scope]['block_size']}"
        if not all(map(_has_shape, got[scope]["events"])):
            return f"{scope}: an event of another shape than a dump has"
        wanted, found = dump_edges(entry["events"]), dump_edges(got[scope]["events"])
        if wanted != found:
            missing, surplus = sorted(wanted - found, key=str), sorted(found - wanted, key=str)
            return f"{scope}: missing {missing}, surplus {surplus}"
    return None


def _has_shape(event: dict[str, Any]) -> bool:
    stored = event["event"]["data"]["stored"]
    return (
        isinstance(event["event"]["event_id"], int)
        and stored["start_position"] is None
        and all(block["mm_extra_info"] is None for block in stored["blocks"])
    )


def dump_edges(events: list[Any]) -> set[Edge]:
    """(worker, rank, tier, parent, block_hash, tokens_hash) of every block in a dump."""
    edges: set[Edge] = set()
    for event in events:
        body = event["event"]
        holder = event["worker_id"], body["dp_rank"], event["storage_tier"]
        parent = body["data"]["stored"]["parent_hash"]
        for block in body["data"]["stored"]["blocks"]:
            edges.add((*holder, parent, block["block_hash"], block["tokens_hash"]))
            parent = block["block_hash"]
    return edges
