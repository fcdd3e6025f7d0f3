"""What one partition is asked for and how that goes: sums that only grow, to plan capacity by.

`placing.py` and `desk.py` add to them, a handful of additions per request; `edge/metrics/demand.py`
reads them at scrape time. What was refused counts as asked for: capacity is planned for demand, not
for survivors. Times are those of reservations of ours: from the booking to the first token (a
proxy of TTFT), from there to the end.
"""

from __future__ import annotations

__all__ = ["DemandTally"]

FADES_S = 600.0

_SIZES = 65
"""Of prompts, by the bits of their length: tokens are counted in 64 bits at most."""


class DemandTally:
    """Sums of one partition."""

    __slots__ = (
        "answered",
        "answering_s",
        "answering_tokens",
        "ended",
        "fades_at",
        "first_tokens",
        "forgotten",
        "found_on_departed",
        "isl_counts",
        "isl_tokens",
        "output_tokens",
        "prefill_tokens",
        "refused",
        "request_s",
        "reused",
        "ttft_s",
    )

    def __init__(self) -> None:
        self.isl_counts = [0] * _SIZES
        """Requests that were given a worker, by bit_length of their prompt."""
        self.isl_tokens = 0
        self.prefill_tokens = 0  # of them, not cached on the worker chosen
        self.refused = 0
        self.first_tokens = 0
        self.ttft_s = 0.0
        self.ended = 0
        self.request_s = 0.0
        self.answered = 0  # of those that ended: they had told of output
        self.output_tokens = 0
        self.answering_tokens = 0  # of those whose first token was told, too
        self.answering_s = 0.0
        self.reused: dict[int, float] = {}
        """Prompt tokens found in a worker's cache, by worker, fading: how hot its blocks are."""
        self.found_on_departed = 0.0  # the same, of all who have left
        self.fades_at = 0.0
        self.forgotten = 0.0  # of `isl_tokens`, when it last faded

    @property
    def asked_lately(self) -> float:
        """Prompt tokens that were given a worker, fading as `reused`, which is a share of them."""
        return self.isl_tokens - self.forgotten

    @property
    def found_lately(self) -> float:
        """Of those, the tokens that were found in a cache."""
        return sum(self.reused.values()) + self.found_on_departed

    def place(self, worker_id: int, isl_tokens: int, prefill_tokens: int) -> None:
        """A prompt was given a worker, on which so many of its tokens are to be computed."""
        self.isl_counts[isl_tokens.bit_length()] += 1
        self.isl_tokens += isl_tokens
        self.prefill_tokens += prefill_tokens
        if prefill_tokens < isl_tokens:
            found = self.reused.get(worker_id, 0.0)
            self.reused[worker_id] = found + (isl_tokens - prefill_tokens)

    def leave(self, worker_id: int) -> None:
        """A worker has gone, with its cache: who comes under its id has found nothing."""
        self.found_on_departed += self.reused.pop(worker_id, 0.0)

    def fade(self, now: float) -> None:
        """Forget half of what was reused and asked for, every ten minutes; part of housekeeping."""
        if now < self.fades_at:
            return
        has_begun, self.fades_at = self.fades_at > 0, now + FADES_S
        if not has_begun:
            return
        self.reused = {one: tokens / 2 for one, tokens in self.reused.items() if tokens > 1}
        self.found_on_departed /= 2
        self.forgotten += self.asked_lately / 2

    def tell_output(self, tokens: int, first_token_at: float, now: float) -> None:
        """A request ended that had told of its output; `first_token_at` 0: of nothing else."""
        self.answered += 1
        self.output_tokens += tokens
        if first_token_at:
            self.answering_tokens += tokens
            self.answering_s += now - first_token_at
