"""Plain counters of the endpoint picker, read by `metrics/epp_metrics.py`. No gRPC in here."""

from __future__ import annotations

from collections import Counter
from typing import Final

from select_service.tokenization.openai_body import LOAD_ALONE

PROMPTS: Final = ("token_ids", "tokenized", "cached", "load_alone")
"""Where the tokens of a prompt came from: the body, an engine, an engine's earlier answer, nowhere.
"""

SERVED: Final = ("chosen", "moved", "unknown")
"""What the gateway named as the endpoint that served a request: the chosen one, another worker, to
which the reservation moved, or none that is known."""

_LIMITS: Final = (
    "epp_streams_max",
    "epp_body_bytes_max",
    "epp_buffered_bytes_max",
    "epp_tokenize_timeout_s",
    "epp_tokenize_calls_max",
)


class PickerTraffic:
    """Everything counted at the endpoint picker of one application."""

    __slots__ = (
        "broken",
        "buffered_bytes",
        "cache_bytes",
        "chosen",
        "crashes",
        "limit_hits",
        "load_alone",
        "lost",
        "opened",
        "prompts",
        "refused",
        "served",
        "streams",
        "tokenize_calls",
        "tokenize_seconds",
    )

    def __init__(self) -> None:
        self.streams = 0  # open
        self.opened = 0
        self.chosen = 0  # requests that were given an endpoint
        self.refused: Counter[int] = Counter()  # immediate responses, by their status
        self.broken = 0  # streams that ended before their response did
        self.lost = 0  # reservations that had ended before their stream
        self.crashes = 0  # streams cut by a bug
        self.prompts = dict.fromkeys(PROMPTS, 0)
        self.load_alone = dict.fromkeys(LOAD_ALONE, 0)
        self.served = dict.fromkeys(SERVED, 0)
        self.tokenize_calls = 0  # that have ended
        self.tokenize_seconds = 0.0  # of them together
        self.buffered_bytes = 0
        self.cache_bytes = 0
        self.limit_hits = dict.fromkeys(_LIMITS, 0)

    def hit_limit(self, name: str) -> None:
        """Count that a limit of the tokenizer was in the way."""
        self.limit_hits[f"epp_{name}"] += 1
