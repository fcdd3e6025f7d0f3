"""What workers tell of their own load on their event endpoint: the topic `kv_metrics`.

The same as POST /workers/{id}/metrics says, for a worker that publishes anyway. A message has the
topic `kv_metrics` as its first frame and, as its last, MessagePack or JSON: one rank's
`{"kv_used_blocks", "kv_total_blocks", "num_requests_waiting", "num_requests_running"}` with a
`dp_rank` where it is not the publisher's own, or `{"ranks": [those]}`. It has no sequence number
that means anything. Only the latest of each rank is kept, and taken in a few times a second:
however fast a worker talks, its KV events do not wait for it.
"""

from __future__ import annotations

import asyncio
from math import isfinite
from typing import TYPE_CHECKING, Final

import msgspec

from select_service.types import CoreLimits
from select_service.types.admission import AdmissionSettings, RankMetrics, WorkerMetrics

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from indexer.core.stream import EventStream

__all__ = ["APPLY_AFTER_S", "LoadTopic"]

APPLY_AFTER_S: Final = 0.1
"""Between hearing something and taking it in with whatever else was heard."""
UNREADABLE: Final = (ValueError, RecursionError, OverflowError)  # also what msgspec raises
RANKS_MAX: Final = 65_536
"""Ranks heard of and not taken in yet."""
_TOO_MANY: Final = "more ranks than a worker may have"
_MEMBERS_MAX: Final = 64  # there are six; what is new among them is skipped
_FRAMES_MIN: Final = 2  # topic and payload; engines' own sockets put a number between


class _Told(msgspec.Struct):
    """A message, leniently: whatever else it says is skipped."""

    dp_rank: int | None = None
    kv_used_blocks: float | None = None
    kv_total_blocks: int | None = None
    num_requests_waiting: int | None = None
    num_requests_running: int | None = None


class _Message(_Told):
    ranks: list[_Told] = []


_from_msgpack: Final = msgspec.msgpack.Decoder(_Message, strict=False).decode
_from_json: Final = msgspec.json.Decoder(_Message, strict=False).decode
_members_of: Final = msgspec.msgpack.Decoder(dict[str, msgspec.Raw]).decode


class LoadTopic:
    """Gathers reports and hands them on."""

    def __init__(
        self,
        take: Callable[[int, WorkerMetrics], None],
        *,
        bytes_max: int = AdmissionSettings().load_report_bytes_max,
        ranks_max: int = CoreLimits().data_parallel_size_max,
    ) -> None:
        """Start with nothing heard.

        Args:
            take: takes in what one worker said; it may raise nothing.
            bytes_max: of a message: empty ranks take a byte each, and all are read in one go.
            ranks_max: in one message.
        """
        self._bytes_max, self._ranks_max = bytes_max, ranks_max
        self.heard = 0
        self.bad = 0
        """Messages nobody understands, or that are too long."""
        self.left_out = 0
        """Ranks of which something was heard while too many waited to be taken in."""
        self._take = take
        self._latest: dict[tuple[int, int], RankMetrics] = {}
        self._timer: asyncio.TimerHandle | None = None

    def hear(self, stream: EventStream, frames: Sequence[bytes]) -> None:
        """Note one message of the topic; never raises."""
        self.heard += 1
        rank = stream.rank
        try:
            told = read(frames, self._bytes_max, self._ranks_max)
            for one in told.ranks or [told]:
                dp_rank = rank.dp_rank if one.dp_rank is None else one.dp_rank
                self._latest[rank.worker_id, dp_rank] = rank_metrics(one, dp_rank)
        except UNREADABLE:
            self.bad += 1
            return
        while len(self._latest) > RANKS_MAX:
            self._latest.pop(next(iter(self._latest)))
            self.left_out += 1
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(APPLY_AFTER_S, self._apply)

    def _apply(self) -> None:
        self._timer = None
        latest, self._latest = self._latest, {}
        by_worker: dict[int, list[RankMetrics]] = {}
        for (worker_id, _), metrics in latest.items():
            by_worker.setdefault(worker_id, []).append(metrics)
        for worker_id, ranks in by_worker.items():
            self._take(worker_id, WorkerMetrics(ranks=ranks))

    def close(self) -> None:
        """Hand nothing on any more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._latest.clear()


def read(frames: Sequence[bytes], bytes_max: int, ranks_max: int) -> _Message:
    """Read one message of the topic, if it is of no more than so many bytes and ranks.

    Raises:
        ValueError: it is none; or another of `UNREADABLE`.
    """
    if len(frames) < _FRAMES_MIN:
        raise ValueError("no payload")
    payload = frames[-1]
    if len(payload) > bytes_max:
        raise ValueError("more bytes than --load-report-bytes-max")
    if payload[:1] == b"{":
        if payload.count(b"{") > 2 * ranks_max:  # some may stand in what nobody knows
            raise ValueError(_TOO_MANY)
        told = _from_json(payload)
    else:
        _refuse_many(payload, ranks_max)
        told = _from_msgpack(payload)
    if len(told.ranks) > ranks_max:
        raise ValueError(_TOO_MANY)
    return told


def _refuse_many(payload: bytes, ranks_max: int) -> None:
    """Refuse MessagePack that announces too much, before objects are made of it.

    Raises:
        ValueError: it does; or another of `UNREADABLE`.
    """
    if _announced(payload, b"\xde", b"\xdf") > _MEMBERS_MAX:
        raise ValueError("more members than a report has")
    ranks = _members_of(payload).get("ranks")
    if ranks is not None and _announced(bytes(ranks), b"\xdc", b"\xdd") > ranks_max:
        raise ValueError(_TOO_MANY)


def _announced(text: bytes, short: bytes, long: bytes) -> int:
    """Return how many elements a map or an array of more than 15 has, by its head."""
    head = text[:1]
    size = 2 if head == short else 4 if head == long else 0
    return int.from_bytes(text[1 : 1 + size])


def rank_metrics(told: _Told, dp_rank: int) -> RankMetrics:
    """Return what was told of one rank in the form POST /workers/{id}/metrics takes.

    Raises:
        ValueError: a number out of its range, or none that is finite.
    """
    if told.kv_used_blocks is not None and not isfinite(told.kv_used_blocks):
        raise ValueError("kv_used_blocks must be finite")
    fields = {
        "dp_rank": dp_rank,
        "kv_used_blocks": told.kv_used_blocks,
        "kv_total_blocks": told.kv_total_blocks,
        "num_requests_waiting": told.num_requests_waiting,
        "num_requests_running": told.num_requests_running,
    }
    return msgspec.convert(fields, RankMetrics)
