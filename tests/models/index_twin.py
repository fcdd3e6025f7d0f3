"""The index the slow and obvious way: a dict of names, a counter of references, a loop per prompt.

Knows nothing of trees. A block's content is the tuple of everything before it: "root", or the
engine hash that nobody announced, then one local hash per block.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from indexer.types import Tier, WorkerRank

Content = tuple[object, ...]
ROOT: Content = ("root",)


def missing(name: int) -> Content:
    return (("behind", name),)


@dataclass
class RankTwin:
    content: dict[int, Content] = field(default_factory=dict)  # engine hash → what it stands for
    held: Counter[tuple[Tier, int, int]] = field(default_factory=Counter)  # tier, group, hash
    last_name: dict[Content, int] = field(default_factory=dict)  # of what is not held any more

    def on_tier(self, tier: Tier) -> set[Content]:
        return {self.content[name] for at, _, name in self.held if at is tier}

    def names(self, tier: Tier) -> set[int]:
        return {name for at, _, name in self.held if at is tier}

    def forget(self, name: int) -> None:
        self.last_name[self.content.pop(name)] = name
        for key in [key for key in self.held if key[2] == name]:
            del self.held[key]

    def store(
        self, tier: Tier, parent: int | None, names: list[int], local: list[int], group: int
    ) -> int:
        if len(set(names)) < len(names) or parent in names:
            return 0
        content = self._place_of(parent, names, local)
        for name, block in zip(names, local, strict=True):
            content = (*content, block)
            if self.content.get(name, content) != content:
                self.forget(name)
            self.content[name] = content
            self.held[tier, group, name] += 1
            self._arrived(name)  # before the next one: that may be what has waited for it
        return len(names)

    def _place_of(self, parent: int | None, names: list[int], local: list[int]) -> Content:
        if parent is None:
            return ROOT
        if parent in self.content:
            return self.content[parent]
        *before, block = self.content.get(names[0], ROOT) if names else ROOT
        if (
            len(before) > 1
            and block == local[0]
            and tuple(before) not in self.content.values()
            and self.last_name.get(tuple(before)) == parent
        ):
            return tuple(before)  # it follows a block that was called so before it got lost
        return missing(parent)

    def _arrived(self, name: int) -> None:
        """What waited behind this block is no orphan any more (unless it comes after itself)."""
        gap = missing(name)
        if self.content[name][:1] == gap:
            return
        held = set(self.content.values())
        for content, last in list(self.last_name.items()):
            if content[:1] == gap and any(after[:-1] == content for after in held):
                self.last_name[self.content[name] + content[1:]] = last
        for other, content in self.content.items():
            if content[:1] == gap:
                self.content[other] = self.content[name] + content[1:]

    def remove(self, tier: Tier, names: list[int], group: int) -> int:
        found = 0
        for name in names:
            key = (tier, group, name)
            if key not in self.held:
                continue
            found += 1
            self.held[key] -= 1
            if not self.held[key]:
                del self.held[key]
            if not any(other == name for _, _, other in self.held):
                self.last_name[self.content.pop(name)] = name
        return found

    def mark(self, tier: Tier, names: list[int], group: int) -> int:
        known = [name for name in names if name in self.content]
        for name in known:
            self.held[tier, group, name] += 1
        return len(known)

    def matches(self, local: list[int]) -> tuple[int, int, int]:
        ends = []
        depth = 0
        for tier in Tier:
            held = self.on_tier(tier)
            while depth < len(local) and (*ROOT, *local[: depth + 1]) in held:
                depth += 1
            ends.append(depth)
        return ends[0], ends[1] - ends[0], ends[3] - ends[1]


@dataclass
class IndexTwin:
    ranks: dict[WorkerRank, RankTwin] = field(default_factory=dict)

    def rows(self, local: list[int]) -> dict[WorkerRank, tuple[int, int, int]]:
        rows = {rank: twin.matches(local) for rank, twin in self.ranks.items()}
        return {rank: row for rank, row in rows.items() if any(row)}

    def prompts(self) -> list[list[int]]:
        """Every content that somebody has, as a prompt (orphans as well: they must not match)."""
        contents = {c for twin in self.ranks.values() for c in twin.content.values()}
        return [
            [block for block in c[1:] if isinstance(block, int)] for c in sorted(contents, key=str)
        ]

    def dumpable(self) -> set[tuple[WorkerRank, Tier, int, Content]]:
        """Blocks whose place can be told: their own content and their parent's name are known."""
        found = set()
        for rank, twin in self.ranks.items():
            known = set(twin.content.values())
            device = twin.on_tier(Tier.DEVICE)
            for tier in Tier:
                for name in twin.names(tier):
                    content = twin.content[name]
                    if tier is Tier.DEVICE:
                        prefixes = {content[:end] for end in range(2, len(content))}
                        told = content[:1] == ROOT and prefixes <= device
                    else:
                        told = len(content) == 2 or content[:-1] in known
                    if told:
                        found.add((rank, tier, name, content))
        return found
