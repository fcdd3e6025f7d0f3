"""What this service is to reach beside the peer, row by row: the only place that says so.

A target is a ratio, ours / peer, of the medians over interleaved rounds. A row without one is shown
and not judged.
"""

from __future__ import annotations

from enum import StrEnum

from bench.compare.servers import variant_of

__all__ = ["NOISE", "TARGETS", "Verdict", "target_of", "verdict"]

NOISE = 1.08
"""A ratio less than this far beyond its target may be the machine's doing."""

TARGETS = {
    "W1 select, hashes, isl 512": 0.5,
    "W1 select, hashes, isl 2048": 0.5,
    "W1 select, hashes, isl 8192": 0.5,
    "W1 select, hashes, isl 32768": 0.5,
    "W1 select, hashes, isl 131072": 0.5,
    "W2 select, 60-95% overlap, isl 2048": 0.5,
    "W2 select, 60-95% overlap, isl 8192": 0.5,
    "W2 select, 60-95% overlap, isl 32768": 0.5,
    "W3 select, tokens, isl 2048": 0.5,
    "W3 select, tokens, isl 8192": 0.5,
    "W3 select, tokens, isl 32768": 0.5,
    "W4 lifecycle, isl 2048, 256 standing": 0.8,
    "W4 lifecycle, shared prefixes, 256 standing, 200k blocks, isl 2048": 0.8,
    "W4 lifecycle, hashes that repeat, 256 standing, isl 2048": 1.5,
    "W5 select, 256 workers, isl 2048": 0.5,
    "W5 select, 1024 workers, isl 2048": 0.5,
    "W6 store 64 blocks/event": 0.5,
    "W6 store 1 block/event": 0.45,
    "W6 store 1 block/event, 8 events/batch": 0.45,
    "W6 remove 1 block/event, 64 events/batch": 1.0,
    "W6 remove 64 blocks/event": 1.0,
    "W7 300 lifecycles/s, 50k blocks/s: p99 of select_and_reserve": 1.2,
    "W7 300 lifecycles/s, 50k blocks/s: CPU": 0.8,
    "W8 memory, unique content": 0.8,
    "W8 memory, content shared by 8 workers": 0.8,
    "W9 /dump of 1M blocks: to the last byte": 1.0,
    "W9 /dump of 1M blocks: p99 of /select meanwhile": 1.0,
    "W10 start to /health": 2.5,
    "W11 in-process select, hashes, isl 2048, 1 at a time": 0.3,
    "W11 in-process lifecycle, isl 2048, 1 at a time": 0.3,
    "W11 in-process select, hashes, isl 2048, 16 at a time": 0.3,
    "W11 in-process lifecycle, isl 2048, 16 at a time": 0.3,
}


def target_of(row: str, contender: str) -> float | None:
    """Return the target of a row for one variant of this service.

    Without kernels there is none: the plain form is to be right, readable and installable.
    """
    return None if variant_of(contender) == "ours-pure" else TARGETS.get(row)


class Verdict(StrEnum):
    """How a ratio stands to its target."""

    MET = "met"
    EQUAL = "equal within noise"
    MISSED = "missed"


def verdict(ratio: float, target: float) -> Verdict:
    """Judge a ratio of medians."""
    if ratio <= target:
        return Verdict.MET
    return Verdict.EQUAL if ratio / target < NOISE else Verdict.MISSED
