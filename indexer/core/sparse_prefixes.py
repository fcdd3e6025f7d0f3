"""Prefixes of models without full attention, whose engine names only some of their blocks.

Where all layers have sliding windows or Mamba states, an engine caches the end of a prompt: a store
event spans its tokens and names the few blocks that are kept. The tree gets the whole prefix all
the same, under names made up here for the other blocks, and `cache_groups` says where a match may
end. A prefix stays as long as a block behind it is kept.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from xxhash import xxh3_64_intdigest

from indexer.core.cache_groups import SparsePrefixes, SparseStore
from indexer.core.event_hashes import (
    CHECK_COST_BLOCKS,
    COLOURED_SLICE_BLOCKS,
    SLICE_BLOCKS,
    has_extra_keys,
    local_hashes,
)
from indexer.core.node import all_ones, leading_run
from indexer.core.packing import pack_name
from indexer.core.removal import uncover_listed
from indexer.types import HASH_BYTES, Tier

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from indexer.core.cache_groups import GroupRule
    from indexer.core.events import BlockStored
    from indexer.core.holder import Holder
    from indexer.core.index import KvIndex
    from indexer.core.radix_tree import Place, RadixTree
    from indexer.types import Namespace, PackedHashes, WorkerRank

UNSURE_MAX: Final = 256
"""Events of one rank whose place is remembered as a guess."""

CHUNK_BYTES_MAX: Final = 1 << 20
"""Local hashes kept of one prompt that an engine computes in chunks; 2 million tokens of it."""

CHUNKS_MAX: Final = 64
"""Prompts of one rank that may be computed in chunks at the same time."""

STEP_BLOCKS: Final = 512
"""Blocks placed, or dropped, at once."""

_MADE_UP_SEED: Final = 0x5EED


def read(
    index: KvIndex,
    rank: WorkerRank,
    event: BlockStored,
    rule: GroupRule,
    batch: int | None,
    namespace: Namespace,
) -> Generator[int, None, SparseStore | None]:
    """Return what an event says of a prefix, if anything; yield costs in blocks."""
    size, tokens = index.block_size, event.token_ids
    is_coloured = has_extra_keys(event)
    if (
        not tokens
        or event.tier is not Tier.DEVICE
        or event.has_nameless_adapter
        or index.is_eagle
        or event.block_size % size
        or len(tokens) % event.block_size
        # what else unnamed blocks depend on is unknown
        or (is_coloured and not (event.is_whole and event.block_size == size))
        or len(tokens) // size > index.room(rank)
    ):
        return None
    blocks, cut = len(tokens) // size, COLOURED_SLICE_BLOCKS if is_coloured else SLICE_BLOCKS
    local = []
    for at in range(0, blocks, cut):
        try:
            local.append(local_hashes(index, event, namespace, at, min(at + cut, blocks)))
        except ValueError:  # a token beyond 32 bits
            return None
        yield CHECK_COST_BLOCKS
    return SparseStore(
        batch=batch,
        group=event.group,
        need=rule.blocks,
        stride=rule.stride,
        parent=event.parent,
        local=b"".join(local),
        names=event.block_hashes,
        namespace=namespace,
    )


def store(index: KvIndex, holder: Holder, sparse: SparseStore) -> Iterator[int]:
    """Hold the prefix of the blocks named; yield the number of blocks after each step.

    A prefix whose beginning is not known is left out.
    """
    assert holder.limiting is not None
    prefixes = holder.limiting.prefixes
    assert prefixes is not None
    yield from _correct(index, holder, prefixes, sparse)
    span = sparse.span
    if not sparse.names and span == 1:
        return  # a block of output, which no prompt can reuse
    if span > len(sparse.names) > sparse.need:
        # where the others are is unknown
        sparse = sparse._replace(names=sparse.names[-sparse.need :])
    first = _first_named(index, holder, prefixes, sparse)
    chunk = None if sparse.parent is None else _chunk_before(holder, prefixes, sparse)
    if sparse.parent is not None and sparse.parent not in holder.where:
        # the chunk before ended with a block that has no name but this
        if chunk is None or not (chunk.parent is None or chunk.parent in holder.where):
            return
        sparse = sparse._replace(parent=chunk.parent, local=chunk.local + sparse.local)
    if sparse.names:
        if sparse.group in prefixes.short:
            prefixes.short[sparse.group] = sparse
        yield from _hold_from(index, holder, sparse, sparse.span - span + first)
    elif len(sparse.local) <= CHUNK_BYTES_MAX:
        prefixes.chunks.setdefault(sparse.group, deque(maxlen=CHUNKS_MAX)).append(sparse)


def _first_named(
    index: KvIndex, holder: Holder, prefixes: SparsePrefixes, sparse: SparseStore
) -> int:
    """Return the number of the first block that has a name.

    vLLM keeps what a match of the whole prompt needs: the blocks before its last token. They end
    with the event's tokens, or one block before if the prompt fills its last block.
    """
    named, span = len(sparse.names), sparse.span
    first = span - named
    if not 0 < named < span or sparse.stride > 1:
        return first
    if index.groups.is_whole_prompt(sparse.local, holder.rank, sparse.batch):
        return first - 1
    if _is_known(index.tree, holder, sparse, first - 1):
        return first - 1
    if named < sparse.need:
        if first > 1:
            return first  # more will follow
        # there would be more, or the next chunk has more
        prefixes.short[sparse.group] = sparse
        return 0
    prefixes.unsure[sparse.names[-1]] = sparse.names
    if len(prefixes.unsure) > UNSURE_MAX:
        del prefixes.unsure[next(iter(prefixes.unsure))]
    return first


def _is_known(tree: RadixTree, holder: Holder, sparse: SparseStore, number: int) -> bool:
    """Say whether the first name of an event already stands for one of its blocks."""
    place = holder.place_of(sparse.names[0])
    start = tree.place_behind(holder, sparse.parent)
    if place is None or start is None:
        return False
    segments = tree.follow(*start, sparse.local[: (number + 1) * HASH_BYTES])[0]
    if not segments:
        return False
    node, position, size = segments[-1]
    is_all = sum(size for *_, size in segments) == number + 1
    return is_all and place == (node, position + size - 1)


def _is_content(holder: Holder, name: int, local: PackedHashes) -> bool:
    """Say whether the block that a name stands for has the same tokens as a block."""
    place = holder.place_of(name)
    return place is not None and place[0].edge.startswith(local, place[1] * HASH_BYTES)


def _correct(
    index: KvIndex, holder: Holder, prefixes: SparsePrefixes, sparse: SparseStore
) -> Iterator[int]:
    """Move the names of an event that was taken wrongly, by the one that follows it."""
    parent = sparse.parent
    if parent is None:
        return
    short = prefixes.short.pop(sparse.group, None)
    if (
        short is not None
        and short.names[-1] == parent
        and sparse.is_next(short)
        and not sparse.local.startswith(short.local[-HASH_BYTES:])
    ):
        # it was the chunk before this one, and not the end of a prompt
        yield from _hold_from(index, holder, short, short.span - len(short.names))
    names = prefixes.unsure.get(parent)
    if names is not None and _is_content(holder, parent, sparse.local[:HASH_BYTES]):
        # what follows the last name is the block that it was taken for
        del prefixes.unsure[parent]
        _move_up(index.tree, holder, names)


def _chunk_before(
    holder: Holder, prefixes: SparsePrefixes, sparse: SparseStore
) -> SparseStore | None:
    """Return what comes before an event whose parent has no name but in this event.

    An engine goes on with the prompts that it has begun in their order, in the very next step.
    """
    chunks = prefixes.chunks.get(sparse.group)
    while chunks and not sparse.is_next(chunks[0]):
        chunks.popleft()
    if not chunks:
        return None
    if sparse.parent is None or sparse.parent not in holder.where:
        return chunks.popleft()
    is_next = _is_content(holder, sparse.parent, chunks[0].local[-HASH_BYTES:])
    return chunks.popleft() if is_next else None


def _hold_from(index: KvIndex, holder: Holder, sparse: SparseStore, first: int) -> Iterator[int]:
    """Hold the blocks of an event up to the last that has a name; `first` is the first of these."""
    stride, parent = sparse.stride, sparse.parent
    places = {(first + i + 1) * stride - 1: name for i, name in enumerate(sparse.names)}
    end = max(places) + 1
    for start in range(0, end, STEP_BLOCKS):
        stop = min(start + STEP_BLOCKS, end)
        here = {at - start: name for at, name in places.items() if start <= at < stop}
        piece = sparse.local[start * HASH_BYTES : stop * HASH_BYTES]
        parent = _hold(index, holder, (parent, sparse.namespace), piece, here)
        yield stop - start


def _hold(
    index: KvIndex,
    holder: Holder,
    behind: tuple[int | None, Namespace],
    local: PackedHashes,
    named: dict[int, int],
) -> int | None:
    """Hold consecutive blocks, some of which have names; return the name of the last one."""
    parent, namespace = behind
    place = index.tree.place_behind(holder, parent)
    if place is None:
        return parent
    held = _held(index.tree, holder, place, local)
    for at, name in named.items():
        if at < len(held):
            _rename(holder, held[at], name)
        else:
            _vacate(holder, name)  # it was a guess that the name belongs elsewhere
    last = parent = holder.name_at(*held[-1]) if held else parent
    names: list[int] = []
    for at in range(len(held), len(local) // HASH_BYTES):
        piece = local[at * HASH_BYTES : (at + 1) * HASH_BYTES]
        last = named[at] if at in named else _made_up(holder, last, piece)
        names.append(last)
    if names:
        rest = local[len(held) * HASH_BYTES :]
        index.store(holder.rank, Tier.DEVICE, parent, names, rest, namespace=namespace)
    return last


def _held(tree: RadixTree, holder: Holder, place: Place, local: PackedHashes) -> list[Place]:
    """Return the places of the first of some blocks, as far as the rank holds them."""
    places: list[Place] = []
    for node, position, size in tree.follow(*place, local)[0]:
        run = leading_run(node.held(holder.holder_id, all_ones(node.size)) >> position)
        places += [(node, position + at) for at in range(min(run, size))]
        if run < size:
            break
    return places


def _made_up(holder: Holder, parent: int | None, local: PackedHashes) -> int:
    """Return a name that the rank has not used yet."""
    name = xxh3_64_intdigest(pack_name(parent or 0) + local, _MADE_UP_SEED)
    while name in holder.where:
        name = xxh3_64_intdigest(pack_name(name) + local, _MADE_UP_SEED)
    return name


def _rename(holder: Holder, place: Place, name: int) -> None:
    """Give a held block another name; one that stands for another block leaves that."""
    node, position = place
    old = holder.name_at(node, position)
    several = node.names_at(holder.holder_id)
    if old is None or old == name or (several is not None and position in several):
        return
    _vacate(holder, name)
    del holder.where[old]
    holder.forget(old)
    holder.where[name] = node
    holder.write(node, position, pack_name(name))


def _vacate(holder: Holder, name: int) -> None:
    """Give the block that a name stands for, if any, a made-up one."""
    place = holder.place_of(name)
    if place is not None:
        _rename(holder, place, _made_up(holder, name, b""))


def _move_up(tree: RadixTree, holder: Holder, names: Sequence[int]) -> None:
    """Let names of consecutive blocks stand for those one block further up."""
    places = [place for name in names if (place := holder.place_of(name)) is not None]
    before = places[0][0].place_before(places[0][1]) if len(places) == len(names) else None
    if before is None:
        return
    rest = _made_up(holder, names[-1], b"")
    _rename(holder, places[-1], rest)
    for place, name in zip([before, *places[:-1]], names, strict=True):
        _rename(holder, place, name)
    for _ in drop_unneeded(tree, holder, [rest]):
        pass


def drop_unneeded(tree: RadixTree, holder: Holder, names: Sequence[int]) -> Iterator[int]:
    """Let go of blocks that no group holds, with those before them that served nothing else."""
    limiting = holder.limiting
    assert limiting is not None
    cost = 0
    for name in names:
        last: int | None = name
        while last is not None and not limiting.holds(last):
            node = holder.where.get(last)
            if node is None:
                break
            position = holder.locate(node, last)
            if _has_next(holder, (node, position)):
                break
            gone = [last]
            while position and len(gone) < STEP_BLOCKS:
                before = holder.name_at(node, position - 1)
                if before is None or limiting.holds(before):
                    break
                gone.append(before)
                position -= 1
            above = node.place_before(position)
            last = None if above is None else holder.name_at(*above)
            uncover_listed(tree, holder, Tier.DEVICE, gone)
            cost += len(gone)
            if cost >= STEP_BLOCKS:
                yield cost
                cost = 0


def _has_next(holder: Holder, place: Place) -> bool:
    """Say whether the rank holds a block behind a place."""
    node, position = place
    if position + 1 < node.size:
        return bool(node.held_anywhere(holder.holder_id) >> (position + 1) & 1)
    return not holder.runs.keys().isdisjoint(node.children.values())
