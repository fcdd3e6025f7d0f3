"""How fast a model's engines are: as profiled, or as the selectors measured their ranks.

Selectors report sums over what ranks took for first tokens, by the tokens to compute before them,
and between tokens, by the tokens of context. A straight line through each is half of a surface,
like one of a profile. Without a profile both come from there; with one, a half that is measured to
be more than twice as slow or fast is replaced: a smaller deviation is that of `correction.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

import numpy as np

from select_service.core.ledger.rank_speeds import line_through, seconds_at
from select_service.planner.core.correction import FACTOR_MOST
from select_service.planner.core.profile import DecodeProfile, PrefillProfile
from select_service.planner.core.surface import DecodeSurface, PrefillCurve, Surface
from select_service.planner.types import MOMENTS, Missing, Moments, Value

if TYPE_CHECKING:
    from collections.abc import Mapping

    from select_service.planner.types import Reading, Window

SpeedSource: TypeAlias = Literal["auto", "profile", "learnt"]
SPEEDS: Final[tuple[SpeedSource, ...]] = ("auto", "profile", "learnt")
Phase: TypeAlias = Literal["prefill", "decode"]

MEASUREMENTS_LEAST: Final = 64
"""With fewer nothing is planned by them: the first of an engine are those of its warm-up."""
MEMORY_S: Final = 3600.0
"""Time with measurements after which older ones weigh 1/e."""
FULL: Final = 0.7
"""Share of KV tokens in use from which times between tokens say little of lower loads."""
LATE_DOUBT: Final = 0.002
"""Where times between tokens are beyond the target, lower loads are taken to be faster as far as
loads did not differ by more than this; see `rank_speeds.DOUBT`, which counts where that still says
that no load meets the target. That none does was not seen."""
WAITS: Final = 2.0
"""Requests whose tokens took so many times as long as steps of their ranks waited for a place."""
WAITS_LEAST_S: Final = 1.0
"""They waited at least for so long: caches that move to decode workers, and clients that end their
requests late, take less, and no number of engines ends that."""
ROOM_MEASUREMENTS: Final = 8
"""Fewer of an interval say nothing of the room that ranks have."""
BUSY_BASE_S: Final = 0.02
"""An engine is taken to be busy with a prompt, besides its tokens, for no longer than this. What a
line begins with beyond is on the way, where many prompts are at once, and none waits."""
BACK: Final = 1.5
"""A profile is believed again when it is wrong by no more than this."""
FASTEST_TOKENS_PER_S: Final = 1e6
"""No engine computes prompts faster, nor writes tokens."""
_ROUNDING: Final = 1e-6
_LENGTHS: Final = np.array([1.0, 256.0, 4096.0, 65536.0])  # of prompts, on a line
_CONTEXTS: Final = np.array([1.0, 1e7])  # tokens: only their sum over an engine counts
_SHARES: Final = np.geomspace(1e-3, 1.0, 65)  # of KV tokens in use


class Line(NamedTuple):
    """Seconds at so many tokens."""

    base_s: float
    s_per_token: float
    load: float
    """Tokens at which it was measured: the root of the mean square."""

    def at(self, tokens: float) -> float:
        """Return the seconds."""
        return seconds_at(self.base_s, self.s_per_token, tokens)


class LearntLine:
    """A line through measurements, of which older ones fade.

    Args:
        phase: whose: what a load that hardly varied says of others depends on it.

    Attributes:
        sums: of what was measured.
        age_s: how long before the last window that was.
        problem: why there is no line, or nothing new; empty: nothing.
    """

    def __init__(self, phase: Phase) -> None:
        self._phase = phase
        self.sums = Moments()
        self.age_s = 0.0
        self.problem = f"no {phase} has been measured"

    def learn(self, moments: Moments | Missing, seconds: float, passed_s: float) -> None:
        """Add the measurements of a window, `passed_s` after the one before."""
        self.age_s += passed_s
        if isinstance(moments, Missing):
            self.problem = moments.why
            return
        if not moments.samples:
            return
        self.problem = _problem(self._phase, moments)
        if self.problem:
            return
        kept = math.exp(-seconds / MEMORY_S)
        self.sums = Moments._make(
            kept * old + new for old, new in zip(self.sums, moments, strict=True)
        )
        self.age_s = 0.0

    @property
    def line(self) -> Line | None:
        """The line; None: too little was measured."""
        return self.line_below(math.inf)

    def line_below(self, kv_tokens: float, target_s: float = math.inf) -> Line | None:
        """Return the line of engines with so many KV tokens; None: too little was measured.

        Args:
            kv_tokens: a rank has.
            target_s: of times between tokens. Engines that were only measured beyond it may be
                overloaded, or slow: lower loads show which, and until then the first is assumed.
        """
        count, x, y, xx, xy = self.sums
        if count < MEASUREMENTS_LEAST:
            return None
        # engines that are full are level, too: what they take is not the time of a single request
        is_full = math.sqrt(xx / count) > FULL * kv_tokens
        is_level = self._phase == "decode" and not is_full
        base_s, slope = line_through(count, x, y, xx, xy, is_level=is_level)
        if is_level and y > target_s * count:
            base_s, slope = line_through(count, x, y, xx, xy, is_level=False, doubt=LATE_DOUBT)
            if base_s > target_s:
                base_s, slope = line_through(count, x, y, xx, xy, is_level=False)
        fastest = 1.0 / FASTEST_TOKENS_PER_S
        if self._phase == "decode":
            return Line(max(base_s, fastest), slope, math.sqrt(xx / count))
        return Line(base_s, max(slope, fastest), math.sqrt(xx / count))


def _problem(phase: Phase, moments: Moments) -> str:
    """Return what is wrong with the growth of sums, naming it; empty: nothing."""
    for name, number in zip(MOMENTS, moments, strict=True):
        if not math.isfinite(number) or number <= 0.0:
            return f"moment {name} of {phase} is {number:g}, and there are measurements"
    if moments.xx * moments.samples < moments.x * moments.x * (1.0 - _ROUNDING):
        return f"moment tokens_squared of {phase} is {moments.xx:g}: less than tokens allow"
    return ""


class SpeedSettings(NamedTuple):
    """How speeds are learnt."""

    source: SpeedSource = "auto"
    age_most_s: float = 86_400.0
    """Older measurements count no more."""
    load_factor: float = 4.0
    """An engine is taken to bear so many times the context it was measured with, at most."""


@dataclass(slots=True)
class KnownEngines:
    """What is known of engines besides their lines; kept over restarts."""

    kv_tokens: float | None = None
    """Of a rank, as registered; None: not reported."""
    room: float | None = None
    """Tokens that a rank had in its batch while requests waited for a place in it; None: none was
    ever full."""
    room_age_s: float = 0.0
    """How long ago any waited."""
    ranks: dict[Phase, float] = field(default_factory=dict)
    """Of a worker."""
    wrong: dict[Phase, float] = field(default_factory=dict)
    """What profiles that are not believed are wrong by, as last compared."""


class EngineSpeed:
    """The speed that a model is planned with.

    Args:
        profile: None: there is none.
        gpus: of an engine that decodes.
        settings: how it is learnt.

    Attributes:
        surface: to plan with; None: no speed is known.
        learnt: what was measured, by phase.
        by_measurement: phases in which the surface is that of measurements.
        known: what else was learnt of the engines.
    """

    def __init__(
        self,
        profile: Surface | None,
        gpus: int = 1,
        settings: SpeedSettings = SpeedSettings(),  # noqa: B008 - immutable
    ) -> None:
        self._profile = profile if settings.source != "learnt" else None
        self._settings, self._gpus = settings, gpus
        self.surface = self._profile
        self.learnt: dict[Phase, LearntLine] = {
            "prefill": LearntLine("prefill"),
            "decode": LearntLine("decode"),
        }
        self.by_measurement: frozenset[Phase] = frozenset()
        self.known = KnownEngines()
        self._load = 0.0  # tokens that ranks attended to in the last interval
        self._target_s = math.inf  # of times between tokens

    def recall(
        self,
        known: KnownEngines,
        lines: Mapping[Phase, tuple[Moments, float]],
        itl_ms: float = math.inf,
    ) -> None:
        """Continue with what an earlier planner knew, before the first interval ends.

        Args:
            known: of engines.
            lines: sums over measurements, and their age in seconds.
            itl_ms: the target.
        """
        for phase, (sums, age_s) in lines.items():
            self.learnt[phase].sums, self.learnt[phase].age_s = sums, age_s
        self.known, self._target_s = known, itl_ms / 1e3
        if self._settings.source == "profile":
            return
        self.by_measurement = frozenset(known.wrong)  # a profile that was not believed still is not
        self._choose()

    def servers(self, phase: Phase) -> float:
        """Return how many an engine has that are each as fast as the surface says.

        Profiles are of engines, and measurements of ranks, each with a queue and a batch of its
        own.
        """
        return self.known.ranks.get(phase, 1.0) if phase in self.by_measurement else 1.0

    def learn(
        self,
        window: Window,
        computed: float,
        passed_s: float | None = None,
        itl_ms: float = math.inf,
    ) -> list[str]:
        """Take a window's measurements in; returns what they change, as text.

        Args:
            window: what was measured.
            computed: share of prompt tokens not cached on any worker.
            passed_s: since the last window; None: those that it is of. A window covers the time of
                those before it of which nothing was reported.
            itl_ms: the target.
        """
        if self._settings.source == "profile":
            return []
        passed_s = window.seconds if passed_s is None else passed_s
        self.learnt["prefill"].learn(window.prefill_moments, window.seconds, passed_s)
        self.learnt["decode"].learn(window.itl_moments, window.seconds, passed_s)
        self._target_s = itl_ms / 1e3
        self._learn_engines(window, passed_s)
        self.known.wrong |= self._ratios(window, computed)
        problems = self._choose()
        if self._profile is None:
            return [f"{phase}: {why}" for phase, why in problems.items() if why]
        return [
            f"{phase} takes {ratio:.2f} times as long as profiled: it is planned as measured"
            for phase, ratio in self.known.wrong.items()
        ]

    def _learn_engines(self, window: Window, passed_s: float) -> None:
        """Learn what engines are besides fast: how many ranks they have, and how much room."""
        known = self.known
        ranks_by_phase: dict[Phase, Reading] = {
            "prefill": window.prefill_worker_ranks,
            "decode": window.decode_worker_ranks,
        }
        for phase, ranks in ranks_by_phase.items():
            if isinstance(ranks, Value) and 1.0 <= ranks.value < math.inf:
                known.ranks[phase] = ranks.value
        kv_tokens = window.rank_kv_tokens
        if isinstance(kv_tokens, Value) and 0.0 < kv_tokens.value < math.inf:
            known.kv_tokens = kv_tokens.value
        known.room_age_s += passed_s
        if known.room_age_s > self._settings.age_most_s:
            known.room = None
        moments = window.itl_moments
        if (
            isinstance(moments, Missing)
            or moments.samples < ROOM_MEASUREMENTS
            or _problem("decode", moments)
        ):
            return
        before, self._load = self._load, math.sqrt(moments.xx / moments.samples)
        step_s = moments.y / moments.samples
        if self._wait_for_places(window, step_s):
            load = max(before, self._load)  # those that have ended now may have waited then
            # part of an interval may have been quiet; where engines were replaced it goes on
            known.room = max(load, ((known.room or load) + load) / 2)
            known.room_age_s = 0.0
        elif known.room is not None:
            known.room = max(known.room, self._load)

    def _wait_for_places(self, window: Window, step_s: float) -> bool:
        """Whether requests waited for a place in a batch whose steps take so long."""
        itl_ms, osl = window.itl_ms, window.osl
        if not (isinstance(itl_ms, Value) and isinstance(osl, Value)):
            return False
        itl_s = itl_ms.value / 1e3
        waited_s = osl.value * (itl_s - step_s)
        return itl_s > max(self._target_s, WAITS * step_s) and waited_s >= WAITS_LEAST_S

    def _choose(self) -> dict[Phase, str]:
        """Choose between profile and measurements; returns why a phase was not measured."""
        problems = {phase: self._unknown(phase) for phase in self.learnt}
        if self._profile is None:
            self._take(dict.fromkeys(self.learnt, 0.0), problems)
            return problems
        self.known.wrong = {
            phase: ratio
            for phase, ratio in self.known.wrong.items()
            if not problems[phase] and not self._is_believed(phase, ratio)
        }
        self._take(self.known.wrong, dict.fromkeys(self.known.wrong, ""))
        return problems

    def _is_believed(self, phase: Phase, ratio: float) -> bool:
        most = BACK if phase in self.by_measurement else FACTOR_MOST
        return 1.0 / most <= ratio <= most

    def _unknown(self, phase: Phase) -> str:
        """Return why the speed of a phase is not known by measurement; empty: it is."""
        learnt = self.learnt[phase]
        if learnt.line is None:
            why = f": {learnt.problem}" if learnt.problem else ""
            return f"{learnt.sums.samples:.0f} of {MEASUREMENTS_LEAST} measurements{why}"
        most_s = self._settings.age_most_s
        if learnt.age_s > most_s:
            return f"measured {learnt.age_s:.0f} s ago, which counts for {most_s:.0f} s"
        return ""

    def _ratios(self, window: Window, computed: float) -> dict[Phase, float]:
        """Return measured over profiled times, at what was measured; unknown ones are left out."""
        profile, found = self._profile, dict[Phase, float]()
        if profile is None or not isinstance(window.isl, Value):
            return found
        isl, osl = window.isl.value, window.osl
        if isl <= 0.0:
            return found  # of empty prompts alone nothing is profiled
        prefill, decode = (self.learnt[phase].line for phase in ("prefill", "decode"))
        if prefill is not None:
            tokens = isl * computed
            found["prefill"] = 1e3 * prefill.at(tokens) / profile.prefill.ttft_ms(tokens)
        if decode is not None and isinstance(osl, Value):
            context = isl + osl.value / 2
            load = decode.load * self.known.ranks.get("decode", 1.0)  # the profile is of an engine
            profiled = profile.decode.itl_ms(load / context, context)
            found["decode"] = 1e3 * decode.at(decode.load) / profiled
        return found

    def _take(self, measured: dict[Phase, float], problems: dict[Phase, str]) -> None:
        """Set the surface, with these phases as measured."""
        if any(problems.values()):
            self.surface, self.by_measurement = None, frozenset()
            return
        self.by_measurement = frozenset(measured)
        if not measured:
            self.surface = self._profile
            return
        both = self._profile or Surface(self._prefill(), self._decode())
        if "prefill" in measured:
            both = both._replace(prefill=self._prefill())
        if "decode" in measured:
            both = both._replace(decode=self._decode())
        self.surface = both

    def _prefill(self) -> PrefillCurve:
        line = self.learnt["prefill"].line
        assert line is not None, "a phase is planned as measured when it was"
        busy_s = min(line.base_s, BUSY_BASE_S) + line.s_per_token * _LENGTHS
        latency_ms = 1e3 * max(0.0, line.base_s - BUSY_BASE_S)
        profile = PrefillProfile(_LENGTHS, 1e3 * busy_s, _LENGTHS / busy_s)
        return PrefillCurve(profile, latency_ms)

    def _decode(self) -> DecodeSurface:
        """Return the decode half; of an engine that bears no more than was nearly measured."""
        known = self.known
        room = min(known.kv_tokens or math.inf, known.room or math.inf)
        line = self.learnt["decode"].line_below(room, self._target_s)
        assert line is not None, "as above"
        kv_tokens = max(1.0, min(room, self._settings.load_factor * line.load))
        used, context = (one.reshape(-1) for one in np.meshgrid(_SHARES, _CONTEXTS))
        itl_s = line.base_s + line.s_per_token * used * kv_tokens
        throughput = used * kv_tokens / context / itl_s / self._gpus
        return DecodeSurface(DecodeProfile(used, context, 1e3 * itl_s, throughput, kv_tokens))
