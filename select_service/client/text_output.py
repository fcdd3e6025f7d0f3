"""Answers as text for a terminal; control characters in names are escaped.

`cli.py` prints them.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any, Final

from msgspec import UNSET

from select_service.types.common_fields import WEIGHT_SETTINGS, weight_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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
_MARGIN: Final = (
    "COST and MARGIN (what the next best rank would have cost more) are in KV blocks.\n"
    "`select-service explain ID` shows how a cost adds up."
)
_PICKED_BY: Final = {
    "lowest": "has the lowest cost",
    "tie": "was drawn",
    "softmax": "was drawn by temperature",
    "only": "was the only candidate",
}
_COLUMNS: Final = {
    "cost": "what the rank would have cost; the cheapest is chosen",
    "prefill": "prompt tokens that it has to compute, with all of this prompt's",
    "credit": "the part of this prompt that it has cached or is booked with",
    "pull": "to pull blocks of this prompt from another rank",
    "delay": "the wait of requests behind this one",
    "eviction": "cached blocks that this prompt evicts",
    "interference": "this prompt's prefill, for requests that the rank decodes",
    "decode": "blocks that it holds for requests, with this one's",
    "context": "blocks that its requests attend to, and a part for each request",
    "requests": "its live requests",
    "taint": "factor of the taints that the request prefers",
    "cached": "tokens of the prompt that count as cached",
    "trust": "how far its KV events are believed (0 to 1): a factor of CREDIT",
    "left out": "why it could not be chosen",
}
"""What the columns of a decision mean; costs and their terms are in KV blocks."""

_PREFILL_TERMS: Final = ("pull", "delay", "eviction", "interference")
_WEIGHTED: Final = {
    "context": "context_load_scale",
    "requests": "decode_active_request_weight",
}
_WIDTH: Final = 100


def workers(found: Sequence[WorkerRecord]) -> str:
    """The catalog."""
    return _columns(_WORKERS, map(_worker, found))


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
    return _columns(_LOADS, _load_rows(scopes))


def table(scopes: Sequence[ScopeLoads]) -> Table:
    """The same, for rich."""
    from rich.table import Table  # an optional extra, only for --watch

    shown = Table(*_LOADS)
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
    return f"{_columns(_DECISIONS, rows)}\n\n{_MARGIN}"


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
    off = ", ".join(_text(name) for name, value in weights.items() if not value)
    return "\n".join(
        (
            head,
            _columns(("worker", "rank", *columns), rows),
            "",
            f"COST = {_formula(columns)}, in KV blocks",
            *_explained([(name.upper(), _COLUMNS[name]) for name in columns[1:]]),
            "",
            "weights:",
            *_explained(in_force),
            *_wrapped("  off: ", off),
        )
    )


def legend() -> str:
    """What the columns of a decision mean, a line each."""
    return "\n".join(
        ("columns:", *_explained([(name.upper(), text) for name, text in _COLUMNS.items()]))
    )


def _is_shown(name: str, ranks: Sequence[dict[str, Any]], weights: dict[str, Any]) -> bool:
    if name in _WEIGHTED:
        return bool(weights.get(_WEIGHTED[name]))
    if name in _PREFILL_TERMS:
        return any(rank.get(f"{name}_cost") for rank in ranks)
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
    return f"({total}) * TAINT" if "taint" in columns else total


def _explained(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """One line for each name, or more where its text is long."""
    width = max((len(name) for name, _ in pairs), default=0)
    return [line for name, text in pairs for line in _wrapped(f"  {name.ljust(width)}  ", text)]


def _wrapped(start: str, text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=start, subsequent_indent=" " * len(start))


def _how(one: dict[str, Any]) -> str:
    """Tell why this rank was chosen, or why none was."""
    chosen, refusal = one.get("chosen") or {}, one.get("refusal") or {}
    if not chosen:
        return f" ({_text(refusal.get('error', refusal.get('code')))})" if refusal else ""
    how = _PICKED_BY.get(chosen["picked_by"], chosen["picked_by"])
    told = f"; worker {chosen['worker_id']} rank {chosen['dp_rank']} {how}"
    if (chosen.get("ties") or 1) > 1:
        told += f" among {chosen['ties']} of equal cost"
    if margin := chosen.get("margin"):
        side = "dearer" if margin < 0 else "cheaper"
        told += f", {_number(abs(margin))} blocks {side} than the next best"
    return told


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
    told = [line.rstrip() for line in padded]
    return "\n".join(told if len(told) > 1 else [*told, "(none)"])


def _text(value: object) -> str:
    text = str(value)
    return text if text.isprintable() else text.encode("unicode_escape").decode()
