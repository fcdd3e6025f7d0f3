"""Encodes long lists of an answer in slices, a few µs per item.

The items are complete when they get here; encoding them takes as long as finding them. Handlers
(`handlers/`) put the result in the place of the list.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, cast

from select_service.edge.cooperative import TimeSlices

if TYPE_CHECKING:
    from collections.abc import Sequence

    from select_service.edge.codec.encoder import Writer

T = TypeVar("T")


async def written(writer: Writer, items: Sequence[T]) -> list[T]:
    """Return the items encoded; the encoder of the answer copies them verbatim."""
    slices, rows = TimeSlices(), list[object]()
    for item in items:
        rows.append(writer.written(item))
        await slices.yield_if_due()
    return cast("list[T]", rows)
