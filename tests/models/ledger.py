"""The ledger as contract section 4 puts it: lists, sets and no cleverness."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import ROUND_HALF_UP, Decimal
from math import fsum

Block = int | tuple[str, int]  # a prompt hash, or (reservation, number of the output block)


@dataclass
class NaiveReservation:
    slot: int
    hashes: list[int]
    prefill_tokens: int
    touched: float
    ttl_s: float
    prefill_done: bool = False
    outputs: list[Block] = field(default_factory=list)
    fraction: float = 1.0  # the last it was given

    @property
    def blocks(self) -> set[Block]:
        return {*self.hashes, *self.outputs}


class NaiveLedger:
    def __init__(self, sequence_blocks: int = 0) -> None:
        self.sequence_blocks = sequence_blocks
        self.seats: dict[int, tuple[int, int]] = {}  # and what a wait is worth, where it is told
        self.live: dict[str, NaiveReservation] = {}
        self.fraction: dict[tuple[int, Block], float] = {}

    def on(self, slot: int) -> list[NaiveReservation]:
        return [r for r in self.live.values() if r.slot == slot]

    def live_blocks(self, slot: int) -> set[Block]:
        return set().union(*(r.blocks for r in self.on(slot)))

    def prefill(self, slot: int) -> int:
        return sum(r.prefill_tokens for r in self.on(slot) if not r.prefill_done)

    def decode(self, slot: int) -> int:
        weights = [self.fraction.get((slot, block), 1.0) for block in self.live_blocks(slot)]
        return int(Decimal(fsum(weights)).to_integral_value(ROUND_HALF_UP))

    def context(self, slot: int) -> int:
        """Blocks that requests attend to, whoever else does, and what each has beside them.

        And what the next one waits for: an answer that ends, or as many as seats are wanting.
        """
        more = self.sequence_blocks
        own = [r.fraction * (max(1, len(r.hashes)) + more + len(r.outputs)) for r in self.on(slot)]
        attended = sum(int(Decimal(one).to_integral_value(ROUND_HALF_UP)) for one in own)
        seats, wait = self.seats.get(slot, (len(own) + 1, 0))
        return attended + max(0, len(own) + 1 - seats) * wait

    def output_block(self, name: str, fraction: float | None) -> None:
        mine = self.live[name]
        mine.outputs.append((name, len(mine.outputs)))
        if fraction is None:
            return
        mine.fraction = fraction
        others = [r for r in self.on(mine.slot) if r is not mine]
        shared = set().union(*(r.blocks for r in others))
        for block in mine.blocks - shared:
            self.fraction[mine.slot, block] = fraction

    def free(self, name: str) -> None:
        slot = self.live.pop(name).slot
        alive = self.live_blocks(slot)
        self.fraction = {
            (s, block): f for (s, block), f in self.fraction.items() if s != slot or block in alive
        }

    def shared_prefix(self, hashes: list[int], slot: int) -> int:
        return max((_common(hashes, r.hashes) for r in self.on(slot)), default=0)

    def expired(self, now: float) -> set[str]:
        return {n for n, r in self.live.items() if r.ttl_s and r.touched + r.ttl_s <= now}


def _common(left: list[int], right: list[int]) -> int:
    length = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        length += 1
    return length
