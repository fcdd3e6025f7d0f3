"""Meaning of events, as the golden files write it, put on the wire in either encoding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.indexer.encoding import ARRAY_FIELDS, plain


def as_map(event: Mapping[str, Any]) -> dict[str, Any]:
    """The map form."""
    fields: dict[str, Any] = plain(event)
    return fields


def as_array(event: Mapping[str, Any]) -> list[Any]:
    """The positional form; what is absent travels as nil."""
    return [event["type"], *(plain(event.get(name)) for name in ARRAY_FIELDS[event["type"]])]


ENCODINGS = {"map": as_map, "array": as_array}
