"""What engines have published and when: a subscriber beside the service."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from time import monotonic
from typing import Any, Final, NamedTuple, Self

import msgspec
import zmq

Rank = tuple[int, int]
"""Worker and data-parallel rank."""
Tokens = tuple[int, ...]
"""Of one block; in these tests they are random, so no two blocks have the same."""

POLL_MS: Final = 50


class Published(NamedTuple):
    """Something that an engine published."""

    at: float
    batch: int
    """The number of the batch that it came in."""


class EventLog:
    """When blocks were published as stored and removed, by their tokens."""

    def __init__(self, endpoints: Mapping[Rank, str]) -> None:
        self.stored: dict[Rank, dict[Tokens, list[Published]]] = _log(endpoints)
        self.removed: dict[Rank, dict[Tokens, list[Published]]] = _log(endpoints)
        self.last: dict[Rank, int] = dict.fromkeys(endpoints, -1)
        """The number of the last batch of each rank."""
        self._tokens: dict[Rank, dict[Any, Tokens]] = {rank: {} for rank in endpoints}
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._ranks: dict[zmq.Socket[bytes], Rank] = {}
        for rank, endpoint in endpoints.items():
            socket = self._context.socket(zmq.SUB)
            socket.connect(endpoint)
            socket.subscribe(b"")
            self._poller.register(socket, zmq.POLLIN)
            self._ranks[socket] = rank
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._listen)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _listen(self) -> None:
        while not self._ends.is_set():
            for socket, _ in self._poller.poll(POLL_MS):
                _, number, payload = socket.recv_multipart()
                rank, published = (
                    self._ranks[socket],
                    Published(monotonic(), int.from_bytes(number, "big")),
                )
                batch: Any = msgspec.msgpack.decode(payload)
                for event in batch[1]:
                    self._note(rank, event, published)
                self.last[rank] = published.batch

    def _note(self, rank: Rank, event: Mapping[str, Any], published: Published) -> None:
        names = self._tokens[rank]
        if event["type"] == "BlockStored":
            size = event["block_size"]
            hidden = len(event["token_ids"]) // size - len(event["block_hashes"])
            # windows' ends alone are named, with the tokens of what comes before them
            for at, block_hash in enumerate(event["block_hashes"], hidden):
                names[block_hash] = tuple(event["token_ids"][at * size : (at + 1) * size])
                self.stored[rank][names[block_hash]].append(published)
        elif event["type"] == "BlockRemoved":
            for block_hash in event["block_hashes"]:
                if block_hash in names:
                    self.removed[rank][names[block_hash]].append(published)

    def forget(self, worker_id: int) -> None:
        """Its engine has ended: the next one's batches begin with number 0."""
        self.last.update({rank: -1 for rank in self.last if rank[0] == worker_id})

    def was_stored(self, rank: Rank, blocks: Iterable[Tokens], begin: float, end: float) -> bool:
        """Whether the rank published in that time that it stored one of these blocks."""
        return _between(self.stored[rank], blocks, begin, end)

    def was_removed(self, rank: Rank, blocks: Iterable[Tokens], begin: float, end: float) -> bool:
        """Whether the rank published in that time that it removed one of these blocks."""
        return _between(self.removed[rank], blocks, begin, end)


def blocks_of(prompt: Sequence[int], size: int) -> list[Tokens]:
    """The whole blocks of a prompt."""
    return [tuple(prompt[at : at + size]) for at in range(0, len(prompt) - size + 1, size)]


def _log(endpoints: Iterable[Rank]) -> dict[Rank, dict[Tokens, list[Published]]]:
    return {rank: defaultdict(list) for rank in endpoints}


def _between(
    log: Mapping[Tokens, Sequence[Published]], blocks: Iterable[Tokens], begin: float, end: float
) -> bool:
    return any(begin <= published.at <= end for block in blocks for published in log.get(block, ()))
