"""Long lists in an answer: written in slices, a µs or a few for each item.

Who asks gets what was found; it is only written here, which takes as long as finding it. Handlers
(`handlers/`) put what they get in the place of the list.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, cast

from select_service.edge.slices import Slices

if TYPE_CHECKING:
    from collections.abc import Sequence

    from select_service.edge.codec.answers import Writer

__all__ = ["written"]

T = TypeVar("T")


async def written(writer: Writer, items: Sequence[T]) -> list[T]:
    """Return the items as they stand in an answer; the encoder copies them."""
    slices, rows = Slices(), list[object]()
    for item in items:
        rows.append(writer.written(item))
        await slices.breathe()
    return cast("list[T]", rows)
