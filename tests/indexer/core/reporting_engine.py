"""A model of vLLM's block pool: cache groups, evictions, and full reports of what prompts find.

It decides as vLLM 0.32 does, and slowly: all groups take blocks of one pool, a block that nobody
uses stays cached until its place is needed, the one unused for longest first, and a prompt goes on
from the longest prefix that every group has what it needs of. Blocks are called by their content.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from indexer.core.cache_groups import GroupRule
from tests.indexer.encoding import removed, stored

Chain = tuple[int, ...]
"""The kinds of a prompt's blocks from its beginning: what its last block is."""

SIZE = 4
SPECS: dict[GroupRule | None, dict[str, Any]] = {
    None: {"kv_cache_spec_kind": "full_attention"},
    GroupRule(1): {"kv_cache_spec_kind": "mamba"},
    GroupRule(2): {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 9},
    GroupRule(3): {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 13},
}


def name_of(chain: Chain) -> int:
    return hash(chain) & ((1 << 64) - 1)


def prefixes_of(chain: Chain) -> list[Chain]:
    return [chain[: at + 1] for at in range(len(chain))]


def tokens_of(chain: Chain, begin: int = 0) -> list[int]:
    """The tokens of a prompt's blocks from `begin` on; no two blocks have the same."""
    return [
        name_of(one) % (1 << 31) + at for one in prefixes_of(chain)[begin:] for at in range(SIZE)
    ]


@dataclass
class ReportingEngine:
    """An engine, as far as its events tell.

    Attributes:
        groups: the rule of each group; None: full attention.
        places: what is cached in each place of the pool.
        unused: places that no request uses, the first to be taken first.
    """

    groups: list[GroupRule | None]
    pool: int
    places: dict[int, tuple[int, Chain] | None] = field(default_factory=dict)
    unused: list[int] = field(default_factory=list)
    users: Counter[int] = field(default_factory=Counter)
    running: list[list[int]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.unused = [*range(self.pool)]
        self.places = dict.fromkeys(self.unused)

    def held(self) -> Counter[tuple[int, Chain]]:
        """How many blocks it holds, by group and content."""
        return Counter(block for block in self.places.values() if block is not None)

    def found(self, chain: Chain, *, is_whole: bool) -> int:
        """How many blocks a prompt finds: its last token is computed in any case."""
        held = self.held()
        prefixes = prefixes_of(chain)
        for n in range(len(chain) - is_whole, 0, -1):
            needed = (
                (group, one)
                for group, rule in enumerate(self.groups)
                for one in prefixes[:n][0 if rule is None else -rule.blocks :]
            )
            if all(held[block] for block in needed):
                return n
        return 0

    def request(self, chain: Chain, *, is_whole: bool, keeps_all: bool, chunk: int) -> None:
        """Take a prompt: tell what it finds, and what it has computed.

        Args:
            chain: its whole blocks.
            is_whole: whether they are all of it.
            keeps_all: whether groups keep blocks that matches of the whole prompt do not need.
            chunk: as many blocks are computed in the first step.
        """
        found, prefixes = self.found(chain, is_whole=is_whole), prefixes_of(chain)
        used: list[int] = []
        for group, rule in enumerate(self.groups):
            if found:
                self._tell(group, chain[:found], 0, prefixes[:found])
            used += (
                next(at for at, block in self.places.items() if block == (group, one))
                for one in prefixes[:found][0 if rule is None else -rule.blocks :]
            )
        for place in used:
            if not self.users[place]:
                self.unused.remove(place)
            self.users[place] += 1
        self.running.append(used)
        for begin, end in ((found, max(found, chunk)), (max(found, chunk), len(chain))):
            if not self._compute(chain[:end], begin, used, keeps_all=keeps_all):
                break
        if keeps_all:
            return
        self.finish(-1)

    def _compute(self, chain: Chain, begin: int, used: list[int], *, keeps_all: bool) -> bool:
        """Cache blocks from `begin` on; whether there was room."""
        new = prefixes_of(chain)[begin:]
        kept = [new if rule is None or keeps_all else new[-rule.blocks :] for rule in self.groups]
        if not new or sum(map(len, kept)) > len(self.unused):
            return not new
        taken = [[self._take() for _ in some] for some in kept]
        for group, some in enumerate(kept):
            self._tell(group, chain, begin, some)
            self.places.update(zip(taken[group], [(group, one) for one in some], strict=True))
            used += taken[group]
        return True

    def _take(self) -> int:
        place = self.unused.pop(0)
        self.evict(place)
        self.users[place] = 1
        return place

    def evict(self, place: int) -> None:
        """Forget what is cached in a place."""
        block, self.places[place] = self.places[place], None
        if block is not None:
            group, chain = block
            self.events.append(removed([name_of(chain)], group_idx=group))

    def finish(self, at: int) -> None:
        """End a request: its last blocks will be evicted first."""
        for place in reversed(self.running.pop(at)):
            self.users[place] -= 1
            if not self.users[place]:
                self.unused.append(place)

    def _tell(self, group: int, chain: Chain, begin: int, named: list[Chain]) -> None:
        parent = name_of(chain[:begin]) if begin else None
        more = {"block_size": SIZE, "group_idx": group, **SPECS[self.groups[group]]}
        tokens = tokens_of(chain, begin)
        self.events.append(stored([name_of(one) for one in named], tokens, parent, **more))

    def tell(self) -> list[dict[str, Any]]:
        """The events since the last time."""
        told, self.events = self.events, []
        return told
