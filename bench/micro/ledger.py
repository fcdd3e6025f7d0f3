"""What one booking costs: `python -m bench.micro.ledger`.

Prints the median in µs of book + prefill_complete + free of one more reservation beside a number
of standing ones, for prompts nobody else has, for prompts that share all but the last blocks with a
standing one, and for prompts that have such values at other positions; and of shared_groups. Every
round uses new hashes: what is measured is the cold path through tables of realistic size, not a
warm cache of one prompt.
"""

from __future__ import annotations

import argparse
import random
from array import array
from itertools import count
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

from select_service.core.ledger.ledger import Ledger

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 200
OWN_BLOCKS = 8  # of a prompt that shares the rest
STANDING = 256

_random = random.Random(1)
_numbers = count()


def chain(blocks: int) -> bytes:
    """New hashes: what a prompt nobody has sent before looks like."""
    return _random.randbytes(8 * blocks)


def standing(blocks: int, slots: int, *, reservations: int = STANDING) -> tuple[Ledger, bytes]:
    """Book the standing reservations; returns the prefix that half of them share, too."""
    ledger = Ledger()
    ledger.ensure(slots)
    prefix = chain(blocks - OWN_BLOCKS)
    for number in range(reservations):
        hashes = prefix + chain(OWN_BLOCKS) if number % 2 else chain(blocks)
        ledger.book(f"standing-{number}", number % slots, hashes, 100, 0.0, ttl_s=300.0)
    return ledger, prefix


def typical(action: Callable[[bytes], object], prompt: Callable[[], bytes]) -> float:
    """Median µs of an action on new prompts."""
    times = []
    for _ in range(ROUNDS):
        hashes = prompt()
        start = perf_counter()
        action(hashes)
        times.append(perf_counter() - start)
    return median(times) * 1e6


def lifecycle(ledger: Ledger) -> Callable[[bytes], None]:
    """One request from booking to free."""

    def live(hashes: bytes) -> None:
        reservation = ledger.book(str(next(_numbers)), 3, hashes, 100, 1.0, ttl_s=300.0)
        ledger.prefill_complete(reservation, 2.0)
        ledger.free(reservation)

    return live


def decoding(ledger: Ledger, fraction: float | None) -> Callable[[bytes], None]:
    """One output block of a long-lived reservation."""
    reservation = ledger.book(str(next(_numbers)), 3, chain(128), 100, 1.0)
    return lambda _: ledger.output_block(reservation, fraction, 2.0)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(f"book + prefill_complete + free beside {STANDING} standing reservations, 16 slots")
    for blocks in (128, 1024, 8192):
        ledger, prefix = standing(blocks, 16)
        alone = typical(lifecycle(ledger), lambda: chain(blocks))
        shared = typical(lifecycle(ledger), lambda: prefix + chain(OWN_BLOCKS))
        fork = typical(
            lifecycle(ledger),
            lambda: prefix[: -8 * _random.randrange(1, 64)] + chain(OWN_BLOCKS),
        )
        backwards = array("Q", prefix)
        backwards.reverse()
        repeated = backwards.tobytes()
        repeats = typical(lifecycle(ledger), lambda: chain(OWN_BLOCKS) + repeated)
        print(
            f"  {blocks:5} blocks: unshared {alone:.1f} µs, shared {shared:.1f}, forks {fork:.1f},"
            f" repeats {repeats:.1f}"
        )
        ledger.check()
    print("shared_groups of 128 and 8192 blocks, a prefix on every slot and a fork below it")
    for slots in (16, 256, 1024):
        for blocks in (128, 8192):
            reservations = max(slots, STANDING) if blocks < 8192 else slots
            ledger, prefix = standing(blocks, slots, reservations=reservations)
            cost = typical(ledger.shared_groups, lambda: prefix + chain(OWN_BLOCKS))
            print(f"  {slots:5} slots {blocks:5} blocks {cost:6.1f} µs")
    ledger, _ = standing(128, 16)
    print(
        f"output_block {typical(decoding(ledger, None), lambda: b''):.1f} µs, "
        f"with a fraction {typical(decoding(ledger, 0.5), lambda: b''):.1f} µs"
    )


if __name__ == "__main__":
    main()
