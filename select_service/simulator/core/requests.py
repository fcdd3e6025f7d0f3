"""The requests of a simulated cluster, and their outcomes.

Block numbers stand for a block's content and all before it, like `hash_ids` in traces: equal
number, equal prefix. Nothing is computed here. A prompt is a thousand of them: from here to the
index they are kept in arrays of 64-bit numbers, never as single objects.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final, Literal, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

Role = Literal["prefill", "decode", "aggregated"]

OK: Final = "ok"
TOO_LARGE: Final = "too_large"  # no engine can ever hold it
LOST: Final = "lost"  # its workers died more often than it may be retried


class ClientRequest(msgspec.Struct, kw_only=True, eq=False):
    """One request as a client sends it.

    `blocks` names the full blocks of the prompt and, where known, those its answer will fill: a
    next turn will find them. The first `isl // block_size` belong to the prompt.
    """

    number: int
    arrival: float
    isl: int
    osl: int
    blocks: array[int]  # "Q": see `chain_of`
    session: str = ""
    think_s: float = 0.0  # from its session's last answer to it, in a closed loop
    tenant: str = ""
    slo_class: str = ""
    slo_ttft_s: float | None = None
    slo_itl_s: float | None = None
    expected_osl: int | None = None  # as stated by the client; usually it is not


class RequestOutcome(msgspec.Struct, eq=False):
    """The outcome of a request; times are seconds since the start of the run."""

    request: ClientRequest
    end: str  # `OK`, `TOO_LARGE`, `LOST`, or `refused: CODE`
    finished: float
    worker_id: int = -1  # that decoded it
    prefill_worker_id: int = -1  # that computed its prompt
    placed: float = -1.0
    first_token: float = -1.0
    # actually found when the attempt that led to its first token was scheduled
    cached_tokens: int = 0
    attempts: int = 1
    preemptions: int = 0
    reason: str = ""  # why this worker

    @property
    def is_ok(self) -> bool:
        """Whether it was answered."""
        return self.end == OK

    @property
    def ttft_s(self) -> float:
        """From arrival to first token."""
        return self.first_token - self.request.arrival

    @property
    def itl_s(self) -> float:
        """Mean time between tokens; 0 for a single-token answer."""
        gaps = self.request.osl - 1
        return (self.finished - self.first_token) / gaps if gaps else 0.0

    @property
    def e2e_s(self) -> float:
        """From arrival to last token."""
        return self.finished - self.request.arrival


class Workload(Protocol):
    """A source of requests; one object serves one run."""

    block_size: int

    def next(self) -> ClientRequest | None:
        """Return the next request in order of arrival; None: no more come unprompted."""

    def after(self, outcome: RequestOutcome) -> Iterable[ClientRequest]:
        """Return what the end of a request causes: its next turn, the next of a closed loop."""


def chain_of(blocks: Iterable[int] = ()) -> array[int]:
    """Return block numbers in the form requests have them, of 64 bits each."""
    return array("Q", blocks)
