"""Records of many workers in an answer: read and encoded in slices, some 10 µs each.

`handlers/workers.py` and `handlers/process.py` use it if there are more than a few. Each record
shows its worker at the moment it is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar, cast

import msgspec

from select_service.edge.cooperative import TimeSlices

if TYPE_CHECKING:
    from collections.abc import Sequence

    from select_service.edge.codec.encoder import Writer
    from select_service.edge.http.api import Api

AT_ONCE_MAX: Final = 16
"""Up to this many are encoded without a pause, and without a task of their own."""


async def records(
    api: Api, ids: Sequence[int], model_name: str | None = None, tenant_id: str | None = None
) -> list[msgspec.Raw]:
    """Return the encoded records, to be used as a list in an answer, or as all of it.

    Args:
        api: reads and encodes them.
        ids: of workers, in the order of the answer.
        model_name: only workers of this model, if given.
        tenant_id: likewise.
    """
    slices, rows = TimeSlices(), list[msgspec.Raw]()
    for worker_id in ids:
        record = api.service.worker_record(worker_id)
        if (
            record is not None
            and (model_name is None or record.model_name == model_name)
            and (tenant_id is None or record.tenant_id == tenant_id)
        ):
            rows.append(msgspec.Raw(api.writer.encode(record)))
        await slices.yield_if_due()
    return rows


# Encodes long lists of an answer in slices, a few µs per item. The items are complete when they get
# here; encoding them takes as long as finding them. Handlers (`handlers/`) put the result in the
# place of the list.

T = TypeVar("T")


async def written(writer: Writer, items: Sequence[T]) -> list[T]:
    """Return the items encoded; the encoder of the answer copies them verbatim."""
    return cast("list[T]", await TimeSlices().mapped(writer.written, items))
