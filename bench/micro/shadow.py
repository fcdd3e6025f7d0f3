"""What weights that look on cost: `python -m bench.micro.shadow [--workers N]`.

Prints µs of CPU of one selection in the core, records kept as by default: without a shadow, with
one that scores the default share of the decisions, and with one that scores all. One core takes
turns in all three, a short round each, so that all see the same loads, index and memory. The budget
is a whole core here: what is measured is what the share of it would buy.
"""

from __future__ import annotations

import argparse
import gc
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

from bench.micro.decisions import core_of, matched, selections
from select_service.types.shadow import ShadowSettings

if TYPE_CHECKING:
    from select_service.core.service import SelectionCore

REPEATS = 41
SHARE = ShadowSettings().sample
WEIGHTS: dict[str, dict[str, float | bool]] = {
    "plain weights": {"prefill_load_scale": 2.0},
    "with decay": {"overlap_score_credit_decay": 1.0},
    "with temperature": {"temperature": 0.5},
}
KINDS = {"new prompts": selections, "half of it matched": matched}


def shadows(weights: dict[str, float | bool]) -> dict[str, ShadowSettings | None]:
    """Return what takes turns."""
    return {
        "off": None,
        "share": ShadowSettings(weights=weights, sample=SHARE, cost_max=1.0),
        "all": ShadowSettings(weights=weights, sample=1.0, cost_max=1.0),
    }


def measure(core: SelectionCore, kind: str, weights: dict[str, float | bool]) -> str:
    """Return a line: without, and what the share and all of them add."""
    times: dict[str, list[float]] = {}
    turns = shadows(weights)
    for repeat in range(REPEATS):
        for name in turns if repeat % 2 else reversed(turns):
            core.follow_shadow(turns[name], float(repeat))
            times.setdefault(name, []).append(KINDS[kind](core, 1 + repeat))
    off = median(times["off"])
    share, every = (
        median(b - a for a, b in zip(times["off"], times[name], strict=True))
        for name in ("share", "all")
    )
    return f"{off:7.2f} {share:+7.2f} ({share / off:+.1%}) {every:+8.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, action="append")
    for workers in parser.parse_args().workers or [16, 256]:
        core = core_of(workers, ring=True, stopwatch=perf_counter)
        gc.collect()
        gc.freeze()
        print(f"{workers} workers, µs of CPU a selection: without, scoring {SHARE:g}, scoring all")
        for kind in KINDS:
            for name, weights in WEIGHTS.items():
                print(f"  {kind:20} {name:18} {measure(core, kind, weights)}", flush=True)


if __name__ == "__main__":
    main()
