"""The workloads over HTTP: W1 to W5. Those of KV events are in `ingest.py`.

A workload prepares a target once, then gives the phases of each round: a name and a function that
does the work and returns how many units it did. Whoever runs it reads the CPU clock around each.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, ClassVar, Protocol

from bench.compare.target import MODEL, Target, expect
from bench.load.events import batch, stored
from bench.load.http import Answer, BadAnswer, Operation, ask, request_bytes
from bench.load.prompts import BLOCK_SIZE, Prompt, body, random_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Lifecycle", "Overlap", "Phase", "Select", "Workload", "feed"]

_BLOCKS_PER_EVENT = 64
_ID = "bench-0000000000"


@dataclass(frozen=True, slots=True)
class Phase:
    """A piece of work to measure: what it is called, how to do it, how to see it was done.

    `work` returns the units done. `verify` runs outside the clock and raises BadAnswer.
    """

    name: str
    work: Callable[[], int]
    verify: Callable[[], None] | None = None


class Workload(Protocol):
    """What `run.py` measures."""

    @property
    def name(self) -> str:
        """Unique; the first word is the W-number."""

    @property
    def unit(self) -> str:
        """What the cost is counted per."""

    @property
    def workers(self) -> int:
        """Workers to register."""

    @property
    def shares_stream(self) -> bool:
        """Whether all workers may listen to one silent publisher."""

    def prepare(self, target: Target) -> None:
        """Bring a fresh target into its starting state."""

    def phases(self, target: Target, round_number: int) -> Sequence[Phase]:
        """What to measure in this round; preparation happens here, outside the clock."""


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

    def prepare(self, target: Target) -> None:
        """Nothing beyond the workers."""

    def phases(self, target: Target, round_number: int) -> Sequence[Phase]:
        """One phase."""
        del round_number
        requests = _select_requests(_prompts(self.isl, self.ring), tokens=self.tokens)
        allowed = frozenset(target.worker_ids)

        def operation(number: int) -> Operation:
            return requests[number % len(requests)]

        def check(answer: Answer) -> None:
            expect(answer, allowed, self.isl)

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

    def prepare(self, target: Target) -> None:
        """Publish what the workers hold and wait until it is indexed."""
        for family, prompt in enumerate(self._family_prompts()):
            for worker_id, blocks in self._held(target, family, prompt).items():
                feed(target, worker_id, prompt, blocks)
        # streams are indexed in order: who has the last family has them all
        last = self._family_prompts()[-1]
        for worker_id, blocks in self._held(target, self.families - 1, last).items():
            target.wait_indexed(last, worker_id, blocks)

    def phases(self, target: Target, round_number: int) -> Sequence[Phase]:
        """One phase."""
        del round_number
        rng = Random(f"{self.name} requests")
        families = self._family_prompts()
        prompts, expected = [], []
        for position in range(self.ring):
            family = position % self.families
            matched = int(rng.uniform(0.60, 0.95) * (self.isl // BLOCK_SIZE))
            known = families[family].token_ids[: matched * BLOCK_SIZE]
            tail = random_tokens(rng, self.isl - len(known))
            prompts.append(Prompt.of([*known, *tail]))
            expected.append((self._holders(family), self.isl - len(known)))
        requests = _select_requests(prompts, tokens=False)

        def operation(number: int) -> Operation:
            return requests[number % len(requests)]

        def check(answer: Answer) -> None:
            expect(answer, *expected[answer.operation % len(expected)])

        return [Phase(self.name, lambda: target.drive(operation, check, self.operations))]

    def _family_prompts(self) -> list[Prompt]:
        return _prompts(self.isl, self.families, salt="family")

    def _held(self, target: Target, family: int, prompt: Prompt) -> dict[int, int]:
        holders, whole = self._holders(family), len(prompt.block_hashes)
        return {one: whole if one in holders else whole // 4 for one in target.worker_ids}

    def _holders(self, family: int) -> frozenset[int]:
        return frozenset(1 + (family + step) % self.workers for step in (0, 5, 11))


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

    def prepare(self, target: Target) -> None:
        """Book the standing reservations; their prefill is done, their blocks stay."""
        prompts = _prompts(self.isl, self.standing, salt="standing")
        for number, prompt in enumerate(prompts):
            name = f"standing-{number}"
            ask(
                target.server.address,
                [
                    request_bytes("POST", "/select_and_reserve", _booking_body(name, prompt)),
                    request_bytes("POST", f"/reservations/{name}/prefill_complete"),
                ],
            )

    def phases(self, target: Target, round_number: int) -> Sequence[Phase]:
        """One phase; ids are patched into prebuilt bytes, each is used once."""
        del round_number
        allowed = frozenset(target.worker_ids)
        bodies = [_booking_body(_ID, prompt) for prompt in _prompts(self.isl, self.ring)]
        bookings = [request_bytes("POST", "/select_and_reserve", one) for one in bodies]
        complete = request_bytes("POST", f"/reservations/{_ID}/prefill_complete")
        free = request_bytes("DELETE", f"/reservations/{_ID}")
        placeholder = _ID.encode()

        def operation(number: int) -> Operation:
            name = b"bench-%010d" % number
            booking = bookings[number % len(bookings)]
            return tuple(part.replace(placeholder, name) for part in (booking, complete, free))

        def check(answer: Answer) -> None:
            if answer.step == 0:
                expect(answer, allowed, self.isl)
            elif answer.status != 200:
                raise BadAnswer(f"{answer.status} {answer.body[:300]!r}")

        return [Phase(self.name, lambda: target.drive(operation, check, self.operations))]


def feed(target: Target, worker_id: int, prompt: Prompt, blocks: int) -> None:
    """Publish the first blocks of a prompt as a worker's, 64 per event.

    The engine hashes are functions of the content, the same on every worker: a fleet whose engines
    hash alike. (The peer loses blocks of engines that hash differently, events.md R8; that would
    void the workload, not slow it down.)
    """
    hashes = prompt.sequence_hashes[:blocks]
    for first in range(0, blocks, _BLOCKS_PER_EVENT):
        last = min(first + _BLOCKS_PER_EVENT, blocks)
        parent = hashes[first - 1] if first else None
        tokens = prompt.token_ids[first * BLOCK_SIZE : last * BLOCK_SIZE]
        event = stored(hashes[first:last], parent, tokens)
        target.publishers.publish(worker_id - 1, batch([event]))


def _prompts(isl: int, count: int, salt: str = "") -> list[Prompt]:
    """Always the same ones for the same arguments, for every contender."""
    rng = Random(f"{isl} {salt}")
    return [Prompt.of(random_tokens(rng, isl)) for _ in range(count)]


def _select_requests(prompts: Sequence[Prompt], *, tokens: bool) -> list[Operation]:
    fields = [prompt.token_form() if tokens else prompt.hash_form() for prompt in prompts]
    bodies = [body({"model_name": MODEL}, one) for one in fields]
    return [(request_bytes("POST", "/select", one),) for one in bodies]


def _booking_body(name: str, prompt: Prompt) -> bytes:
    """Booked as reservation_id (1.3.1) and as selection_id (1.4 and later) alike."""
    names = {"model_name": MODEL, "reservation_id": name, "selection_id": name}
    return body(names, prompt.hash_form())
