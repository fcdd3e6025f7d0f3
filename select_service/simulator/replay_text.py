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


def as_text(told: ReplayResult) -> str:
    """Return the text."""
    lines = [
        f"{counted(len(told.files), 'file')} of select-service {', '.join(told.service) or '?'}, "
        f"{told.seconds:.1f} s: {told.decisions} decisions",
        f"  placed {told.placed}, pairs {told.pairs}, "
        f"in {told.batches} batches {told.batch_members}, "
        f"below the cache threshold {told.cache_thresholds}",
    ]
    for name, counts in (("refused", told.refused), ("life", told.life), ("events", told.events)):
        if counts:
            shown = ", ".join(f"{what} {count}" for what, count in sorted(counts.items()))
            lines.append(f"  {name}: {shown}")
    lines += (f"  missing: {missing(gap)}" for gap in told.missing)
    share = told.reproduced / told.decisions if told.decisions else 1.0
    lines.append(f"reproduced {told.reproduced} of {told.decisions} ({percent(share)})")
    if told.first_difference is not None:
        lines += ["the first that is another one now:", *_difference(told.first_difference)]
    if told.what_if is not None:
        lines += _what_if(told.what_if)
    return "\n".join(lines) + "\n"


def _what_if(told: WhatIf) -> list[str]:
    lines = [
        "",
        f"what if {weights_in_words(told)}, every decision under the loads and caches it met:",
        f"  agreement {percent(told.agreement)}: {told.changed} of {told.decisions} go elsewhere",
        f"  tokens to prefill {told.prefill_tokens_recorded} -> {told.prefill_tokens}, "
        f"cached {told.cached_tokens_recorded} -> {told.cached_tokens}",
    ]
    if told.spread_recorded is not None and told.spread is not None:
        lines.append(f"  spread {_spread(told.spread_recorded)} -> {_spread(told.spread)}")
    if told.in_session:
        lines.append(f"  {told.in_session} of them stay with their session, as they did")
    if told.batch_members:
        lines.append(
            f"  of {told.batch_members} in batches {told.batch_members_moved} go elsewhere"
        )
    for one in told.examples:
        lines += _difference(one)
    return lines


def weights_in_words(told: WhatIf) -> str:
    """Return the weights that were tried."""
    return ", ".join(f"{name}={value}" for name, value in told.weights.items())


def counted(count: int, what: str) -> str:
    """Return a number of things in words."""
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
        f"    recorded {in_words(one.recorded)}",
        f"    now      {in_words(one.replayed)}",
    ]


def in_words(place: ReplayPlace) -> str:
    """Return the outcome of a request in one line: where it goes, its cost, or the refusal."""
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


def percent(share: float) -> str:
    """Format a share; 100 % is reserved for all."""
    text = f"{share:.2%}"
    return "99.99%" if text == "100.00%" and share < 1.0 else text
