"""Sessions as state that outlives the process; see `core/state.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct

from indexer.types import Scope
from select_service.core.effects import NOTHING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from select_service.core.effects import Effects
    from select_service.core.partition import Partition
    from select_service.core.reservations.sessions import Sessions

_read_name: Final = msgspec.json.Decoder(tuple[str, str, str]).decode


class _SessionRecord(Struct, array_like=True, frozen=True):
    """A session on disk. New fields go to the end, with a default."""

    worker_id: int
    dp_rank: int
    gap_s: float = 0.0
    version: int = 1


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_SessionRecord).decode


class SessionSection:
    """The rows of sessions."""

    def __init__(self, sessions: Sessions, partitions: Mapping[Scope, Partition]) -> None:
        self._sessions = sessions
        self._partitions = partitions

    def record(self, name: str) -> bytes | None:
        """Return where a session is; None: it is forgotten."""
        model_name, tenant_id, session_id = _read_name(name)
        partition = self._partitions.get(Scope(model_name, tenant_id))
        rank = None if partition is None else self._sessions.present(partition, session_id)
        if partition is None or rank is None:
            return None
        worker, dp_rank = partition.fleet_slots.rank_at(rank.slot)
        return _encode(_SessionRecord(worker.worker_id, dp_rank, rank.gap_s, rank.version))

    def restore(self, name: str, record: bytes, now: float) -> Effects | None:
        """Remember a session whose rank is there again."""
        model_name, tenant_id, session_id = _read_name(name)
        state = _decode(record)
        partition = self._partitions.get(Scope(model_name, tenant_id))
        worker = None if partition is None else partition.fleet_slots.present.get(state.worker_id)
        if partition is None or worker is None or state.dp_rank not in worker.slots:
            return None
        slot = worker.slots[state.dp_rank]
        is_latest = self._sessions.restore(
            partition, session_id, slot, now, gap_s=state.gap_s, version=state.version
        )
        return NOTHING if is_latest else None
