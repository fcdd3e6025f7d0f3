"""`select-sim replay`: a recording made again, and what other weights would have done with it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from select_service.simulator.options import pairs_of, weights_with
from select_service.simulator.recordings import files_of
from select_service.simulator.replaying import replay
from select_service.simulator.results import expect_writable
from select_service.simulator.run_command import write_json
from select_service.types import RouterConfig

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from select_service.simulator.replaying import Difference, Place, Replay, Spread, WhatIf

__all__ = ["DIVERGED", "configure", "execute"]

DIVERGED: Final = 3
"""Exit code: a decision is another one now."""

_NO_WEIGHTS: Final = frozenset(
    {"use_kv_events", "queue_threshold", "overtaking_s", "overtaking_share"}
)


def configure(parser: ArgumentParser) -> None:
    """Give the command its options."""
    parser.add_argument(
        "file",
        metavar="FILE",
        help="as given to --record; what was put aside of "
        "it comes first. FILE.000001 alone is a recording, too",
    )
    parser.add_argument(
        "--weights",
        default="",
        metavar="NAME=VALUE,...",
        help="what if these were in force, e.g. overlap_score_credit=0.5,temperature=0; what a "
        "request has asked for itself stays",
    )
    parser.add_argument("--model-name", metavar="NAME", help="of this model only")
    parser.add_argument("--tenant-id", metavar="NAME", help="of this tenant only")
    parser.add_argument(
        "--examples", type=int, default=10, metavar="N", help="changed decisions told (10)"
    )
    parser.add_argument("--json", action="store_true", help="the result as JSON")
    parser.add_argument("--out", metavar="FILE", help="the result as JSON, too")
    parser.set_defaults(execute=execute)


def execute(args: Namespace) -> int:
    """Carry it out; returns the exit code.

    Raises:
        BadRecording: the recording cannot be read.
        ValueError, OSError: it cannot be carried out.
        NotWritten: its results cannot be kept.
    """
    changes = _changes(args.weights)
    expect_writable(args.out)
    told = replay(
        files_of(Path(args.file)),
        changes,
        scope=lambda model, tenant: (
            args.model_name in (None, model) and args.tenant_id in (None, tenant)
        ),
        examples=max(0, args.examples),
    )
    if args.json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(told), indent=1) + b"\n")
    else:
        sys.stdout.write(as_text(told))
    if args.out is not None:
        write_json(args.out, told)
    return 0 if told.is_same else DIVERGED


def _changes(text: str) -> dict[str, object]:
    """Return weights by name, as numbers.

    Raises:
        ValueError: there is none of such a name, or it is no such number.
    """
    pairs = pairs_of(text, "--weights")
    for name in _NO_WEIGHTS & pairs.keys():
        raise ValueError(f"--weights: {name} decides nothing that a recording could tell")
    if "kv_transfer_cost_per_block" in pairs:
        raise ValueError("--weights: pairs are priced as recorded: try another transfer cost live")
    config = weights_with(RouterConfig(), pairs)
    return {name: getattr(config, name) for name in pairs}


def as_text(told: Replay) -> str:
    """Return it for people."""
    lines = [
        f"{len(told.files)} file(s) of select-service {', '.join(told.service) or '?'}, "
        f"{told.seconds:.1f} s: {told.decisions} decisions",
        f"  placed {told.placed}, pairs {told.pairs}, in {told.waves} waves {told.wave_members}, "
        f"below the cache threshold {told.cache_thresholds}",
    ]
    for name, counts in (("refused", told.refused), ("life", told.life), ("events", told.events)):
        if counts:
            shown = ", ".join(f"{what} {count}" for what, count in sorted(counts.items()))
            lines.append(f"  {name}: {shown}")
    for gap in told.missing:
        what = "the end" if gap.notes is None else f"{gap.notes} notes"
        lines.append(f"  missing: {what} of {gap.file} ({gap.why})")
    share = told.reproduced / told.decisions if told.decisions else 1.0
    lines.append(f"reproduced {told.reproduced} of {told.decisions} ({_percent(share)})")
    if told.first_difference is not None:
        lines += ["the first that is another one now:", *_difference(told.first_difference)]
    if told.what_if is not None:
        lines += _what_if(told.what_if)
    return "\n".join(lines) + "\n"


def _what_if(told: WhatIf) -> list[str]:
    shown = ", ".join(f"{name}={value}" for name, value in told.weights.items())
    lines = [
        "",
        f"what if {shown}, every decision under the loads and caches it met:",
        f"  agreement {_percent(told.agreement)}: {told.changed} of {told.decisions} go elsewhere",
        f"  tokens to prefill {told.prefill_tokens_recorded} -> {told.prefill_tokens}, "
        f"cached {told.cached_tokens_recorded} -> {told.cached_tokens}",
    ]
    if told.spread_recorded is not None and told.spread is not None:
        lines.append(f"  spread {_spread(told.spread_recorded)} -> {_spread(told.spread)}")
    if told.in_session:
        lines.append(f"  {told.in_session} of them stay with their session, as they did")
    if told.wave_members:
        lines.append(f"  of {told.wave_members} in waves {told.wave_members_moved} go elsewhere")
    for one in told.examples:
        lines += _difference(one)
    return lines


def _spread(one: Spread) -> str:
    return (
        f"requests CoV {one.requests_cov:.3f} max/mean {one.requests_max_over_mean:.2f}, "
        f"tokens CoV {one.prefill_tokens_cov:.3f} max/mean {one.prefill_tokens_max_over_mean:.2f}"
    )


def _difference(one: Difference) -> list[str]:
    name = " ".join(filter(None, (one.reservation_id, one.selection_id)))
    member = "" if one.wave_member is None else f" member {one.wave_member} of a wave,"
    return [
        f"  decision {one.decision} {name} after {one.at_s:.3f} s,{member} {one.model_name} "
        f"{one.tenant_id}, {one.isl_tokens} tokens, {one.candidates} candidates",
        f"    recorded {_shown(one.recorded)}",
        f"    now      {_shown(one.replayed)}",
    ]


def _shown(place: Place) -> str:
    facts = {
        name: value
        for name in place.__struct_fields__
        if name != "outcome" and (value := getattr(place, name)) is not None
    }
    told = ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in facts.items()
    )
    return f"{place.outcome} {told}".rstrip()


def _percent(share: float) -> str:
    """Say 100 % of all only."""
    text = f"{share:.2%}"
    return "99.99%" if text == "100.00%" and share < 1.0 else text
