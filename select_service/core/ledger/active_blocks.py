"""The prompts that every generation holds: which prefixes they share, and how many distinct blocks.

One path-compressed trie of sequence-hash chains is shared by all generations and reference-counted
per generation: a booking touches the nodes on its path, never single blocks, and compares whole
edges in C. When a node gets its first user in a generation, its values enter the counts of that
generation, which make D (`plain_active_blocks.py`): prefixes are a matter of positions, D of
values. Reservations and prefill tokens live in `ledger.py`, the only caller; `pricing/cost.py`
turns shared prefixes into N.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from indexer.compiled import usable
from indexer.types import HASH_BYTES

if not TYPE_CHECKING and usable("select_service.core._ledger", 3):
    from select_service.core._ledger import ActiveBlocks, BlockCounts, ChainNode, positions_of
else:
    from select_service.core.ledger.plain_active_blocks import (
        ActiveBlocks,
        BlockCounts,
        ChainNode,
        positions_of,
    )

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ActiveBlocks", "BlockCounts", "ChainNode", "check", "positions_of", "walk"]


def check(blocks: ActiveBlocks) -> None:
    """Assert all invariants of the structure; O(everything)."""
    nodes = list(walk(blocks.root))
    for node in nodes:
        _check_node(node)
    assert blocks.nodes == len(nodes), "nodes are counted"
    held = sum(len(node.edge) * len(node.refs) for node in nodes)
    assert blocks.blocks == held // HASH_BYTES


def walk(root: ChainNode) -> Iterator[ChainNode]:
    """Yield all nodes below one. O(nodes)."""
    stack = list(root.children.values())
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())


def _check_node(node: ChainNode) -> None:
    assert node.edge, "no empty runs"
    assert len(node.edge) % HASH_BYTES == 0
    assert node.refs, "no node without users"
    assert min(node.refs.values()) > 0
    assert node.total == sum(node.refs.values())
    assert node.mask == sum(1 << generation for generation in node.refs)
    below: Counter[int] = Counter()
    for first, child in node.children.items():
        assert child.parent is node
        assert child.edge.startswith(first)
        below.update(child.refs)
    assert all(node.refs[generation] >= count for generation, count in below.items()), (
        "users pass downwards"
    )
    assert len(node.children) != 1 or below.total() < node.total, "no fork without a reason"
