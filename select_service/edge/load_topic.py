"""Load reports that workers publish on their event endpoint, topic `kv_metrics`.

They carry the same content as POST /workers/{id}/metrics, for workers that publish anyway. The
first frame of a message is the topic `kv_metrics`, the last is MessagePack or JSON: one rank's
`{"kv_used_blocks", "kv_total_blocks", "num_requests_waiting", "num_requests_running"}` with a
`dp_rank` if it is not the publisher's own, or `{"ranks": [such objects]}`. A sequence number, if
any, is ignored. Only the latest report of each rank is kept, and applied a few times a second:
however fast a worker reports, its KV events do not wait.
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

APPLY_AFTER_S: Final = 0.1
"""Between the first report received and applying all that have arrived by then."""
UNREADABLE: Final = (ValueError, RecursionError, OverflowError)  # what msgspec and `read` raise
RANKS_MAX: Final = 65_536
"""Ranks with a report not yet applied."""
_TOO_MANY: Final = "more ranks than a worker may have"
_MEMBERS_MAX: Final = 64  # six are defined; unknown ones are skipped
_FRAMES_MIN: Final = 2  # topic and payload; engines' own sockets put a sequence number between


class _RankReport(msgspec.Struct):
    """A message, read leniently: unknown members are skipped."""

    dp_rank: int | None = None
    kv_used_blocks: float | None = None
    kv_total_blocks: int | None = None
    num_requests_waiting: int | None = None
    num_requests_running: int | None = None


class _Message(_RankReport):
    ranks: list[_RankReport] = []


_from_msgpack: Final = msgspec.msgpack.Decoder(_Message, strict=False).decode
_from_json: Final = msgspec.json.Decoder(_Message, strict=False).decode
_members_of: Final = msgspec.msgpack.Decoder(dict[str, msgspec.Raw]).decode


class LoadTopic:
    """Collects reports and hands them on in batches."""

    def __init__(
        self,
        take: Callable[[int, WorkerMetrics], None],
        *,
        bytes_max: int = AdmissionSettings().load_report_bytes_max,
        ranks_max: int = CoreLimits().data_parallel_size_max,
    ) -> None:
        """Start with no reports.

        Args:
            take: applies what one worker reported; must not raise.
            bytes_max: size of a message; bounded because empty ranks take a byte each, and all are
                decoded in one go.
            ranks_max: ranks in one message.
        """
        self._bytes_max, self._ranks_max = bytes_max, ranks_max
        self.received = 0
        self.bad = 0
        """Messages that were unreadable or too long."""
        self.left_out = 0
        """Reports dropped because too many ranks were waiting to be applied."""
        self._take = take
        self._latest: dict[tuple[int, int], RankMetrics] = {}
        self._timer: asyncio.TimerHandle | None = None

    def receive(self, stream: EventStream, frames: Sequence[bytes]) -> None:
        """Record one message of the topic; never raises."""
        self.received += 1
        rank = stream.rank
        try:
            message = read(frames, self._bytes_max, self._ranks_max)
            for one in message.ranks or [message]:
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
        """Stop handing on reports. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._latest.clear()


def read(frames: Sequence[bytes], bytes_max: int, ranks_max: int) -> _Message:
    """Read one message of the topic, within bounds on bytes and ranks.

    Raises:
        ValueError: it is invalid or too large; or another of `UNREADABLE`.
    """
    if len(frames) < _FRAMES_MIN:
        raise ValueError("no payload")
    payload = frames[-1]
    if len(payload) > bytes_max:
        raise ValueError("more bytes than --load-report-bytes-max")
    if payload[:1] == b"{":
        if payload.count(b"{") > 2 * ranks_max:  # twice, since unknown members may contain objects
            raise ValueError(_TOO_MANY)
        message = _from_json(payload)
    else:
        _refuse_many(payload, ranks_max)
        message = _from_msgpack(payload)
    if len(message.ranks) > ranks_max:
        raise ValueError(_TOO_MANY)
    return message


def _refuse_many(payload: bytes, ranks_max: int) -> None:
    """Refuse MessagePack that announces too many elements, before any objects are created.

    Raises:
        ValueError: it does; or another of `UNREADABLE`.
    """
    if _announced(payload, b"\xde", b"\xdf") > _MEMBERS_MAX:
        raise ValueError("more members than a report has")
    ranks = _members_of(payload).get("ranks")
    if ranks is not None and _announced(bytes(ranks), b"\xdc", b"\xdd") > ranks_max:
        raise ValueError(_TOO_MANY)


def _announced(text: bytes, short: bytes, long: bytes) -> int:
    """Return the element count in the header of a map or array; 0 if it has at most 15."""
    head = text[:1]
    size = 2 if head == short else 4 if head == long else 0
    return int.from_bytes(text[1 : 1 + size])


def rank_metrics(report: _RankReport, dp_rank: int) -> RankMetrics:
    """Convert the report of one rank to the form that POST /workers/{id}/metrics takes.

    Raises:
        ValueError: a number is out of range or not finite.
    """
    if report.kv_used_blocks is not None and not isfinite(report.kv_used_blocks):
        raise ValueError("kv_used_blocks must be finite")
    fields = {
        "dp_rank": dp_rank,
        "kv_used_blocks": report.kv_used_blocks,
        "kv_total_blocks": report.kv_total_blocks,
        "num_requests_waiting": report.num_requests_waiting,
        "num_requests_running": report.num_requests_running,
    }
    return msgspec.convert(fields, RankMetrics)
