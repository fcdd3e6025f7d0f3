"""One contender under one workload: its process, its event streams, and how it is asked things.

Requests are made so that both generations of the interface accept them; see `README.md` for the
differences that matter.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec

from bench.load.http import BadAnswer, ask, drive, request_bytes
from bench.load.plain_client import drive_plainly
from bench.load.prompts import BLOCK_SIZE, body

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from bench.compare.servers import RunningServer
    from bench.load.events import Publishers
    from bench.load.http import Answer, Operation
    from bench.load.prompts import Prompt

__all__ = ["MODEL", "NEVER_BUSY", "CheckedSelection", "Target", "expect"]

MODEL = "bench"
NEVER_BUSY = 10**9  # max_num_batched_tokens: queueing must not mix into what is measured
_SETTLE_TIMEOUT_S = 60.0
_POLL_S = 0.005


class CheckedSelection(msgspec.Struct):
    """The part of a selection that distinguishes a right answer from a quick one."""

    worker_id: int
    effective_prefill_tokens: int


class _Row(msgspec.Struct):
    worker_id: int
    device_blocks: int


class _OverlapScores(msgspec.Struct):
    workers: list[_Row]


_SELECTION = msgspec.json.Decoder(CheckedSelection)
_OVERLAP = msgspec.json.Decoder(_OverlapScores)


def expect(answer: Answer, left: Mapping[int, int]) -> None:
    """Check a selection.

    Args:
        answer: what came.
        left: for each worker that may be chosen the tokens it has left to prefill.

    Raises:
        BadAnswer: wrong status, another worker, or other tokens left to prefill.
    """
    if answer.status != 200:
        raise BadAnswer(f"{answer.status} {answer.body[:300]!r}")
    selection = _SELECTION.decode(answer.body)
    if left.get(selection.worker_id) != selection.effective_prefill_tokens:
        right = dict(sorted(left.items())[:16])
        raise BadAnswer(f"{selection} where the worker and its tokens left are one of {right}")


class Target:
    """A contender made ready for one workload."""

    def __init__(self, server: RunningServer, publishers: Publishers, connections: int) -> None:
        self.server = server
        self.publishers = publishers
        self.worker_ids = range(1, len(publishers.endpoints) + 1)
        self.operations_done = 0
        self._connections = connections

    def register_workers(self) -> None:
        """Every worker of the workload, schedulable and listened to."""
        requests = [
            request_bytes(
                "POST",
                "/workers",
                body(
                    {
                        "worker_id": worker_id,
                        "model_name": MODEL,
                        "endpoint": f"http://worker-{worker_id}.invalid:8000",
                        "block_size": BLOCK_SIZE,
                        "kv_events_endpoint": endpoint,
                        "max_num_batched_tokens": NEVER_BUSY,
                    }
                ),
            )
            for worker_id, endpoint in zip(self.worker_ids, self.publishers.endpoints, strict=True)
        ]
        for record in ask(self.server.address, requests):
            if b'"schedulable"' not in record:
                raise BadAnswer(f"not schedulable: {record!r:.300}")
        self.publishers.wait_subscribed()

    def drive(
        self,
        operation: Callable[[int], Operation],
        check: Callable[[Answer], None],
        count: int,
    ) -> int:
        """Carry out the next `count` operations; numbers go on from the last call."""
        operations = range(self.operations_done, self.operations_done + count)
        drive(
            self.server.address,
            operation,
            check,
            operations=operations,
            connections=self._connections,
        )
        self.operations_done = operations.stop
        return count

    def drive_plainly(
        self, operation: Callable[[int], Operation], check: Callable[[Answer], None], count: int
    ) -> int:
        """Do the same with Python's own client, one request after the other."""
        operations = range(self.operations_done, self.operations_done + count)
        drive_plainly(self.server.address, operation, check, operations=operations)
        self.operations_done = operations.stop
        return count

    def wait_indexed(self, prompt: Prompt, worker_id: int, blocks: int) -> None:
        """Ask until a worker is seen to hold exactly so many leading blocks of a prompt.

        Raises:
            BadAnswer: it never is.
        """
        request = self.overlap_request(prompt)
        deadline = time.monotonic() + _SETTLE_TIMEOUT_S
        while (seen := self._device_blocks(request)[worker_id]) != blocks:
            if time.monotonic() > deadline:
                raise BadAnswer(f"worker {worker_id} holds {blocks} blocks, the index says {seen}")
            time.sleep(_POLL_S)

    def check_indexed(self, expected: Sequence[tuple[Prompt, dict[int, int]]]) -> None:
        """Compare the index with what each worker holds (absent from the dict: nothing)."""
        for prompt, held in expected:
            for worker_id, seen in self._device_blocks(self.overlap_request(prompt)).items():
                if seen != held.get(worker_id, 0):
                    blocks = held.get(worker_id, 0)
                    raise BadAnswer(
                        f"worker {worker_id} holds {blocks} blocks, the index says {seen}"
                    )

    @staticmethod
    def overlap_request(prompt: Prompt) -> bytes:
        """POST /overlap_scores for a prompt."""
        fields: dict[str, Any] = {"model_name": MODEL}
        return request_bytes("POST", "/overlap_scores", body(fields, prompt.hash_form()))

    def _device_blocks(self, request: bytes) -> dict[int, int]:
        (answer,) = ask(self.server.address, [request])
        return {row.worker_id: row.device_blocks for row in _OVERLAP.decode(answer).workers}
