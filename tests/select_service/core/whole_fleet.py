"""A core with a few workers, for tests that speak to it directly."""

from __future__ import annotations

import random
from typing import Any, Final

from indexer.core.packing import pack_u64
from indexer.core.registry import StreamRegistry
from indexer.types import Scope, Tier, WorkerRank
from select_service.core.admission.queue import Ticket
from select_service.core.effects import Effects
from select_service.core.instrumentation.instrumented import CoreObservers
from select_service.core.service import ProcessLife, SelectionCore
from select_service.types import (
    Answer,
    PairSelection,
    ReservationRequest,
    RouterConfig,
    SelectAndReserveRequest,
    Selection,
    SelectPairRequest,
    SelectRequest,
    WorkerPatch,
    WorkerRecord,
    WorkerSpec,
)
from select_service.types.workers import DrainRequest, DrainStatus

__all__ = ["DEFAULT", "Fleet", "is_checked", "long_lives", "selection_of", "ticket_of"]

DEFAULT = Scope("default", "default")

EACH: Final = 64
"""So many calls are checked one by one, then every sixteenth, and the state when a test ends.

A check looks at all there is, and what is wrong stays wrong: after each of a thousand calls it
takes four fifths of a test.
"""

long_lives: Final[list[Fleet]] = []
"""Fleets that had more calls than that: a test ends with their checks."""


def is_checked(calls: int) -> bool:
    """Whether the state is checked after the last of so many calls."""
    return calls <= EACH or not calls % 16


class Fleet:
    """The core under test, its clock, and shorthands for its verbs; `check` runs after them."""

    def __init__(self, config: RouterConfig | None = None, **settings: Any) -> None:
        for name, kind in (
            ("life", ProcessLife),
            ("watch", CoreObservers),
        ):  # their fields, said beside the rest
            said = {one: settings.pop(one) for one in kind.__struct_fields__ if one in settings}
            settings[name] = kind(**said)
        self.core = SelectionCore(
            StreamRegistry(), config or RouterConfig(), random.Random(1), **settings
        )
        self.now = 100.0
        self.effects = Effects()
        self.calls = 0

    def _did(self, effects: Effects) -> None:
        self.effects = effects
        self.calls += 1
        if self.calls == EACH:
            long_lives.append(self)
        if is_checked(self.calls):
            self.core.check()

    def worker(self, worker_id: int, **record: Any) -> WorkerRecord:
        base: dict[str, Any] = {
            "endpoint": f"http://w{worker_id}",
            "block_size": 16,
            "kv_events_endpoint": f"tcp://127.0.0.1:{5000 + worker_id}",
        }
        spec = WorkerSpec(worker_id=worker_id, **(base | record))
        answer, effects = self.core.workers.upsert_worker(spec, self.now)
        self._did(effects)
        return answer

    def patch(self, worker_id: int, **changes: Any) -> WorkerRecord:
        answer, effects = self.core.workers.patch_worker(
            worker_id, WorkerPatch(**changes), self.now
        )
        self._did(effects)
        return answer

    def delete(self, worker_id: int) -> WorkerRecord:
        answer, effects = self.core.workers.delete_worker(worker_id, self.now)
        self._did(effects)
        return answer

    def drain(self, worker_id: int, reason: str | None = None) -> DrainStatus:
        answer, effects = self.core.drains.drain(worker_id, DrainRequest(reason=reason), self.now)
        self._did(effects)
        return answer

    def undrain(self, worker_id: int) -> DrainStatus:
        answer, effects = self.core.drains.undrain(worker_id, self.now)
        self._did(effects)
        return answer

    def hold_back(self, worker_id: int, why: str | None, source: str = "api") -> WorkerRecord:
        self._did(self.core.drains.hold_back(worker_id, source, why, self.now))
        return self.core.workers.worker(worker_id)

    def hold(self, worker_id: int, blocks: list[int], dp_rank: int = 0) -> None:
        """Let a rank's device cache hold a prompt of these local block hashes."""
        index = self.core.partitions[DEFAULT].index
        index.store(
            WorkerRank(worker_id, dp_rank),
            Tier.DEVICE,
            None,
            [1000 + block for block in blocks],
            pack_u64(blocks),
        )

    def select(self, *hashes: int, isl: int | None = None, **wishes: Any) -> Answer | Ticket:
        request = SelectRequest(
            block_hashes=list(hashes),
            sequence_hashes=list(hashes),
            isl_tokens=len(hashes) * 16 if isl is None else isl,
            **wishes,
        )
        answer, effects = self.core.selection.select(request, self.now)
        self._did(effects)
        return answer

    def take(
        self, reservation_id: str | None, *hashes: int, isl: int | None = None, **wishes: Any
    ) -> Answer | Ticket:
        request = SelectAndReserveRequest(
            reservation_id=reservation_id,
            block_hashes=list(hashes),
            sequence_hashes=list(hashes),
            isl_tokens=len(hashes) * 16 if isl is None else isl,
            **wishes,
        )
        answer, effects = self.core.selection.select_and_reserve(request, self.now)
        self._did(effects)
        return answer

    def pair(
        self, reservation_id: str | None, *hashes: int, isl: int | None = None, **wishes: Any
    ) -> PairSelection | Ticket:
        request = SelectPairRequest(
            reservation_id=reservation_id,
            block_hashes=list(hashes),
            sequence_hashes=list(hashes),
            isl_tokens=len(hashes) * 16 if isl is None else isl,
            **wishes,
        )
        answer, effects = self.core.selection.select_and_reserve(request, self.now)
        self._did(effects)
        assert isinstance(answer, PairSelection | Ticket)
        return answer

    def book(
        self, reservation_id: str, worker_id: int, *hashes: int, isl: int | None = None, **more: Any
    ) -> None:
        request = ReservationRequest(
            reservation_id=reservation_id,
            worker_id=worker_id,
            sequence_hashes=list(hashes),
            isl_tokens=len(hashes) * 16 if isl is None else isl,
            **more,
        )
        _, effects = self.core.reservations.reserve(request, self.now)
        self._did(effects)

    def free(self, name: str) -> None:
        self._did(self.core.reservations.free(name, self.now))

    def done(self, name: str) -> None:
        self._did(self.core.reservations.prefill_complete(name, self.now))

    def load(self, worker_id: int, dp_rank: int = 0) -> tuple[int, int, int] | None:
        """(prefill tokens, decode blocks, requests) of a rank, None when it is not listed."""
        for scope in self.core.queries.loads():
            for row in scope.loads:
                if (row.worker_id, row.dp_rank) == (worker_id, dp_rank):
                    return (
                        row.potential_prefill_tokens,
                        row.potential_decode_blocks,
                        row.active_requests,
                    )
        return None

    def tick(self, seconds: float) -> None:
        """Let time pass and housekeeping finish."""
        self.now += seconds
        more = True
        while more:
            more, effects = self.core.tick(self.now)
            self._did(effects)


def selection_of(answer: object) -> Selection:
    """Return an answer that is one to a request that did not have to wait."""
    assert isinstance(answer, Selection)
    return answer


def ticket_of(answer: object) -> Ticket:
    """Return what stands for an answer that is waited for."""
    assert isinstance(answer, Ticket)
    return answer
