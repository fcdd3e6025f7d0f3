"""Answers as text for a terminal; control characters in names are escaped.

`cli.py` prints them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from msgspec import UNSET

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.table import Table

    from select_service.types import ScopeLoads, WorkerRecord

__all__ = ["decision", "decisions", "loads", "table", "workers"]

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
_TERMS: Final = ("prefill", "credit", "delay", "eviction", "decode", "context")
_PICKED_BY: Final = {
    "lowest": "has the lowest cost",
    "tie": "was drawn",
    "softmax": "was drawn by temperature",
    "only": "was the only candidate",
}
_CANDIDATES: Final = ("worker", "rank", "cost", *_TERMS, "taint", "cached", "trust", "left out")


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
    return _columns(_DECISIONS, rows)


def decision(one: dict[str, Any]) -> str:
    """One decision with every candidate rank, the cheapest first, and every term of each.

    Costs are in blocks, as in the answer; deploy/docs/decisions.md explains how the terms add up.
    """
    rows = [
        (
            rank["worker_id"],
            rank["dp_rank"],
            _number(rank.get("cost")),
            *(_number(rank.get(f"{term}_cost", rank.get(term))) for term in _TERMS),
            _number(rank.get("taint_factor")),
            rank.get("cached_tokens", "-"),
            _number(rank.get("trust")),
            rank.get("excluded") or "-",
        )
        for rank in sorted(one.get("candidates") or [], key=_price)
    ]
    head = f"{_text(one['decision_id'])}: {one['outcome']} on {one['route']}{_how(one)}"
    weights = one.get("weights") or {}
    in_force = ", ".join(f"{name} {_text(value)}" for name, value in weights.items())
    return f"{head}\n{_columns(_CANDIDATES, rows)}\nweights: {in_force or '-'}"


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
    return "\n".join(line.rstrip() for line in padded)


def _text(value: object) -> str:
    text = str(value)
    return text if text.isprintable() else text.encode("unicode_escape").decode()
