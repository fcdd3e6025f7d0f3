"""Updates all rows of the load columns for one step of a reservation's life in one go.

The plain form of `LoadRows` in `_ledger.pyx`: same names, same answers. `slot_loads.py` owns the
columns.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import numpy as np

from select_service.core.ledger.loads import PACE, TOTALS, padding

if TYPE_CHECKING:
    from select_service.core.columns import Floats, Slots


class LoadRows:
    """Columns of equal length; `slot_loads.py` documents their content."""

    def __init__(
        self,
        prefill: Floats,
        decode: Floats,
        churn: Floats,
        context: Floats,
        requests: Slots,
        computing: Slots,
        queue_updated_at: Floats,
        ahead: Floats,
        step: Floats,
        max_num_seqs: Slots,
        wait: Floats,
    ) -> None:
        # single elements of a memoryview: numpy takes 1.5 times as long
        self._prefill, self._decode = prefill.data, decode.data
        self._churn, self._context = churn.data, _floats(context)
        self._requests, self._computing = requests.data, computing.data
        self._queue_updated_at, self._ahead = _floats(queue_updated_at), _floats(ahead)
        self._step = _floats(step)
        self._max_num_seqs, self._wait = max_num_seqs.data, _floats(wait)

    def pack(self, prefilling: int, turnover: float, pace: float | None) -> bytes:
        """Return the columns of prices as one byte string: a `PackedLoads`.

        `pace` None: without queues.
        """
        columns: list[memoryview[int] | memoryview[float] | bytes] = [
            self._prefill,
            self._decode,
            self._churn,
            self._context,
            TOTALS.pack(prefilling, turnover),
        ]
        if pace is not None:
            requests = np.array(self._requests, dtype=np.float64).data
            columns += self._queue_updated_at, self._ahead, requests, PACE.pack(pace)
            columns.append(bytes(8 * padding(len(self._requests))))
        return b"".join(columns)

    def book(
        self,
        slot: int,
        left: int,
        tokens: int,
        requests: int,
        decode: int,
        blocks: int,
        now: float,
    ) -> None:
        """Add a request.

        `left`, `requests` and `decode` are what is there now; `tokens` of `left` are its
        own.
        """
        if not self._prefill[slot]:  # the queue was empty: it starts now
            self._queue_updated_at[slot], self._ahead[slot] = now, float(left)
        self._prefill[slot] = left
        self._churn[slot] += tokens
        self._requests[slot] = requests
        self._computing[slot] += 1
        self._decode[slot] = decode
        self._context[slot] += blocks
        if requests >= self._max_num_seqs[slot]:  # the next one also waits for this one
            self._context[slot] += self._wait[slot]

    def complete(self, slot: int, left: int, head: int, now: float) -> None:
        """Complete a prefill.

        `head` is the part of `left` in the prompt whose turn it is; 0: unknown.
        """
        self._prefill[slot] = left
        self._computing[slot] -= 1
        self._queue_updated_at[slot] = now
        step = self._step[slot]
        most = math.ceil(head / step) * step if head > step > 0.0 else step
        self._ahead[slot] = most if most < left else left  # noqa: FURB136 - min() is slow

    def lengthen(self, slot: int, decode: int, blocks: int) -> None:
        """Lengthen a request.

        `decode` are the blocks there now, with the additional `blocks` it attends to.
        """
        self._decode[slot] = decode
        self._context[slot] += blocks

    def give_up(self, slot: int, left: int, begun: int, prompts: int) -> None:
        """Remove prompts, or parts of one, that will not be computed.

        `begun` tokens of them were of the prompt whose turn it was; `prompts` went as a
        whole.
        """
        self._prefill[slot] = left
        self._computing[slot] -= prompts
        ahead = max(0.0, self._ahead[slot] - begun)
        self._ahead[slot] = left if ahead > left else ahead  # noqa: FURB136 - as above

    def free(self, slot: int, requests: int, decode: int, blocks: int) -> None:
        """Remove a request whose prompt is computed; arguments as above."""
        self._requests[slot] = requests
        self._decode[slot] = decode
        self._context[slot] -= blocks
        if requests >= self._max_num_seqs[slot] - 1:
            self._context[slot] -= self._wait[slot]


def _floats(column: Floats) -> memoryview[float]:
    return cast("memoryview[float]", column.data)
