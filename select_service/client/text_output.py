"""Answers as text for a terminal; control characters in names are escaped.

`cli.py` prints them.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any, Final

from msgspec import UNSET

from select_service.types.common_fields import WEIGHT_SETTINGS, weight_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rich.table import Table

    from select_service.types import ScopeLoads, WorkerRecord

_LOADS: Final = ("model", "tenant", "worker", "rank", "requests", "prefill", "blocks")
_WORKERS: Final = ("worker", "model", "tenant", "state", "endpoint", "ranks", "role", "lacks")
_DECISIONS: Final = (
    "decision",
    "route",
    "outcome",
    "worker",
    "rank",
    "tokens",
    "cost",
    "margin",
)
_LOADS_LEGEND: Final = {
    "rank": "data-parallel rank of the worker",
    "requests": "reservations that are live on the rank",
    "prefill": "tokens: prompts of these requests that are not computed yet, without cached parts",
    "blocks": "KV blocks that these requests hold; one that several of them share counts once",
    "waiting": "in place of a worker: requests that wait for a rank, and their prompts' tokens",
}
_WORKERS_LEGEND: Final = {
    "state": "schedulable: gets requests; draining: gets no new ones; else LACKS says why not",
    "ranks": "how many data-parallel ranks it has: each has a KV cache and a load of its own",
    "role": "prefill, decode or aggregated, where workers are divided so; else -",
    "lacks": "why the worker gets no requests; - if it does",
}
_DECISIONS_LEGEND: Final = {
    "rank": "data-parallel rank of the chosen worker",
    "tokens": "length of the prompt",
    "cost": "KV blocks: what the chosen rank costs",
    "margin": "KV blocks: how much cheaper it is than the next best rank",
}
_PICKED_BY: Final = {
    "lowest": "has the lowest cost",
    "tie": "was drawn",
    "softmax": "was drawn by temperature",
    "only": "was the only candidate",
}
_COLUMNS: Final = {
    "cost": "blocks: what the rank would have cost; the cheapest is chosen",
    "prefill": "blocks queued on the rank, plus this whole prompt, before CREDIT",
    "credit": "blocks of this prompt that the rank need not compute",
    "pull": "blocks: what it costs to pull some from another rank",
    "delay": "blocks: what the wait of requests behind this one costs",
    "eviction": "blocks: what it costs that this prompt evicts cached ones",
    "interference": "blocks: what it costs requests that decode on the rank",
    "decode": "blocks that the rank's requests hold, with this one",
    "context": "blocks that its requests read, plus a part for each request",
    "requests": "live requests on the rank",
    "slowness": "factor: above 1 if the rank takes many times as long as others",
    "taint": "factor: the taints that the request prefers",
    "cached": "tokens of this prompt that count as cached",
    "trust": "0 to 1: how far its KV events are believed; is in CREDIT",
    "left out": "why the rank could not be chosen",
}
"""What the columns of a decision mean, with their units."""

_PREFILL_TERMS: Final = ("pull", "delay", "eviction", "interference")
_FACTORS: Final = ("slowness", "taint")
_WEIGHTED: Final = {
    "context": "context_load_scale",
    "requests": "decode_active_request_weight",
}
_WIDTH: Final = 100


def workers(found: Sequence[WorkerRecord]) -> str:
    """The catalog."""
    return _with_legend(_columns(_WORKERS, map(_worker, found)), _WORKERS_LEGEND)


def _worker(one: WorkerRecord) -> tuple[object, ...]:
    lacks = one.not_schedulable_reasons
    return (
        one.worker_id,
        one.model_name,
        one.tenant_id,
        one.lifecycle,
        one.endpoint or "-",
        one.data_parallel_size or 1,
        "-" if one.role is UNSET else one.role,
        "-" if lacks is UNSET else "; ".join(lacks),
    )


def loads(scopes: Sequence[ScopeLoads]) -> str:
    """The load of every rank."""
    return _with_legend(_columns(_LOADS, _load_rows(scopes)), _LOADS_LEGEND)


def table(scopes: Sequence[ScopeLoads]) -> Table:
    """The same, for rich."""
    from rich.table import Table  # an optional extra, only for --watch

    shown = Table(*_LOADS, caption="\n".join(_meanings(_LOADS_LEGEND)), caption_justify="left")
    for row in _load_rows(scopes):
        shown.add_row(*map(_text, row))
    return shown


def _load_rows(scopes: Sequence[ScopeLoads]) -> Iterable[tuple[object, ...]]:
    for scope in scopes:
        for row in sorted(scope.loads, key=lambda one: (one.worker_id, one.dp_rank)):
            yield (
                scope.model_name,
                scope.tenant_id,
                row.worker_id,
                row.dp_rank,
                row.active_requests,
                row.potential_prefill_tokens,
                row.potential_decode_blocks,
            )
        if scope.pending_count:
            names = scope.model_name, scope.tenant_id
            yield (*names, "waiting", "-", scope.pending_count, scope.pending_isl_tokens, "-")


def decisions(found: Sequence[dict[str, Any]]) -> str:
    """The last decisions, newest first."""
    rows = []
    for one in found:
        chosen = one.get("chosen") or {}
        prompt = one.get("prompt") or {}
        rows.append(
            (
                one["decision_id"],
                one["route"],
                one["outcome"],
                chosen.get("worker_id", "-"),
                chosen.get("dp_rank", "-"),
                prompt.get("isl_tokens", "-"),
                _number(chosen.get("cost")),
                _number(chosen.get("margin")),
            )
        )
    table = _with_legend(_columns(_DECISIONS, rows), _DECISIONS_LEGEND)
    return f"{table}\n`select-service explain ID` shows how a cost adds up."


def decision(one: dict[str, Any]) -> str:
    """One decision with every candidate rank, the cheapest first, and every term of each.

    Costs are in blocks, as in the answer. Terms that add nothing to any cost are left out.
    """
    ranks = sorted(one.get("candidates") or [], key=_price)
    weights = one.get("weights") or {}
    columns = [name for name in _COLUMNS if _is_shown(name, ranks, weights)]
    rows = [
        (rank["worker_id"], rank["dp_rank"], *(_cell(name, rank) for name in columns))
        for rank in ranks
    ]
    head = f"{_text(one['decision_id'])}: {one['outcome']} on {one['route']}{_how(one)}"
    in_force = [
        (f"{_text(name)} {_text(value)}", weight_text(name) if name in WEIGHT_SETTINGS else "")
        for name, value in weights.items()
        if value
    ]
    zero = ", ".join(_text(name) for name, value in weights.items() if not value)
    return "\n".join(
        (
            head,
            _columns(("worker", "rank", *columns), rows),
            "",
            f"COST = {_formula(columns)}, in KV blocks",
            *_meanings({name: _COLUMNS[name] for name in columns[1:]}),
            "",
            "weights that are in force:",
            *_explained(in_force),
            *(_wrapped("weights that are 0 or off here: ", zero) if zero else ()),
        )
    )


def legend() -> str:
    """What the columns of a decision mean, a line each."""
    return "\n".join(("columns:", *_meanings(_COLUMNS)))


def _is_shown(name: str, ranks: Sequence[dict[str, Any]], weights: dict[str, Any]) -> bool:
    if name in _WEIGHTED:
        return bool(weights.get(_WEIGHTED[name]))
    if name in _PREFILL_TERMS:
        return any(rank.get(f"{name}_cost") for rank in ranks)
    if name == "slowness":
        return any(rank.get(name) not in {None, 1.0} for rank in ranks)
    if name in {"taint", "left out"}:
        return any(_cell(name, rank) != "-" for rank in ranks)
    return True


def _cell(name: str, rank: dict[str, Any]) -> object:
    match name:
        case "cached":
            return rank.get("cached_tokens", "-")
        case "left out":
            return rank.get("excluded") or "-"
        case "taint":
            return _number(rank.get("taint_factor"))
        case _:
            return _number(rank.get(f"{name}_cost", rank.get(name)))


def _formula(columns: Sequence[str]) -> str:
    """How a cost adds up out of the columns that are shown."""
    shown = [name for name in _PREFILL_TERMS if name in columns]
    terms = [
        f"prefill_load_scale * ({' + '.join(['PREFILL - CREDIT', *map(str.upper, shown)])})",
        "decode_load_scale * DECODE",
        *(f"{scale} * {name.upper()}" for name, scale in _WEIGHTED.items() if name in columns),
    ]
    total = " + ".join(terms)
    factors = [name.upper() for name in _FACTORS if name in columns]
    return " * ".join((f"({total})", *factors)) if factors else total


def _with_legend(rows: str, texts: Mapping[str, str]) -> str:
    return "\n".join((rows, "", *_meanings(texts)))


def _meanings(texts: Mapping[str, str]) -> list[str]:
    """A line for each column: what it means, and its unit."""
    return _explained([(name.upper(), text) for name, text in texts.items()])


def _explained(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """One line for each name, or more where its text is long."""
    width = max((len(name) for name, _ in pairs), default=0)
    return [line for name, text in pairs for line in _wrapped(f"  {name.ljust(width)}  ", text)]


def _wrapped(start: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_on_hyphens=False,  # a flag is copied from it
    )


def _how(one: dict[str, Any]) -> str:
    """Tell why this rank was chosen, or why none was."""
    chosen, refusal = one.get("chosen") or {}, one.get("refusal") or {}
    if not chosen:
        return f" ({_text(refusal.get('error', refusal.get('code')))})" if refusal else ""
    how = _PICKED_BY.get(chosen["picked_by"], chosen["picked_by"])
    text = f"; worker {chosen['worker_id']} rank {chosen['dp_rank']} {how}"
    if (chosen.get("ties") or 1) > 1:
        text += f" among {chosen['ties']} of equal cost"
    if margin := chosen.get("margin"):
        side = "dearer" if margin < 0 else "cheaper"
        text += f", {_number(abs(margin))} blocks {side} than the next best"
    return text


def _price(rank: dict[str, Any]) -> tuple[bool, float]:
    cost = rank.get("cost")
    return cost is None, 0.0 if cost is None else cost


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _columns(names: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [[name.upper() for name in names], *([*map(_text, row)] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = (
        "  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True))
        for line in lines
    )
    trimmed = [line.rstrip() for line in padded]
    return "\n".join(trimmed if len(trimmed) > 1 else [*trimmed, "(none)"])


def _text(value: object) -> str:
    text = str(value)
    return text if text.isprintable() else text.encode("unicode_escape").decode()
