"""How fast each rank is, learnt from lifecycle calls: time to the first token, and between tokens.

Two straight lines per rank, fitted to what was measured lately: the time to a first token over the
tokens that were to be computed before it (those booked there and the prompt's own), and the time of
a block of output over the context its rank attends to. So unequal engines are seen, and a number
holds for a load that was not met yet. Outliers count as far as they are likely. Nothing is shared
between ranks, and a rank is forgotten with its slot, or once its worker has another endpoint.
"""

from __future__ import annotations

from math import inf, sqrt
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

if TYPE_CHECKING:
    from select_service.core.columns import Floats

SAMPLES: Final = 64
"""Measurements after which an older one weighs 1/e."""
SURE: Final = 4
"""With fewer measurements nothing is predicted, and none is an outlier: those before a much faster
one are forgotten."""
OUTLIER: Final = 4.0
"""A measurement counts as at most so many times what was expected, and at least its part: one
paused engine teaches little, and a slower one is believed within a few prompts."""
BELIEVED_S: Final = 0.04
"""What takes no longer is no outlier: a line may begin at 0, where nothing is many times that."""
DOUBT: Final = 0.1
"""Times are taken as proportional to tokens as far as those that were met do not differ by more
than this (the square of their coefficient of variation): queues that are kept at one length tell
how long that takes, and nothing of longer ones."""
FASTEST_TOKENS_PER_S: Final = 1e6
"""No rank computes prompts faster: of more tokens it is doubted that they were computed."""
UNEQUAL: Final = 16.0
"""Nor so many times as fast as the others of its pool."""
WORN: Final = 3.0
"""A rank that takes so many times as long as three quarters of its pool is worn: generations of
engines differ by less."""
BLOCKS_EVERY_S: Final = 0.05
"""Blocks of output are measured so often per rank: all of its requests go at the same pace."""
COUNTED_EVERY_S: Final = 1.0
"""Of the blocks that are measured one in this time is counted in the sums of its pool, because what
its rank attends to is added up for that."""
BEGINS_WITHIN: Final = 2.0
"""A request without output for so many times as another one took between two reports waits for a
place in the batch, unless a later one has output: its rank attends to nothing of it."""
TOGETHER_S: Final = 0.05
"""What is reported so soon after a first token was reported together with it: a client that does
not stream has it all at the end of the answer."""
_KEPT: Final = 1.0 - 1.0 / SAMPLES
_LEVEL: Final = 1e-6  # a relative variance below which measurements say nothing of the slope


T = TypeVar("T", float, "Floats")


def seconds_at(base: float, slope: float, x: T) -> T:
    """Return the time that a line gives at x; also of columns of lines.

    Of a first token over the tokens to compute before it, or of a block of output over the blocks
    of context.
    """
    return base + slope * x


def line_through(
    weight: float,
    x: float,
    y: float,
    xx: float,
    xy: float,
    *,
    is_level: bool,
    doubt: float = DOUBT,
) -> tuple[float, float]:
    """Return base and slope of the line through measurements, by their sums; none is below 0.

    Args:
        weight: how many there are, above 0.
        x: their sum.
        y: likewise.
        xx: the sum of squares.
        xy: of products.
        is_level: whether measurements at one x alone mean a constant; else y is taken as
            proportional to x.
        doubt: as far as measurements differ by no more than this (see `DOUBT`), they mean one x.
    """
    mean_x, mean_y = x / weight, y / weight
    variance = xx / weight - mean_x * mean_x
    steepest = mean_y / mean_x if mean_x > 0.0 else 0.0
    if variance > _LEVEL * mean_x * mean_x:
        believed = 0.0 if is_level else doubt * mean_x * mean_x
        slope = xy / weight - mean_x * mean_y + believed * steepest
        slope = min(max(slope / (variance + believed), 0.0), steepest)
    else:
        slope = 0.0 if is_level else steepest
    return max(0.0, mean_y - slope * mean_x), slope  # not even by rounding


class MeasurementSums:
    """Sums over all measurements of a pool, which only grow: others fit lines to their growth."""

    __slots__ = ("count", "x", "xx", "xy", "y")

    def __init__(self) -> None:
        self.count = 0
        self.x = self.y = self.xx = self.xy = 0.0

    def add(self, x: float, y: float) -> None:
        """Add a measurement."""
        self.count += 1
        self.x += x
        self.y += y
        self.xx += x * x
        self.xy += x * y


class Fit:
    """A line fitted to recent measurements; neither its base nor its slope is below 0.

    Args:
        is_level: whether measurements at one x alone mean a constant; else y is taken as
            proportional to x.
    """

    __slots__ = ("_is_level", "_w", "_x", "_xx", "_xy", "_y", "_yy", "base", "samples", "slope")

    def __init__(self, *, is_level: bool = False) -> None:
        self._is_level = is_level
        self.samples = 0
        self.base = self.slope = 0.0
        self._w = self._x = self._y = self._xx = self._xy = self._yy = 0.0  # fading sums

    def learn(self, x: float, y: float) -> tuple[float, float]:
        """Add a measurement; returns it as far as it is believed. O(1)."""
        expected = seconds_at(self.base, self.slope, x)
        if self.samples < SURE:
            if y * OUTLIER < expected:  # an engine is slow while it warms up
                self.samples = 0
                self._w = self._x = self._y = self._xx = self._xy = self._yy = 0.0
        else:
            y = min(y, max(expected * OUTLIER, BELIEVED_S))
            if y * OUTLIER < expected:
                if self.slope > 0.0 and not self._is_level:  # rather the tokens than the time
                    x = max(0.0, (y * OUTLIER - self.base) / self.slope)
                y = max(y, seconds_at(self.base, self.slope, x) / OUTLIER)
        self.samples += 1
        self._w = weight = self._w * _KEPT + 1.0
        self._x = self._x * _KEPT + x
        self._y = self._y * _KEPT + y
        self._xx = self._xx * _KEPT + x * x
        self._xy = self._xy * _KEPT + x * y
        self._yy = self._yy * _KEPT + y * y
        self.base, self.slope = line_through(
            weight, self._x, self._y, self._xx, self._xy, is_level=self._is_level
        )
        return x, y

    def at(self, x: float) -> float | None:
        """Return what is expected at x; None: too little was measured."""
        return seconds_at(self.base, self.slope, x) if self.samples >= SURE else None

    @property
    def sure_slope(self) -> float:
        """The slope with its standard error, at most that of the means.

        Lines are level by chance, too, and what follows from a slope near 0 may be anything.
        """
        if self._x <= 0.0:
            return self.slope
        mean_x, mean_y = self._x / self._w, self._y / self._w
        variance = self._xx / self._w - mean_x * mean_x
        if variance <= _LEVEL * mean_x * mean_x:
            return self.slope
        together = self._xy / self._w - mean_x * mean_y
        rest = self._yy / self._w - mean_y * mean_y - together * together / variance
        error = sqrt(max(rest, 0.0) / (variance * self._w))
        return min(self.slope + error, mean_y / mean_x)

    @property
    def mean_ratio(self) -> float:
        """The mean of x over that of y, 0 if nothing was measured."""
        return self._x / self._y if self._y > 0.0 else 0.0


class PredictionError:
    """How far predictions were off, over recent ones."""

    __slots__ = ("mean", "mean_abs", "samples")

    def __init__(self) -> None:
        self.samples = 0
        self.mean = self.mean_abs = 0.0  # predicted - actual

    def learn(self, predicted: float, actual: float) -> None:
        """Compare one prediction with what came."""
        self.samples += 1
        share = 1.0 / min(self.samples, SAMPLES)
        error = predicted - actual
        self.mean += (error - self.mean) * share
        self.mean_abs += (abs(error) - self.mean_abs) * share


class RankSpeed:
    """The speed of one rank; times in seconds."""

    __slots__ = (
        "base_tokens",
        "block",
        "block_error",
        "counted_at",
        "measured_at",
        "tokens_per_s",
        "ttft",
        "ttft_error",
    )

    def __init__(self) -> None:
        self.ttft = Fit()
        """Time to the first token over tokens to compute before it."""
        self.block = Fit(is_level=True)
        """Time of a block of output over blocks of context."""
        self.ttft_error = PredictionError()
        self.block_error = PredictionError()
        self.measured_at = 0.0  # when a block was measured last
        self.counted_at = -inf  # when one was counted in the sums
        self.base_tokens = self.tokens_per_s = 0
        """Of `ttft`, as counted in the sums of `RankSpeeds`: what it would compute in the time that
        its line begins with, and its speed; 0 tokens/s: not counted."""


class PoolSpeed(NamedTuple):
    """How fast the ranks of a pool compute prompts, all together.

    Queues of ranks are taken to end together, each by its line: so a rank counts for the time that
    lines begin with as far as it computes, and one that hangs makes no others late. Nobody is
    expected to take more than `OUTLIER` times what was computed lately says: the line of a rank
    without prompts stays as it is, and a bad hour that is over must not keep the pool closed.
    """

    base_s: float
    tokens_per_s: float  # above 0
    ranks: int
    lately_tokens_per_s: float  # above 0

    def ttft_s(self, ahead: float, own: float) -> float:
        """Return the seconds to a first token: what `SlotLoads.predicted_ms` says, of any rank.

        `ahead`: tokens to be computed before it, on all ranks; `own`: those of its prompt.
        """
        tokens = ahead + own * self.ranks
        line_s = self.base_s + tokens / self.tokens_per_s
        return min(line_s, OUTLIER * tokens / self.lately_tokens_per_s)

    def alone_s(self, own: float) -> float:
        """Return what computing a prompt takes by itself."""
        return own * self.ranks / self.tokens_per_s


class SpeedRow(NamedTuple):
    """The lines of one rank at one moment; negative: unknown."""

    ttft_base_s: float
    ttft_s_per_token: float
    block_base_s: float
    block_s_per_context: float
    pull_s_per_token: float  # of a rank of mean speed, see `PullSpeeds.cost`; 0: unknown


_UNKNOWN: Final = SpeedRow(-1.0, -1.0, -1.0, -1.0, 0.0)


class RankSpeeds:
    """The ranks of one ledger that were measured, by slot."""

    __slots__ = ("_base_tokens", "_measured", "_tokens_per_s", "blocks", "by_slot", "prefills")

    def __init__(self) -> None:
        self.by_slot: dict[int, RankSpeed] = {}
        self.prefills = MeasurementSums()
        """Of first tokens: seconds over tokens; of ranks that are not new, whose outliers are
        known."""
        self.blocks = MeasurementSums()
        """Likewise of blocks of output: seconds over the blocks that requests attend to."""
        self._measured = 0  # ranks in the sums
        self._base_tokens = self._tokens_per_s = 0  # sums over them; whole numbers do not drift

    def computed(self, slot: int, tokens: int, seconds: float) -> None:
        """Note a first token.

        `tokens` were to compute when it was booked, `seconds` ago: the queue's and the
        prompt's own.
        """
        if seconds > 0.0:
            rank = self._of(slot)
            fastest = FASTEST_TOKENS_PER_S
            others = self._measured - bool(rank.tokens_per_s)
            if others:
                of_others = (self._tokens_per_s - rank.tokens_per_s) / others
                fastest = min(fastest, UNEQUAL * of_others)
            is_new = rank.ttft.samples < SURE
            believed = rank.ttft.learn(min(float(tokens), fastest * seconds), seconds)
            if not is_new:
                self.prefills.add(*believed)
            self._count(rank)

    def _count(self, rank: RankSpeed, *, is_gone: bool = False) -> None:
        """Update the sums after the line of a rank has changed."""
        fit = rank.ttft
        self._base_tokens -= rank.base_tokens
        self._tokens_per_s -= rank.tokens_per_s
        self._measured -= bool(rank.tokens_per_s)
        rank.base_tokens = rank.tokens_per_s = 0
        slope = fit.sure_slope
        if is_gone or fit.samples < SURE or slope <= 0.0:
            return
        rate = 1.0 / slope
        rank.base_tokens, rank.tokens_per_s = round(fit.base * rate), max(1, round(rate))
        self._base_tokens += rank.base_tokens
        self._tokens_per_s += rank.tokens_per_s
        self._measured += 1

    @property
    def mean_tokens_per_s(self) -> float | None:
        """How fast a rank computes on average; None: none was measured."""
        return self._tokens_per_s / self._measured if self._measured else None

    @property
    def pull_s_per_token(self) -> float:
        """Seconds that prices count for a token of a pull: a mean rank's; 0: unknown."""
        rate = self.mean_tokens_per_s
        return 1.0 / rate if rate else 0.0

    def of_pool(self, ranks: int, tokens_per_s: float) -> PoolSpeed:
        """Return how fast so many ranks are together. O(1).

        Ranks that were not measured count with `tokens_per_s`, what one computed lately.
        """
        measured = min(ranks, self._measured)
        lately = ranks * tokens_per_s
        if not measured:
            return PoolSpeed(0.0, lately, ranks, lately)
        share = measured / self._measured  # less than 1 while ranks drain
        usual = measured * tokens_per_s
        computed = max(self._tokens_per_s * share, usual / OUTLIER)
        total = computed + lately - usual
        base_s = self._base_tokens / self._tokens_per_s
        return PoolSpeed(base_s * computed / total, total, ranks, lately)

    def worn(self) -> dict[int, float]:
        """Return how many times as long as others the ranks take that are much slower. O(ranks).

        By their lines, for a prompt as long as those that were measured, with its queue. Others are
        the three quarters that take least: where a quarter is slow, or may be as far as is known
        yet, the fleet is of several generations, whose slow ranks have caches, too, and are needed.
        At most `UNEQUAL` times.
        """
        count = self.prefills.count
        tokens = self.prefills.x / count if count else 0.0
        times = {
            slot: inf if (seconds := rank.ttft.at(tokens)) is None else seconds
            for slot, rank in self.by_slot.items()
            if rank.ttft.samples
        }
        usual_s = sorted(times.values())[3 * len(times) // 4] if times else inf
        if not 0.0 < usual_s < inf:
            return {}
        return {
            slot: min(seconds / usual_s, UNEQUAL)
            for slot, seconds in times.items()
            if WORN * usual_s < seconds < inf
        }

    def decoded(self, slot: int, context: float, seconds: float, now: float) -> float | None:
        """Note a block of output.

        `context` is the rank's, with all that prices add to the blocks that it attends to;
        `seconds` is what one block took.

        Returns:
            The time as it is believed, if it is to be counted in `blocks` now; else None.
        """
        rank = self._of(slot)
        if seconds > 0.0 and now - rank.measured_at >= BLOCKS_EVERY_S:
            rank.measured_at = now
            is_new = rank.block.samples < SURE
            _, believed = rank.block.learn(context, seconds)
            if not is_new and now - rank.counted_at >= COUNTED_EVERY_S:
                rank.counted_at = now
                return believed
        return None

    def _of(self, slot: int) -> RankSpeed:
        rank = self.by_slot.get(slot)
        if rank is None:
            rank = self.by_slot[slot] = RankSpeed()
        return rank

    def forget(self, slot: int) -> None:
        """Forget a rank that has left: the next one on its slot may be another engine."""
        rank = self.by_slot.pop(slot, None)
        if rank is not None:
            self._count(rank, is_gone=True)

    def row(self, slot: int) -> SpeedRow:
        """Return the lines of a rank as they are now."""
        rank = self.by_slot.get(slot)
        if rank is None:
            return _UNKNOWN
        ttft, block = rank.ttft, rank.block
        of_ttft = (-1.0, -1.0) if ttft.samples < SURE else (ttft.base, ttft.slope)
        of_block = (-1.0, -1.0) if block.samples < SURE else (block.base, block.slope)
        return SpeedRow(*of_ttft, *of_block, self.pull_s_per_token)
