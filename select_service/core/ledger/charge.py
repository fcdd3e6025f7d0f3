"""What a request was charged for its answer, to be corrected when that has ended.

A request is charged when it goes: for the prompt tokens to compute, and for the answer that it
expects, if it says so. What came instead is known at its end, as far as output blocks were
reported. The ledger keeps the charge with the reservation. Replicas serve the same pool, so each
charges what any of them admits, when it learns of it, and corrects it once, whichever of them
receives the end; one that comes later starts with what is admitted from then on.
"""

from __future__ import annotations

from typing import Protocol, final

__all__ = ["Charge", "answer_tokens"]


class AnswerCharges(Protocol):
    """The policy with a queue that charged, see `slo_shed.py`."""

    def answered(self, line: int, tenant_id: str, expected: int, reported: int) -> None:
        """Charge for an answer of `reported` tokens instead of the expected ones."""
        ...


@final
class Charge:
    """The account of an answer: in a policy's queue, a line and a tenant.

    If another policy has replaced that one, the correction is of no consequence.
    """

    __slots__ = ("_block_size", "_expected", "_line", "_queue", "_tenant_id")

    def __init__(
        self,
        queue: AnswerCharges,
        line: int,
        tenant_id: str,
        expected: int,
        block_size: int,
    ) -> None:
        self._queue = queue
        self._line = line
        self._tenant_id = tenant_id
        self._expected = expected
        self._block_size = block_size

    def ended(self, output_blocks: int) -> None:
        """Correct the charge; without any reported block nothing is known of the answer."""
        if output_blocks:
            reported = answer_tokens(self._expected, output_blocks, self._block_size)
            if reported != self._expected:
                self._queue.answered(self._line, self._tenant_id, self._expected, reported)


def answer_tokens(expected: int, output_blocks: int, block_size: int) -> int:
    """Return how long an answer was: blocks say it to within one, what was expected says the rest.

    The last block of an answer, full or not, need not be reported.
    """
    least = output_blocks * block_size
    return min(max(expected, least), least + block_size)
