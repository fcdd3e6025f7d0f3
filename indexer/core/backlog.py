"""Live messages that wait until the missing batches before them have arrived.

A bounded queue that knows its first and last sequence number. `stream` fills it during a replay and
decides what to do when it is full.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque


class MessageBacklog:
    """Messages in order of arrival, counted in batches and bytes."""

    __slots__ = ("_batches_max", "_bytes_max", "_queue", "bytes")

    def __init__(self, batches_max: int, bytes_max: int) -> None:
        self._queue: deque[tuple[int, bytes]] = deque()
        self._batches_max = batches_max
        self._bytes_max = bytes_max
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def first(self) -> int:
        """Sequence of the oldest message."""
        return self._queue[0][0]

    @property
    def first_payload(self) -> bytes:
        """Payload of the oldest message."""
        return self._queue[0][1]

    @property
    def last(self) -> int:
        """Sequence of the newest message."""
        return self._queue[-1][0]

    @property
    def is_full(self) -> bool:
        """Whether more messages or bytes are queued than may wait."""
        return len(self._queue) > self._batches_max or self.bytes > self._bytes_max

    @property
    def last_payload(self) -> bytes:
        """Payload of the newest message."""
        return self._queue[-1][1]

    def holds(self, seq: int, payload: bytes) -> bool:
        """Whether this very message waits; O(log n) positions, if the numbers ascend."""
        at = bisect_left(self._queue, seq, key=lambda one: one[0])
        return at < len(self._queue) and self._queue[at] == (seq, payload)

    def append(self, seq: int, payload: bytes) -> None:
        """Add the newest message."""
        self._queue.append((seq, payload))
        self.bytes += len(payload)

    def put_back(self, seq: int, payload: bytes) -> None:
        """Return a message to the front of the queue."""
        self._queue.appendleft((seq, payload))
        self.bytes += len(payload)

    def pop(self) -> tuple[int, bytes]:
        """Take the oldest message."""
        seq, payload = self._queue.popleft()
        self.bytes -= len(payload)
        return seq, payload

    def clear(self) -> None:
        """Drop everything."""
        self._queue.clear()
        self.bytes = 0

    def check(self) -> None:
        """Assert that the byte count is right and that no limit stays exceeded."""
        assert self.bytes == sum(len(payload) for _, payload in self._queue)
        assert not self.is_full
