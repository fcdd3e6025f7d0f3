"""W1, W2, W3 and W5: a server with as many selections as the client can make.

A workload prepares a target once, then gives the phases of each round: a name and a function that
does the work and returns how many units it did. Its caller reads the CPU clock around each.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, ClassVar

from bench.compare.served import Phase
from bench.compare.target import MODEL, Target, expect
from bench.load.events import batch, stored
from bench.load.http import Answer, Operation, request_bytes
from bench.load.prompts import BLOCK_SIZE, Prompt, body, random_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "Overlap",
    "OverlapRequest",
    "Select",
    "feed",
    "overlapping",
    "ring_of_prompts",
    "selections",
]

_BLOCKS_PER_EVENT = 64


@dataclass(frozen=True, slots=True)
class Select:
    """W1, W3, W5: POST /select of prompts that no worker holds."""

    name: str
    isl: int
    operations: int
    workers: int = 16
    tokens: bool = False
    ring: int = 64  # distinct prompts, sent in turn
    shares_stream: ClassVar[bool] = True
    unit: ClassVar[str] = "select"

    @property
    def rows(self) -> tuple[str, ...]:
        """One, of the same name."""
        return (self.name,)

    def prepare(self, target: Target) -> None:
        """Nothing beyond the workers."""

    def phases(self, target: Target, round_number: int) -> Sequence[Phase]:
        """One phase."""
        del round_number
        operation, check = selections(target.worker_ids, self.isl, self.ring, tokens=self.tokens)
        return [Phase(self.name, lambda: target.drive(operation, check, self.operations))]


@dataclass(frozen=True, slots=True)
class Overlap:
    """W2: POST /select of prompts whose first 60 to 95 % some workers hold, fed by real events.

    Every worker holds the first quarter of each family's prompt (a shared system prompt), three
    of the sixteen hold all of it; a request is a part of it and a tail of its own.
    """

    name: str
    isl: int
    operations: int
    families: int = 32
    ring: int = 128
    workers: ClassVar[int] = 16
    shares_stream: ClassVar[bool] = False
    unit: ClassVar[str] = "select"

    @property
    def rows(self) -> tuple[str, ...]:
        """One, of the same name."""
        return (self.name,)

    def prepare(self, target: Target) -> None:
        """Publish what the workers hold and wait until it is indexed."""
        for family, prompt in enumerate(self.families_prompts()):
            for worker_id, blocks in self.held(target.worker_ids, family).items():
                feed(target, worker_id, prompt, blocks)
        # streams are indexed in order: a worker with the last family has them all
        last = self.families_prompts()[-1]
        for worker_id, blocks in self.held(target.worker_ids, self.families - 1).items():
            target.wait_indexed(last, worker_id, blocks)

    def phases(self, target: Target, round_number: int) -> Sequence[Phase]:
        """One phase."""
        del round_number
        requests, expected = overlapping(self)

        def operation(number: int) -> Operation:
            return requests[number % len(requests)]

        def check(answer: Answer) -> None:
            expect(answer, expected[answer.operation % len(expected)])

        return [Phase(self.name, lambda: target.drive(operation, check, self.operations))]

    def families_prompts(self) -> Sequence[Prompt]:
        """What is cached somewhere."""
        return ring_of_prompts(self.isl, self.families, salt="family")

    def holders(self, family: int) -> frozenset[int]:
        """The workers that have all of a family's prompt."""
        return frozenset(1 + (family + step) % self.workers for step in (0, 5, 11))

    def held(self, worker_ids: Sequence[int], family: int) -> dict[int, int]:
        """How many leading blocks of a family's prompt each worker holds."""
        holders, whole = self.holders(family), self.isl // BLOCK_SIZE
        return {one: whole if one in holders else whole // 4 for one in worker_ids}

    @property
    def blocks(self) -> int:
        """Distinct blocks that the workers hold."""
        return self.families * (self.isl // BLOCK_SIZE)

    def requests(self, salt: str) -> list[OverlapRequest]:
        """Families in turn; always the same ones for the same arguments."""
        rng = Random(f"{self.name} {salt}")
        families = self.families_prompts()
        found = []
        for position in range(self.ring):
            family = position % self.families
            matched = int(rng.uniform(0.60, 0.95) * (self.isl // BLOCK_SIZE))
            known = families[family].token_ids[: matched * BLOCK_SIZE]
            tail = random_tokens(rng, self.isl - len(known))
            found.append(OverlapRequest(Prompt.of([*known, *tail]), family, matched))
        return found


@dataclass(frozen=True, slots=True)
class OverlapRequest:
    """A prompt of which some workers hold the first blocks."""

    prompt: Prompt
    family: int
    matched: int  # blocks that it has in common with its family's prompt


def selections(
    worker_ids: Sequence[int], isl: int, ring: int, *, tokens: bool = False
) -> tuple[Callable[[int], Operation], Callable[[Answer], None]]:
    """POST /select of prompts no worker holds: the n-th operation, and what checks its answer."""
    requests = _selections(isl, ring, tokens=tokens)
    left = dict.fromkeys(worker_ids, isl)

    def operation(number: int) -> Operation:
        return requests[number % len(requests)]

    def check(answer: Answer) -> None:
        expect(answer, left)

    return operation, check


def feed(target: Target, worker_id: int, prompt: Prompt, blocks: int) -> None:
    """Publish the first blocks of a prompt as a worker's, 64 per event.

    The engine hashes are functions of the content, the same on every worker: a fleet whose engines
    hash alike. (The peer loses blocks of engines that hash differently; that would
    void the workload, not slow it down.)
    """
    hashes = prompt.sequence_hashes[:blocks]
    for first in range(0, blocks, _BLOCKS_PER_EVENT):
        last = min(first + _BLOCKS_PER_EVENT, blocks)
        parent = hashes[first - 1] if first else None
        tokens = prompt.token_ids[first * BLOCK_SIZE : last * BLOCK_SIZE]
        event = stored(hashes[first:last], parent, tokens)
        target.publishers.publish(worker_id - 1, batch([event]))


@functools.lru_cache(maxsize=16)
def ring_of_prompts(isl: int, count: int, salt: str = "") -> Sequence[Prompt]:
    """Always the same ones for the same arguments, for every contender."""
    rng = Random(f"{isl} {salt}")
    return [Prompt.of(random_tokens(rng, isl)) for _ in range(count)]


@functools.lru_cache(maxsize=1)
def overlapping(of: Overlap) -> tuple[list[Operation], list[dict[int, int]]]:
    """The requests of W2, and for each the workers that may be chosen, with tokens left."""
    asked = of.requests("requests")
    expected = [
        dict.fromkeys(of.holders(one.family), of.isl - one.matched * BLOCK_SIZE) for one in asked
    ]
    return _select_requests([one.prompt for one in asked], tokens=False), expected


@functools.lru_cache(maxsize=4)
def _selections(isl: int, ring: int, *, tokens: bool) -> list[Operation]:
    return _select_requests(ring_of_prompts(isl, ring), tokens=tokens)


def _select_requests(prompts: Sequence[Prompt], *, tokens: bool) -> list[Operation]:
    fields = [prompt.token_form() if tokens else prompt.hash_form() for prompt in prompts]
    bodies = [body({"model_name": MODEL}, one) for one in fields]
    return [(request_bytes("POST", "/select", one),) for one in bodies]
