"""Library models, refitted to a history from time to time instead of learning step by step.

The libraries are in `edge/predictors.py`; this module decides when to fit, on what, and what to
forecast while there is too little to fit or a fit fails. A failed fit is counted and the last value
stands in, as in the reference; unlike its ARIMA, no fit is kept for ever. A fit that takes too long
(`TimeoutError`) leaves the previous model in place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    Forecast: TypeAlias = Callable[[Sequence[float], int, int], Sequence[float]]
    """(history that begins like the fitted one, number of values to forecast after it, number of
    values since the fit) to forecasts."""
    Fit: TypeAlias = Callable[[Sequence[float]], Forecast]

POINTS_MIN: Final = 5


class Fitted:
    """Refits every `refit_every` values on the last `window`; more often while there are few.

    Args:
        fit: returns a forecaster; may raise anything `failures` lists.
        failures: exceptions that mean "no forecast", not "a bug".
        window: the most values to fit.
        refit_every: values between two fits.
    """

    def __init__(
        self,
        fit: Fit,
        *,
        failures: tuple[type[Exception], ...],
        window: int = 240,
        refit_every: int = 10,
    ) -> None:
        self._fit = fit
        self._failures = failures
        self._window = window
        self._refit_every = refit_every
        self._values: list[float] = []
        self._forecast: Forecast | None = None
        self._age = 0
        self._added = self._tried = 0
        self._cached: dict[int, float] = {}
        self.failed = 0
        self.why = ""
        """Why the last forecast is not from a fresh fit; empty: it is."""

    def add(self, value: float) -> None:
        """Add one value."""
        self._values.append(value)
        if len(self._values) > 2 * self._window:
            del self._values[: self._window]
            self._forecast = None  # it has lost the beginning of its history
        self._age += 1
        self._added += 1
        self._cached = {}

    def predict(self, steps: int = 1) -> float:
        """Return the forecast, fitting first if due; cached until the next value."""
        if steps not in self._cached:
            self._cached[steps] = self._computed(steps)
        return self._cached[steps]

    def _computed(self, steps: int) -> float:
        if not self._values:
            return 0.0
        last, recent = self._values[-1], self._values[-self._window :]
        if len(recent) < POINTS_MIN:
            return last
        if min(recent) == max(recent):
            return last
        if self._forecast is None or self._age >= min(self._refit_every, len(recent) // 8):
            self._refit(recent)
        if self._forecast is None:
            return last
        try:
            return self._forecast(recent, steps, self._age)[steps - 1]
        except self._failures as error:
            self._fail(error)
            self._forecast = None
            return last

    def _refit(self, recent: Sequence[float]) -> None:
        if self._tried == self._added:
            return  # once per value
        self._tried = self._added
        try:
            self._forecast = self._fit(recent)
        except TimeoutError as error:
            self._fail(error)  # the previous model stays in use
        except self._failures as error:
            self._fail(error)
            self._forecast = None
        else:
            self._age = 0
            self.why = ""

    def _fail(self, error: Exception) -> None:
        self.failed += 1
        self.why = str(error) or type(error).__name__
