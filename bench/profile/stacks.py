"""Collapsed stacks (`a;b;c 12`, a line per stack) → what takes the time, as Markdown."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Share", "Stack", "collapsed", "merged", "note", "parse", "shares"]

_TOP = 25
_UNSEEN = 0.005  # shares below are left out
_UNSEEN_WITHIN = 0.01
_OUTERMOST = 0.95  # whatever has more is the whole server
_OURS = ("select_service/", "indexer/")


Stack = tuple[tuple[str, ...], int]
"""Functions from the outermost to the one that ran, and how many samples saw them so."""


@dataclass(frozen=True, slots=True)
class Share:
    """One function's part of all samples, 0 to 1."""

    function: str
    own: float  # it was running
    within: float  # it or what it called was running


def parse(text: str) -> list[Stack]:
    """Stacks, outermost function first, with their samples; line numbers are dropped.

    Raises:
        ValueError: a line does not end in a number.
    """
    stacks = []
    for line in text.splitlines():
        if not line.strip():
            continue
        frames, _, count = line.rpartition(" ")
        stacks.append((tuple(_function(one) for one in frames.split(";")), int(count)))
    return stacks


def merged(stacks: Iterable[Stack]) -> list[Stack]:
    """One stack for all that differ in line numbers alone, the most frequent first."""
    counts: Counter[tuple[str, ...]] = Counter()
    for frames, count in stacks:
        counts[frames] += count
    return counts.most_common()


def collapsed(stacks: Iterable[Stack]) -> str:
    """The text of which `parse` makes these stacks."""
    return "".join(f"{';'.join(frames)} {count}\n" for frames, count in stacks)


def shares(stacks: Iterable[Stack]) -> list[Share]:
    """By own time, the largest first."""
    own: Counter[str] = Counter()
    within: Counter[str] = Counter()
    for frames, count in stacks:
        own[frames[-1]] += count
        for function in set(frames):
            within[function] += count
    total = own.total()
    found = [Share(name, own[name] / total, count / total) for name, count in within.items()]
    return sorted(found, key=lambda one: (-one.own, -one.within, one.function))


def note(title: str, facts: dict[str, str], stacks: Sequence[Stack]) -> str:
    """A page: what was measured, then the functions that run most."""
    samples = sum(count for _, count in stacks)
    lines = [f"# {title}", ""]
    lines += [f"* {name}: {value}" for name, value in {**facts, "samples": str(samples)}.items()]
    lines += [
        "",
        "*own*: it was running; *with callees*: it, or what it called. A call into compiled code",
        "is the time of the Python function that makes it, unless native frames were recorded.",
        "",
        "| own | with callees | function |",
        "| ---: | ---: | --- |",
    ]
    lines += [
        f"| {one.own:.1%} | {one.within:.1%} | `{one.function}` |"
        for one in shares(stacks)[:_TOP]
        if one.own >= _UNSEEN
    ]
    lines += ["", "Our own functions by time with callees:", ""]
    lines += ["| with callees | function |", "| ---: | --- |"]
    within = sorted(shares(stacks), key=lambda one: (-one.within, one.function))
    lines += [
        f"| {one.within:.1%} | `{one.function}` |"
        for one in within
        if _UNSEEN_WITHIN <= one.within < _OUTERMOST and any(part in one.function for part in _OURS)
    ]
    return "\n".join(lines) + "\n"


def _function(frame: str) -> str:
    """`name (file:12)` → `name (file)`: one function, whatever line it was at."""
    if not frame.endswith(")"):
        return frame
    head, _, place = frame[:-1].rpartition(":")
    return f"{head})" if head and place.isdigit() else frame
