"""W4: select_and_reserve → prefill_complete → DELETE beside standing reservations.

Three kinds of prompts, each with a row of its own: what the measured ones have in common with the
standing ones is counted at every booking, and the peer's share of it is another for each kind.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, ClassVar

from bench.compare.memory import store_chains
from bench.compare.served import Phase
from bench.compare.target import MODEL, Target, expect
from bench.compare.workloads import Overlap, ring_of_prompts
from bench.load.http import Answer, BadAnswer, Operation, ask, request_bytes
from bench.load.prompts import BLOCK_SIZE, Prompt, body

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = [
    "Content",
    "Lifecycle",
    "PrefixSharing",
    "Reordered",
    "Unshared",
    "lifecycles",
    "stand",
    "unshared_lifecycles",
]

_ID = "bench-0000000000"
_DOCUMENT_BLOCKS = 8
_DOCUMENTS = 64


@dataclass(frozen=True, slots=True)
class Unshared:
    """No two prompts have a block in common, and no worker holds any of them.

    Each kind of content says which prompts are booked (`prompts`: always the same ones for the same
    arguments), what each worker has left to prefill of them (`left`), and how a target is brought
    to hold what they share (`prepare`). `shares_stream`: all workers may listen to one silent
    publisher.
    """

    shares_stream: ClassVar[bool] = True

    def prompts(self, isl: int, count: int, salt: str) -> Sequence[Prompt]:
        """Random tokens."""
        return ring_of_prompts(isl, count, salt)

    def left(
        self, isl: int, count: int, salt: str, worker_ids: Sequence[int]
    ) -> Sequence[Mapping[int, int]]:
        """All of it, everywhere."""
        del salt
        return [dict.fromkeys(worker_ids, isl)] * count

    def prepare(self, target: Target, isl: int) -> None:
        """Nothing beyond the workers."""


@dataclass(frozen=True, slots=True)
class PrefixSharing:
    """Prompts of W2: their first 60 to 95 % are those of a family, standing ones' too.

    The index has that many blocks; beyond the families' it is filled with chains without requests.
    """

    families: int = 32
    indexed_blocks: int = 200_000
    shares_stream: ClassVar[bool] = False

    def prompts(self, isl: int, count: int, salt: str) -> Sequence[Prompt]:
        """A part of a family's prompt, and a tail of their own."""
        return [one.prompt for one in self._overlap(isl, count).requests(salt)]

    def left(
        self, isl: int, count: int, salt: str, worker_ids: Sequence[int]
    ) -> Sequence[Mapping[int, int]]:
        """What the worker does not hold: any may be chosen, for the load of those that hold it."""
        overlap = self._overlap(isl, count)
        return [
            {
                worker_id: isl - BLOCK_SIZE * min(held, one.matched)
                for worker_id, held in overlap.held(worker_ids, one.family).items()
            }
            for one in overlap.requests(salt)
        ]

    def prepare(self, target: Target, isl: int) -> None:
        """The filling first."""
        overlap = self._overlap(isl, 0)
        store_chains(target, "filling", self.indexed_blocks - overlap.blocks)
        overlap.prepare(target)

    def _overlap(self, isl: int, count: int) -> Overlap:
        return Overlap("W4", isl, operations=0, families=self.families, ring=count)


@dataclass(frozen=True, slots=True)
class Reordered:
    """Prompts put together of the same documents in another order each.

    The client's sequence hashes do not depend on what is before a block, so that a value comes at
    many positions, in one prompt more than once.
    """

    shares_stream: ClassVar[bool] = True

    def prompts(self, isl: int, count: int, salt: str) -> Sequence[Prompt]:
        """Documents in random order."""
        rng = Random(f"{isl} {salt} order")
        tokens = _DOCUMENT_BLOCKS * BLOCK_SIZE
        documents = [one.token_ids for one in ring_of_prompts(tokens, _DOCUMENTS, "documents")]
        found = []
        for _ in range(count):
            chosen = rng.choices(documents, k=isl // tokens)
            prompt = Prompt.of([token for document in chosen for token in document])
            found.append(Prompt(prompt.token_ids, prompt.block_hashes, prompt.block_hashes))
        return found

    def left(
        self, isl: int, count: int, salt: str, worker_ids: Sequence[int]
    ) -> Sequence[Mapping[int, int]]:
        """All of it: no worker has reported any."""
        return Unshared().left(isl, count, salt, worker_ids)

    def prepare(self, target: Target, isl: int) -> None:
        """Nothing beyond the workers."""


Content = Unshared | PrefixSharing | Reordered


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """Book, complete, free, beside reservations of the same kind of prompts."""

    name: str
    operations: int
    isl: int = 2048
    standing: int = 256
    ring: int = 64
    content: Content = Unshared()
    plain_client: bool = False  # one connection of `http.client` instead of the usual ones
    workers: ClassVar[int] = 16
    unit: ClassVar[str] = "cycle"

    @property
    def rows(self) -> tuple[str, ...]:
        """One, of the same name."""
        return (self.name,)

    @property
    def shares_stream(self) -> bool:
        """As the content needs it."""
        return self.content.shares_stream

    def prepare(self, target: Target) -> None:
        """Fill the index, then book the standing reservations."""
        self.content.prepare(target, self.isl)
        ask(target.server.address, stand(self.content.prompts(self.isl, self.standing, "standing")))

    def phases(self, target: Target, round_number: int) -> Sequence[Phase]:
        """One phase."""
        del round_number
        operation, check = lifecycles(self.content, target.worker_ids, self.isl, self.ring)
        drive = target.drive_plainly if self.plain_client else target.drive
        return [Phase(self.name, lambda: drive(operation, check, self.operations))]


def stand(prompts: Sequence[Prompt]) -> list[bytes]:
    """Requests that book prompts for good: their prefill is done, their blocks stay."""
    found = []
    for number, prompt in enumerate(prompts):
        name = f"standing-{number}"
        found.append(request_bytes("POST", "/select_and_reserve", _booking(name, prompt)))
        found.append(request_bytes("POST", f"/reservations/{name}/prefill_complete"))
    return found


def lifecycles(
    content: Content, worker_ids: Sequence[int], isl: int, ring: int
) -> tuple[Callable[[int], Operation], Callable[[Answer], None]]:
    """Book, complete, free; ids are patched into prebuilt bytes, each is used once."""
    bookings, complete, free = _requests(content, isl, ring)
    left = content.left(isl, ring, "", worker_ids)
    placeholder = _ID.encode()

    def operation(number: int) -> Operation:
        name = b"bench-%010d" % number
        booking = bookings[number % len(bookings)]
        return tuple(part.replace(placeholder, name) for part in (booking, complete, free))

    def check(answer: Answer) -> None:
        if answer.step == 0:
            expect(answer, left[answer.operation % len(left)])
        elif answer.status != 200:
            raise BadAnswer(f"{answer.status} {answer.body[:300]!r}")

    return operation, check


def unshared_lifecycles(
    worker_ids: Sequence[int], isl: int, ring: int
) -> tuple[Callable[[int], Operation], Callable[[Answer], None]]:
    """`lifecycles` of prompts that share nothing."""
    return lifecycles(Unshared(), worker_ids, isl, ring)


@functools.lru_cache(maxsize=1)
def _requests(content: Content, isl: int, ring: int) -> tuple[list[bytes], bytes, bytes]:
    bodies = [_booking(_ID, prompt) for prompt in content.prompts(isl, ring, "")]
    return (
        [request_bytes("POST", "/select_and_reserve", one) for one in bodies],
        request_bytes("POST", f"/reservations/{_ID}/prefill_complete"),
        request_bytes("DELETE", f"/reservations/{_ID}"),
    )


def _booking(name: str, prompt: Prompt) -> bytes:
    """Booked as reservation_id (1.3.1) and as selection_id (1.4 and later) alike."""
    names = {"model_name": MODEL, "reservation_id": name, "selection_id": name}
    return body(names, prompt.hash_form())
