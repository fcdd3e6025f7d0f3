"""What was asked of `first-token`, and whether it is so: a table of Markdown.

Against `kv-cost` on the same requests. Worse means beyond the 95 % interval of the paired
difference. The bound is one cache common to all workers, which no router can be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from select_service.simulator.comparison import METRICS, changes, estimates

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from select_service.simulator.capacity import CapacityFound
    from select_service.simulator.core.measures import Measures
    from select_service.simulator.settings import SimulationSettings

__all__ = ["Played", "targets_of"]

OURS: Final = "first-token"
BASE: Final = "kv-cost"
BOUND: Final = "bound"
BASELINES: Final = ("lmetric", "llm-d")
BUSY: Final = 0.8
"""Share of capacity from which on first tokens are to be sooner by `SOONER`."""
SOONER: Final = 0.85
NEAR: Final = 1.10
"""Of the bound's p90, where that is not `SOONER` itself."""
MORE: Final = 1.2
"""SLO capacity against the base's."""
HITS: Final = 0.95
"""Share of the ceiling where caches are ample and the fleet is not full."""
AMPLE_TOKENS: Final = 1_000_000


class Played(NamedTuple):
    """One scene at one load, by all policies."""

    scene: str
    load: float
    settings: SimulationSettings
    runs: Mapping[str, Sequence[Measures]]
    searches: Sequence[CapacityFound]  # of the scene, at whatever load


class Cell(NamedTuple):
    """A number, and whether it is as asked."""

    text: str
    is_met: bool


def _p90(one: Played) -> Cell | None:
    """TTFT p90 as a share of the base's, and what is asked of it."""
    means = {name: estimates(runs)["ttft_p90"].mean for name, runs in one.runs.items()}
    share = means[OURS] / means[BASE]
    if one.load < BUSY or BOUND not in means:
        return Cell(f"{share:.2f}", not _is_later(one, "ttft_p90"))
    if means[BOUND] / means[BASE] <= SOONER:
        return Cell(f"{share:.2f}", share <= SOONER)
    of_bound = means[OURS] / means[BOUND]
    return Cell(f"{share:.2f} ({of_bound:.2f} of the bound)", of_bound <= NEAR)


def _beside(baseline: str) -> Callable[[Played], Cell | None]:
    """The same of another policy, of which nothing is asked."""

    def cell(one: Played) -> Cell | None:
        if baseline not in one.runs:
            return None
        before, other = (estimates(one.runs[name])["ttft_p90"].mean for name in (BASE, baseline))
        return Cell(f"{other / before:.2f}", is_met=True)

    return cell


def _is_later(one: Played, name: str) -> bool:
    change = changes(one.runs[BASE], one.runs[OURS])[name]
    return change.mean - (change.half or 0.0) > 0.0


def _time(name: str) -> Callable[[Played], Cell]:
    def cell(one: Played) -> Cell:
        before, after = (estimates(one.runs[policy])[name].mean for policy in (BASE, OURS))
        return Cell(f"{after / before:.2f}", not _is_later(one, name))

    return cell


def _good(one: Played) -> Cell:
    change = changes(one.runs[BASE], one.runs[OURS])["good"]
    return Cell(f"{100 * change.mean:+.0f}", change.mean + (change.half or 0.0) >= 0.0)


def _hits(one: Played) -> Cell | None:
    if one.load > BUSY or one.settings.engine.build().kv_tokens < AMPLE_TOKENS:
        return None
    share = estimates(one.runs[OURS])["hit_share"].mean
    return Cell(f"{100 * share:.0f}", share >= HITS)


def _carried(one: Played) -> Cell | None:
    """Share of the base's SLO capacity; a scene has one, shown at its first load."""
    means = _slo_capacities(one)
    if not means.get(BASE) or OURS not in means:
        return None
    share = means[OURS] / means[BASE]
    return Cell(f"{share:.2f}", share >= MORE)


def _ahead(baseline: str) -> Callable[[Played], Cell | None]:
    def cell(one: Played) -> Cell | None:
        means = _slo_capacities(one)
        if not means.get(baseline) or OURS not in means:
            return None
        share = means[OURS] / means[baseline]
        return Cell(f"{share:.2f}", share > 1.0)

    return cell


def _slo_capacities(one: Played) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for search in one.searches:
        found.setdefault(search.policy, []).append(search.found)
    return {name: sum(values) / len(values) for name, values in found.items()}


_BY_LOAD: Final[dict[str, Callable[[Played], Cell | None]]] = {
    f"TTFT p90 / `{BASE}`'s: not worse; from {BUSY:g} on ≤ {SOONER:g}, or where the bound is not, "
    f"≤ {NEAR:.2f} of the bound": _p90,
    **{f"the same of `{name}`": _beside(name) for name in (*BASELINES, BOUND)},
    f"{METRICS['e2e_mean'][0].partition(',')[0]} / `{BASE}`'s: not worse": _time("e2e_mean"),
    f"{METRICS['itl_p90'][0].partition(',')[0]} / `{BASE}`'s: not worse": _time("itl_p90"),
    f"requests in time, points more than `{BASE}`: not fewer": _good,
    f"hits, % of the ceiling: ≥ {100 * HITS:g} up to {BUSY:g}, caches ample": _hits,
}
_BY_SCENE: Final[dict[str, Callable[[Played], Cell | None]]] = {
    f"SLO capacity / `{BASE}`'s: ≥ {MORE:g}": _carried,
    **{f"SLO capacity / `{baseline}`'s: > 1": _ahead(baseline) for baseline in BASELINES},
}


def targets_of(played: Sequence[Played]) -> str:
    """Return the table: a row per scene, a column per target, in a cell numbers by load.

    What is missed is in bold; a target that is shown nowhere has no column. Empty where either
    policy was not played.
    """
    scenes: dict[str, list[Played]] = {}
    for one in played:
        if {OURS, BASE} <= set(one.runs):
            scenes.setdefault(one.scene, []).append(one)
    if not scenes:
        return ""
    columns = {
        label: [" / ".join(map(_cell, map(read, group))) for group in scenes.values()]
        for label, read in _BY_LOAD.items()
    }
    for label, read in _BY_SCENE.items():
        columns[label] = [_cell(read(group[0])) for group in scenes.values()]
    shown = {label: cells for label, cells in columns.items() if any(map(_is_filled, cells))}
    head = f"| what is asked; **missed** | {' | '.join(shown)} |"
    rows = [
        f"| {scene} | {' | '.join(cells)} |"
        for scene, *cells in zip(scenes, *shown.values(), strict=True)
    ]
    return "\n".join([head, f"|{'---|' * (len(shown) + 1)}", *rows]) + "\n"


def _is_filled(cell: str) -> bool:
    return cell.strip("-/ ") != ""


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    return cell.text if cell.is_met else f"**{cell.text}**"
