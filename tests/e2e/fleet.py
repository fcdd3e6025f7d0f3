"""A random fleet of fake engines and random prompts, within what reference and product agree on.

Avoided on purpose, because the answers differ by design there: interior removals and duplicate
stores (D11), clears of one rank of several (D10), live mutation of workers (D3).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.e2e.stage import BLOCK_SIZE, Stage
from tests.live.engine import FakeEngine
from tests.models.engine_truth import RankTruth

MEDIA = {"device": None, "host": "CPU", "disk": "DISK"}
FAMILIES = 4
TAINTS = ("fast", "spot")

Rank = tuple[int, int]
Prefix = tuple[int, ...]  # tokens of a whole number of blocks


def engine_hash(prefix: Prefix) -> int:
    """An opaque engine hash; every engine of the fleet uses the same one for the same content."""
    return hash(prefix) & ((1 << 64) - 1)


@dataclass
class EngineModel:
    """One rank: what it holds per tier, and the events that change that."""

    socket: FakeEngine
    truth: RankTruth = field(default_factory=lambda: RankTruth(BLOCK_SIZE))
    held: dict[str, set[Prefix]] = field(default_factory=lambda: {t: set() for t in MEDIA})
    seq: int = 0

    def publish(self, events: Sequence[dict[str, Any]]) -> None:
        """Send one batch in the array form and give it to the twin."""
        wire = []
        for event in events:
            fields = [v for k, v in event.items() if k != "type"]
            wire.append([event["type"], *fields])
        self.socket.publish(self.seq, [1.0, wire, None])
        self.truth.apply(events)
        self.seq += 1

    def store(self, prompt: Prefix, tier: str, blocks: int) -> None:
        """Hold up to `blocks` more blocks of a prompt on a tier, behind what is held already."""
        start = self._reach(prompt, tier)
        end = min(start + blocks, len(prompt) // BLOCK_SIZE)
        new = [prompt[: (i + 1) * BLOCK_SIZE] for i in range(start, end)]
        new = [prefix for prefix in new if prefix not in self.held[tier]]
        if not new:
            return
        parent = new[0][:-BLOCK_SIZE]
        self.publish(
            [
                {
                    "type": "BlockStored",
                    "block_hashes": [engine_hash(prefix) for prefix in new],
                    "parent_block_hash": engine_hash(parent) if parent else None,
                    "token_ids": list(new[-1][len(parent) :]),
                    "block_size": BLOCK_SIZE,
                    "lora_id": None,
                    "medium": MEDIA[tier],
                }
            ]
        )
        self.held[tier].update(new)

    def _reach(self, prompt: Prefix, tier: str) -> int:
        """Leading blocks held on tiers up to `tier`."""
        upto = list(MEDIA)[: list(MEDIA).index(tier) + 1]
        reach = 0
        while reach < len(prompt) // BLOCK_SIZE:
            prefix = prompt[: (reach + 1) * BLOCK_SIZE]
            if not any(prefix in self.held[t] for t in upto):
                break
            reach += 1
        return reach

    def evict_leaf(self, dice: random.Random) -> None:
        """Drop one block that no held block of any tier continues."""
        everything = set().union(*self.held.values())
        parents = {prefix[:-BLOCK_SIZE] for prefix in everything}
        leaves = [(t, p) for t in MEDIA for p in sorted(self.held[t]) if p not in parents]
        if not leaves:
            return
        tier, prefix = dice.choice(leaves)
        self.held[tier].remove(prefix)
        self.publish(
            [
                {
                    "type": "BlockRemoved",
                    "block_hashes": [engine_hash(prefix)],
                    "medium": MEDIA[tier],
                }
            ]
        )


@dataclass
class Fleet:
    """Engines and prompts of one random scenario."""

    dice: random.Random
    engines: dict[Rank, EngineModel]
    prompts: list[Prefix] = field(default_factory=list)

    def __post_init__(self) -> None:
        for family in range(FAMILIES):
            stem = self._tokens(self.dice.randrange(1, 6), salt=family)
            for twig in range(3):
                tail = self._tokens(self.dice.randrange(0, 6), salt=100 + 10 * family + twig)
                self.prompts.append((*stem, *tail))

    def _tokens(self, blocks: int, salt: int) -> Prefix:
        return tuple(salt * 1000 + i for i in range(blocks * BLOCK_SIZE))

    def register(self, stages: Sequence[Stage], tenant: str) -> None:
        """Register every worker at every service."""
        workers: dict[int, dict[int, str]] = {}
        for (worker, rank), engine in self.engines.items():
            workers.setdefault(worker, {})[rank] = engine.socket.endpoint
        for stage in stages:
            for worker, endpoints in workers.items():
                stage.register(worker, tenant, endpoints)
        for engine in self.engines.values():
            engine.socket.wait_for_subscribers(len(stages))

    def churn(self) -> None:
        """Some random events on some ranks."""
        for engine in self.engines.values():
            for _ in range(self.dice.randrange(3)):
                if self.dice.random() < 0.25:
                    engine.evict_leaf(self.dice)
                else:
                    tier = self.dice.choice(["device", "device", "host", "disk"])
                    engine.store(self.dice.choice(self.prompts), tier, self.dice.randrange(1, 5))

    def expected_rows(
        self,
    ) -> list[tuple[dict[str, Any], dict[Rank, list[int]]]]:
        """Every prompt and the rows its question must show."""
        return [
            (
                {"token_ids": list(prompt)},
                {rank: e.truth.row({"token_ids": prompt}) for rank, e in self.engines.items()},
            )
            for prompt in self.prompts
        ]
