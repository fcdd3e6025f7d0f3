"""Fleets that may be doubted, and what becomes of what is reported of them."""

from __future__ import annotations

import math
from typing import Any

from indexer.types import WorkerRank
from select_service.types import RankTrustRow, TrustSettings
from tests.indexer.encoding import encode_batch, message, stored
from tests.select_service.core.whole_fleet import Fleet, selection_of

PROMPT = tuple(range(1, 9))  # 8 blocks of 16 tokens
ISL = 136  # and half a block more
FINDABLE = 128


def fleet_of(workers: int = 2, **settings: Any) -> Fleet:
    fleet = Fleet(trust=TrustSettings(**settings))
    for worker_id in range(1, workers + 1):
        fleet.worker(worker_id)
    return fleet


def trust(fleet: Fleet, worker_id: int) -> RankTrustRow:
    return next(row for row in fleet.core.trust_monitor.table().ranks if row.worker_id == worker_id)


def serve(fleet: Fleet, worker_id: int, found: int | None, times: int = 1) -> None:
    """Let a worker have a prompt, and say what it found of it."""
    for _ in range(times):
        selection_of(fleet.take("r", *PROMPT, isl=ISL, allowed_worker_ids=[worker_id]))
        fleet._did(fleet.core.reservations.prefill_complete("r", fleet.now, found))
        fleet.free("r")


class Late(Fleet):
    """One worker whose batches come as late as the test wants."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(trust=TrustSettings(**settings))
        self.worker(1, replay_endpoint="tcp://127.0.0.1:6001")
        self.core.trust_monitor.wall_ahead = 0.0
        self.seq = 0
        self.late_s = math.inf  # of the last batch
        stream = self.core.membership.stream_at(WorkerRank(1, 0))
        assert stream is not None
        self.stream = stream

    def event(self, late_s: float, seq: int | None = None, *, is_set: bool = False) -> None:
        """One more batch; what is later than the one before was made after it all the same.

        Args:
            late_s: by so much.
            seq: its number, if not the next.
            is_set: it is not later: the engine's clock was set back.
        """
        if not is_set:
            self.now += max(0.0, late_s - self.late_s)
        self.late_s = late_s
        number = self.seq if seq is None else seq
        payload = encode_batch(
            [stored([number + 1], [number * 16 + at for at in range(16)])], ts=self.now - late_s
        )
        self.stream.on_live(message(number, payload), self.now)
        self.seq = number + 1
        self.tick(1.0)

    def fall_behind(self, late_s: float) -> None:
        """Batches of a busy engine, each of which comes half a second later than the one before."""
        while self.late_s + 0.5 < late_s:
            self.event(self.late_s + 0.5)
        self.event(late_s)

    @property
    def row(self) -> RankTrustRow:
        return trust(self, 1)
