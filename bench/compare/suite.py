"""The workloads of a comparison: which, how large, in which order."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from bench.compare.dumping import Dump
from bench.compare.ingest import Ingest
from bench.compare.inprocess import InProcess
from bench.compare.lifecycles import Lifecycle, PrefixSharing, Reordered
from bench.compare.memory import Memory
from bench.compare.paced import Mixed, PacedSelect
from bench.compare.served import Served
from bench.compare.starting import Start
from bench.compare.workloads import Overlap, Select

if TYPE_CHECKING:
    from bench.compare.run import Workload
    from bench.compare.served import ServedWorkload

__all__ = ["is_chosen", "label", "suite"]

_MILLION = 1 << 20
_QUICK_PART = 3
_DUMP_ROUNDS = 5
_NUMBER = re.compile(r"W\d+")


def suite(*, quick: bool = False, fine: int = 1) -> list[Workload]:
    """All workloads.

    Args:
        quick: leave out the largest, do a third of the operations.
        fine: do one part in so many of the operations a round, for as many times the rounds.
    """
    part = (_QUICK_PART if quick else 1) * fine
    chosen = [*_selects(part, quick=quick), *_others(fine, quick=quick)]
    return sorted(chosen, key=lambda one: int(one.name.split()[0][1:]))


def label(name: str) -> str:
    """The short name, `W1@512`: number and prompt length; of what has no length, the number."""
    number, _, rest = name.partition(" ")
    _, _, isl = rest.rpartition("isl ")
    length = isl.split(",")[0] if "isl " in rest else ""
    return f"{number}@{length}" if length else number


def is_chosen(name: str, wanted: str | None) -> bool:
    """Whether `W1@512;W4;overlap` (short names, numbers, parts of names) wants it; None: all."""
    if wanted is None:
        return True
    number, _, _ = name.partition(" ")
    return any(
        number == one if _NUMBER.fullmatch(one) else one in name or one == label(name)
        for one in wanted.split(";")
        if one
    )


def _selects(part: int, *, quick: bool) -> list[Workload]:
    """W1 to W5."""
    small: list[ServedWorkload] = [
        Select("W1 select, hashes, isl 512", isl=512, operations=9000 // part, ring=256),
        Select("W1 select, hashes, isl 2048", isl=2048, operations=6000 // part),
        Select("W1 select, hashes, isl 8192", isl=8192, operations=3000 // part),
        Overlap("W2 select, 60-95% overlap, isl 2048", isl=2048, operations=6000 // part),
        Select("W3 select, tokens, isl 2048", isl=2048, operations=3000 // part, tokens=True),
        Lifecycle("W4 lifecycle, isl 2048, 256 standing", operations=3000 // part),
        Lifecycle(
            "W4 lifecycle, shared prefixes, 256 standing, 200k blocks, isl 2048",
            operations=3000 // part,
            content=PrefixSharing(),
        ),
        Lifecycle(
            "W4 lifecycle, hashes that repeat, 256 standing, isl 2048",
            operations=3000 // part,
            content=Reordered(),
        ),
        Select("W5 select, 256 workers, isl 2048", isl=2048, operations=4500 // part, workers=256),
    ]
    large: list[ServedWorkload] = [
        Lifecycle(
            "W4 lifecycle, shared prefixes, http.client, 256 standing, 200k blocks, isl 2048",
            operations=1500 // part,
            content=PrefixSharing(),
            plain_client=True,
        ),
        Select("W1 select, hashes, isl 32768", isl=32768, operations=900 // part, ring=24),
        Select("W1 select, hashes, isl 131072", isl=131072, operations=300 // part, ring=16),
        Overlap("W2 select, 60-95% overlap, isl 8192", isl=8192, operations=3000 // part),
        Overlap(
            "W2 select, 60-95% overlap, isl 32768",
            isl=32768,
            operations=900 // part,
            families=8,
            ring=24,
        ),
        Select("W3 select, tokens, isl 8192", isl=8192, operations=1200 // part, tokens=True),
        Select(
            "W3 select, tokens, isl 32768",
            isl=32768,
            operations=300 // part,
            tokens=True,
            ring=24,
        ),
        Select(
            "W5 select, 1024 workers, isl 2048",
            isl=2048,
            operations=3000 // part,
            workers=1024,
        ),
    ]
    return [Served(one) for one in (small if quick else small + large)]


def _others(fine: int, *, quick: bool) -> list[Workload]:
    """Those at a rate, of events, of memory, of a process's life."""
    small: list[Workload] = [
        Served(
            PacedSelect(
                "W1 paced 300/s, select, hashes, isl 512",
                isl=512,
                seconds=(2 if quick else 4) / fine,
            )
        ),
        Served(Ingest("W6", blocks=131_072 // (2 if quick else 1) // fine)),
        Served(Mixed("W7 300 lifecycles/s, 50k blocks/s", seconds=(2 if quick else 5) / fine)),
        Start("W10 start to /health", starts=1 if quick else 3),
        InProcess("W11 in-process", operations=(1000 if quick else 3000) // fine),
    ]
    if quick:
        return small
    return [
        *small,
        Memory("W8 memory, unique content", _MILLION),
        Memory("W8 memory, content shared by 8 workers", _MILLION, holders=8),
        Memory("W8 memory, unique content, after a burst", _MILLION, burst=True),
        Served(Dump("W9 /dump of 1M blocks", _MILLION), rounds_max=_DUMP_ROUNDS),
    ]
