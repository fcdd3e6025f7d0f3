"""`python -m bench.scaling.plot FILE`: selections a second over cores, measured and on paper.

Needs the extra `bench` (matplotlib). What the lines say is in `model.py`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.output import can_draw, progress
from bench.scaling.model import read, scalings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.scaling.model import Scaling

__all__ = ["main"]

_CORES = (1, 2, 4, 8, 16)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw; 1 when the file is no result or matplotlib is missing."""
    args = _parser().parse_args(argv)
    if not can_draw():
        return 1
    try:
        document = read(args.file)
    except (OSError, ValueError) as error:
        progress(f"bench: {error}")
        return 1
    found = scalings(document, args.isl)
    if not found:
        progress(f"bench: nothing was measured on one core with {args.isl} tokens")
        return 1
    _draw(found, document, args.isl, args.file.with_suffix(""))
    return 0


def _draw(found: Sequence[Scaling], document: dict[str, Any], isl: int, stem: Path) -> None:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for number, one in enumerate(found):
        colour = f"C{number}"
        each = f"{one.growth:.2f} times the CPU with each doubling"
        axes.plot(*zip(*one.measured(), strict=True), "o", color=colour, label=one.contender)
        careful = zip(*one.careful(_CORES), strict=True)
        axes.plot(*careful, color=colour, label=f"{one.contender}, model: {each}")
        if one.contender.startswith("ours"):
            straight = zip(*one.straight(_CORES), strict=True)
            axes.plot(
                *straight, ":", color=colour, label=f"{one.contender}, model: a straight line"
            )
    for axis, base in ((axes.set_xscale, 2), (axes.set_yscale, 10)):
        axis("log", base=base)
    axes.set_xticks(_CORES, [str(one) for one in _CORES])
    axes.set_xlabel("cores, half of each in use (ours: a process for each, with models of its own)")
    axes.set_ylabel(f"POST /select a second, {isl} tokens")
    axes.grid(visible=True, linewidth=0.3, which="both")
    axes.legend(fontsize=7)
    axes.set_title(f"{document['taken_at'][:10]}, commit {document['commit'][:8]}", fontsize=9)
    path = stem.with_suffix(".svg")
    figure.savefig(path, metadata={"Date": None})
    progress(f"written to {path}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.scaling.plot", description=__doc__)
    parser.add_argument("file", type=Path, help="a result of bench.scaling")
    parser.add_argument("--isl", type=int, default=2048, help="prompts of (default: %(default)s)")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
