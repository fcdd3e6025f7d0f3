"""The results of a replay as terminal text; the HTML page uses its wording of places."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from select_service.simulator.replay_findings import (
        RecordingGap,
        ReplayDifference,
        ReplayPlace,
        ReplayResult,
        Spread,
        WhatIf,
    )


def as_text(result: ReplayResult) -> str:
    """Return the text."""
    lines = [
        f"{counted(len(result.files), 'file')} of select-service "
        f"{', '.join(result.service) or '?'}, "
        f"{result.seconds:.1f} s: {result.decisions} decisions",
        f"  placed {result.placed}, pairs {result.pairs}, "
        f"in {result.batches} batches {result.batch_members}, "
        f"below the cache threshold {result.cache_thresholds}",
    ]
    for name, counts in (
        ("refused", result.refused),
        ("life", result.life),
        ("events", result.events),
    ):
        if counts:
            shown = ", ".join(f"{what} {count}" for what, count in sorted(counts.items()))
            lines.append(f"  {name}: {shown}")
    lines += (f"  missing: {missing(gap)}" for gap in result.missing)
    share = result.reproduced / result.decisions if result.decisions else 1.0
    lines.append(f"reproduced {result.reproduced} of {result.decisions} ({percent(share)})")
    if result.first_difference is not None:
        lines += ["the first that is another one now:", *_difference(result.first_difference)]
    if result.what_if is not None:
        lines += _what_if(result.what_if)
    return "\n".join(lines) + "\n"


def _what_if(what_if: WhatIf) -> list[str]:
    lines = [
        "",
        f"what if {weights_text(what_if)}, every decision under the loads and caches it met:",
        f"  agreement {percent(what_if.agreement)}: {what_if.changed} of {what_if.decisions} "
        "go elsewhere",
        f"  tokens to prefill {what_if.prefill_tokens_recorded} -> {what_if.prefill_tokens}, "
        f"cached {what_if.cached_tokens_recorded} -> {what_if.cached_tokens}",
    ]
    if what_if.spread_recorded is not None and what_if.spread is not None:
        lines.append(f"  spread {_spread(what_if.spread_recorded)} -> {_spread(what_if.spread)}")
    if what_if.in_session:
        lines.append(f"  {what_if.in_session} of them stay with their session, as they did")
    if what_if.batch_members:
        lines.append(
            f"  of {what_if.batch_members} in batches {what_if.batch_members_moved} go elsewhere"
        )
    for one in what_if.examples:
        lines += _difference(one)
    return lines


def weights_text(what_if: WhatIf) -> str:
    """Return the weights that were tried."""
    return ", ".join(f"{name}={value}" for name, value in what_if.weights.items())


def counted(count: int, what: str) -> str:
    """Return a number of things as text."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


_REASONS: Final = {
    "queue": "the queue of the recording was full",
    "disk": "the disk was full, or could not be written to",
    "fault": "by a fault of the service",
    "workers": "workers came or went while a batch was planned",
}


def missing(gap: RecordingGap) -> str:
    """Return what is missing, from which file and why."""
    if gap.files is not None:
        return f"{counted(gap.files, 'file')} before {gap.file}"
    what = "the end" if gap.notes is None else counted(gap.notes, "note")
    return f"{what} of {gap.file} ({_REASONS.get(gap.why, gap.why)})"


def _spread(one: Spread) -> str:
    return (
        f"requests CoV {one.requests_cov:.3f} max/mean {one.requests_max_over_mean:.2f}, "
        f"tokens CoV {one.prefill_tokens_cov:.3f} max/mean {one.prefill_tokens_max_over_mean:.2f}"
    )


def _difference(one: ReplayDifference) -> list[str]:
    name = " ".join(filter(None, (one.reservation_id, one.selection_id)))
    member = "" if one.batch_member is None else f" member {one.batch_member} of a batch,"
    return [
        f"  decision {one.decision} {name} after {one.at_s:.3f} s,{member} {one.model_name} "
        f"{one.tenant_id}, {one.isl_tokens} tokens, {one.candidates} candidates",
        f"    recorded {place_text(one.recorded)}",
        f"    now      {place_text(one.replayed)}",
    ]


def place_text(place: ReplayPlace) -> str:
    """Return the outcome of a request in one line: where it goes, its cost, or the refusal."""
    facts = {
        name: value
        for name in place.__struct_fields__
        if name != "outcome" and (value := getattr(place, name)) is not None
    }
    terms = ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in facts.items()
    )
    return f"{place.outcome} {terms}".rstrip()


def percent(share: float) -> str:
    """Format a share; 100 % is reserved for all."""
    text = f"{share:.2%}"
    return "99.99%" if text == "100.00%" and share < 1.0 else text
