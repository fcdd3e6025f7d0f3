"""A profile for people: the measurements, our curves, and the differences."""

from __future__ import annotations

import json
from dataclasses import asdict
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from select_service.planner.core.surface import Surface, surface_of
from select_service.simulator.page import figure, folded, page, table
from select_service.simulator.plots import Series, lines

if TYPE_CHECKING:
    from select_service.planner.core.profile import Profile

_POINTS = 80


def measured(profile: Profile) -> list[str]:
    """Return the amount and range of the measurements, as text."""
    prefill, decode = profile.prefill, profile.decode
    return [
        f"prefill: {len(prefill.isl)} lengths, {prefill.isl[0]:,.0f} to "
        f"{prefill.isl[-1]:,.0f} tokens, "
        f"TTFT {prefill.ttft_ms.min():.4g} to {prefill.ttft_ms.max():.4g} ms",
        f"decode: {len(decode.kv_usage)} samples, contexts of "
        f"{decode.context_length.min():,.0f} to {decode.context_length.max():,.0f} tokens, "
        f"{decode.max_kv_tokens:,.0f} KV tokens, "
        f"ITL {decode.itl_ms.min():.4g} to {decode.itl_ms.max():.4g} ms",
    ]


def findings(profile: Profile) -> list[str]:
    """Return the repairs made, as text."""
    repairs = []
    falls = np.flatnonzero(np.diff(profile.prefill.ttft_ms) < 0)
    repairs += [
        f"TTFT falls from {profile.prefill.isl[at]:g} to {profile.prefill.isl[at + 1]:g} tokens"
        for at in falls
    ]
    decode = profile.decode
    for context in sorted(set(decode.context_length.tolist())):
        rows = np.flatnonzero(decode.context_length == context)
        rows = rows[np.argsort(decode.kv_usage[rows])]
        for name, values in (("ITL", decode.itl_ms), ("throughput", decode.thpt_per_gpu)):
            if np.any(np.diff(values[rows]) < 0):
                repairs.append(f"{name} falls with KV use at a context of {context:g} tokens")
    return repairs


def html(profile: Profile, name: str, command_line: str = "") -> str:
    """Return one HTML document with a plot per curve."""
    surface = surface_of(profile)
    prefill, decode = profile.prefill, profile.decode
    lengths = np.linspace(float(prefill.isl[0]), float(prefill.isl[-1]), _POINTS).tolist()
    contexts = sorted(set(decode.context_length.tolist()))
    shown = contexts[:: max(1, len(contexts) // 6)][:7]
    points = list(zip(prefill.isl.tolist(), prefill.ttft_ms.tolist(), strict=True))
    ttft = [
        Series("as planned with", [(isl, surface.prefill.ttft_ms(isl)) for isl in lengths]),
        Series("as measured", points, "dots"),
    ]
    itl = [_itl(surface, decode.max_kv_tokens, context) for context in shown]
    best = [_best(surface, float(decode.itl_ms.max()), context) for context in shown]
    plots = [
        (lines("TTFT of one prompt", ttft, x="prompt, tokens", y="ms"), ttft),
        (lines("ITL by live requests", itl, x="requests on one engine", y="ms"), itl),
        (lines("Most output within an ITL", best, x="ITL, ms", y="tokens/s/GPU"), best),
    ]
    rows = [[one] for one in findings(profile) or ["nothing: it is monotone"]]
    return page(
        f"Engine measurements in {name}",
        [
            *(f"<p>{escape(text)}</p>" for text in measured(profile)),
            table(["repaired"], rows),
            *(figure(plot, [one.name for one in series]) for plot, series in plots),
            folded("Measurements", "As they were read.", _read(profile)),
        ],
        verdict=_verdict(profile),
        command_line=command_line,
    )


def _read(profile: Profile) -> str:
    rows = {
        name: {field: np.asarray(value).tolist() for field, value in asdict(part).items()}
        for name, part in (("prefill", profile.prefill), ("decode", profile.decode))
    }
    return json.dumps(rows)


def _verdict(profile: Profile) -> str:
    repaired = len(findings(profile))
    if not repaired:
        return "The measurements can be planned with as they are: they are monotone."
    return f"{repaired} of the measurements contradict others and were repaired: listed below."


def _itl(surface: Surface, max_kv_tokens: float, context: float) -> Series:
    most = max_kv_tokens / context
    counts = np.linspace(0.0, min(most, 256.0), _POINTS).tolist()
    points = [(count, surface.decode.itl_ms(count, context)) for count in counts]
    return Series(f"context of {context:,.0f} tokens", points)


def _best(surface: Surface, itl_most: float, context: float) -> Series:
    points = []
    for target in np.linspace(1.0, 1.1 * itl_most, _POINTS).tolist():
        best = surface.decode.best(target, context)
        points.append((target, best.thpt_per_gpu if best else 0.0))
    return Series(f"context of {context:,.0f} tokens", points)
