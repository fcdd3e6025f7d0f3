"""W1 to W5: a server with as many requests as the client can make.

A workload prepares a target once, then gives the phases of each round: a name and a function that
does the work and returns how many units it did. Whoever runs it reads the CPU clock around each.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, ClassVar

from bench.compare.served import Phase
from bench.compare.target import MODEL, Target, expect
from bench.load.events import batch, stored
from bench.load.http import Answer, BadAnswer, Operation, ask, request_bytes
from bench.load.prompts import BLOCK_SIZE, Prompt, body, random_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Lifecycle", "Overlap", "Select", "feed", "lifecycles", "ring_of_prompts", "selections"]

_BLOCKS_PER_EVENT = 64
_ID = "bench-0000000000"


@dataclass(frozen=True, slots=True)
class Select:
    """W1, W3, W5: POST /select of prompts that nobody holds."""

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
            for worker_id, blocks in self._held(target, family, prompt).items():
                feed(target, worker_id, prompt, blocks)
        # streams are indexed in order: who has the last family has them all
        last = self.families_prompts()[-1]
        for worker_id, blocks in self._held(target, self.families - 1, last).items():
            target.wait_indexed(last, worker_id, blocks)

    def phases(self, target: Target, round_number: int) -> Sequence[Phase]:
        """One phase."""
        del round_number
        requests, expected = overlapping(self)

        def operation(number: int) -> Operation:
            return requests[number % len(requests)]

        def check(answer: Answer) -> None:
            expect(answer, *expected[answer.operation % len(expected)])

        return [Phase(self.name, lambda: target.drive(operation, check, self.operations))]

    def families_prompts(self) -> Sequence[Prompt]:
        """What is cached somewhere."""
        return ring_of_prompts(self.isl, self.families, salt="family")

    def holders(self, family: int) -> frozenset[int]:
        """The workers that have all of a family's prompt."""
        return frozenset(1 + (family + step) % self.workers for step in (0, 5, 11))

    def _held(self, target: Target, family: int, prompt: Prompt) -> dict[int, int]:
        holders, whole = self.holders(family), len(prompt.block_hashes)
        return {one: whole if one in holders else whole // 4 for one in target.worker_ids}


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """W4: select_and_reserve → prefill_complete → DELETE beside standing reservations."""

    name: str
    operations: int
    isl: int = 2048
    standing: int = 256
    ring: int = 64
    workers: ClassVar[int] = 16
    shares_stream: ClassVar[bool] = True
    unit: ClassVar[str] = "cycle"

    @property
    def rows(self) -> tuple[str, ...]:
        """One, of the same name."""
        return (self.name,)

    def prepare(self, target: Target) -> None:
        """Book the standing reservations; their prefill is done, their blocks stay."""
        prompts = ring_of_prompts(self.isl, self.standing, salt="standing")
        for number, prompt in enumerate(prompts):
            name = f"standing-{number}"
            ask(
                target.server.address,
                [
                    request_bytes("POST", "/select_and_reserve", booking_body(name, prompt)),
                    request_bytes("POST", f"/reservations/{name}/prefill_complete"),
                ],
            )

    def phases(self, target: Target, round_number: int) -> Sequence[Phase]:
        """One phase."""
        del round_number
        operation, check = lifecycles(target.worker_ids, self.isl, self.ring)
        return [Phase(self.name, lambda: target.drive(operation, check, self.operations))]


def selections(
    worker_ids: Sequence[int], isl: int, ring: int, *, tokens: bool = False
) -> tuple[Callable[[int], Operation], Callable[[Answer], None]]:
    """POST /select of prompts nobody holds: the n-th operation, and what checks its answer."""
    requests = _selections(isl, ring, tokens=tokens)
    allowed = frozenset(worker_ids)

    def operation(number: int) -> Operation:
        return requests[number % len(requests)]

    def check(answer: Answer) -> None:
        expect(answer, allowed, isl)

    return operation, check


def lifecycles(
    worker_ids: Sequence[int], isl: int, ring: int
) -> tuple[Callable[[int], Operation], Callable[[Answer], None]]:
    """Book, complete, free; ids are patched into prebuilt bytes, each is used once."""
    allowed = frozenset(worker_ids)
    bookings, complete, free = _lifecycle(isl, ring)
    placeholder = _ID.encode()

    def operation(number: int) -> Operation:
        name = b"bench-%010d" % number
        booking = bookings[number % len(bookings)]
        return tuple(part.replace(placeholder, name) for part in (booking, complete, free))

    def check(answer: Answer) -> None:
        if answer.step == 0:
            expect(answer, allowed, isl)
        elif answer.status != 200:
            raise BadAnswer(f"{answer.status} {answer.body[:300]!r}")

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
def overlapping(of: Overlap) -> tuple[list[Operation], list[tuple[frozenset[int], int]]]:
    """The requests of W2, and for each who may be chosen with how many tokens left."""
    rng = Random(f"{of.name} requests")
    families = of.families_prompts()
    asked, expected = [], []
    for position in range(of.ring):
        family = position % of.families
        matched = int(rng.uniform(0.60, 0.95) * (of.isl // BLOCK_SIZE))
        known = families[family].token_ids[: matched * BLOCK_SIZE]
        tail = random_tokens(rng, of.isl - len(known))
        asked.append(Prompt.of([*known, *tail]))
        expected.append((of.holders(family), of.isl - len(known)))
    return _select_requests(asked, tokens=False), expected


@functools.lru_cache(maxsize=4)
def _selections(isl: int, ring: int, *, tokens: bool) -> list[Operation]:
    return _select_requests(ring_of_prompts(isl, ring), tokens=tokens)


@functools.lru_cache(maxsize=1)
def _lifecycle(isl: int, ring: int) -> tuple[list[bytes], bytes, bytes]:
    bodies = [booking_body(_ID, prompt) for prompt in ring_of_prompts(isl, ring)]
    return (
        [request_bytes("POST", "/select_and_reserve", one) for one in bodies],
        request_bytes("POST", f"/reservations/{_ID}/prefill_complete"),
        request_bytes("DELETE", f"/reservations/{_ID}"),
    )


def _select_requests(prompts: Sequence[Prompt], *, tokens: bool) -> list[Operation]:
    fields = [prompt.token_form() if tokens else prompt.hash_form() for prompt in prompts]
    bodies = [body({"model_name": MODEL}, one) for one in fields]
    return [(request_bytes("POST", "/select", one),) for one in bodies]


def booking_body(name: str, prompt: Prompt) -> bytes:
    """Booked as reservation_id (1.3.1) and as selection_id (1.4 and later) alike."""
    names = {"model_name": MODEL, "reservation_id": name, "selection_id": name}
    return body(names, prompt.hash_form())
