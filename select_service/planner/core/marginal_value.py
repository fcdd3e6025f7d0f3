"""The worth of an engine: requests served in time, against the GPUs that are paid for.

A promise to serve 99 % in time covers all requests together: an engine kept ready all day for the
first minute of a rise is expensive, one ordered at its first signs is cheap. So one price holds at
every moment: have as many engines as save more late requests per second than their GPUs cost. The
price is the highest that would have kept the promise in the past (a Lagrange multiplier, found by
trial): it is high where rises are slow compared to the start time of engines, so that none stand
ready for them, and low where they are not. If no price keeps the promise, this method abstains.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from select_service.planner.core.profile import Floats
    from select_service.planner.core.similar_past import PastTrial

COUNTS_MOST: Final = 24
"""Engine counts compared, evenly from the fewest to the most that the rates need."""
PRICES: Final = tuple(math.pow(2.0, -step / 2) for step in range(-6, 22))
"""Late requests per second that one GPU must save, dearest first: 8 down to 0.0007."""
KEPT: Final = 0.1
"""An existing engine stays while it is worth this share of the price: starting costs, too, and
chance signs are followed by others. With 0.3, engines came and went nearly twice as often, for a
gain of a hundredth."""

TRIED_LATE: Final = 1.5
"""In a trial, this multiple of the promised late share is allowed: each event is predicted from
fewer others than there really are."""


class Table(NamedTuple):
    """The late requests of one pool for each engine count, at each rate."""

    counts: tuple[int, ...]
    late: Floats
    """Late requests per second: a row per count, a column per rate of the grid."""
    gpus: int

    def best(self, probabilities: Floats, price: float) -> int:
        """Return the best engine count for a distribution of rates over the grid."""
        return self.counts[int(self._best(probabilities[np.newaxis, :], price)[0])]

    def why(self, probabilities: Floats, price: float, count: int) -> str:
        """Return as text what more engines would be worth."""
        row = min(int(np.searchsorted(self.counts, count)), len(self.counts) - 1)
        costs = self.late @ probabilities + price * self.gpus * np.asarray(self.counts)
        more = row + 1 + int(costs[row + 1 :].argmin()) if row + 1 < len(self.counts) else row
        if more == row:
            return "more were of no use at any rate that came"
        saved = float((self.late[row] - self.late[more]) @ probabilities)
        asked = price * self.gpus * (self.counts[more] - self.counts[row])
        text = (
            f"{self.counts[more]} would save {saved:.2g} requests/s more from being late, and "
            f"have to be worth {asked:.2g}"
        )
        if count > self.best(probabilities, price):
            text += f"; an engine there stays while worth {KEPT:.0%} of its price"
        return text

    def _best(self, probabilities: Floats, price: float) -> NDArray[np.intp]:
        """Return the cheapest row for every distribution."""
        costs = probabilities @ self.late.T + price * self.gpus * np.asarray(self.counts)
        return np.asarray(costs.argmin(axis=1))

    def next(self, probabilities: Floats, price: float, current: int) -> int:
        """Return the target for a current count: started engines stay a while."""
        wanted = self.best(probabilities, price)
        return wanted if wanted > current else min(current, self.best(probabilities, KEPT * price))

    def late_of(self, trial: PastTrial, price: float) -> Floats:
        """Return late requests per second for every part of a trial."""
        row, rows = 0, []
        wanted = zip(
            self._best(trial.predicted, price).tolist(),
            self._best(trial.predicted, KEPT * price).tolist(),
            strict=True,
        )
        for up, kept in wanted:  # as `next`: rows rise with counts
            row = up if up > row else min(row, kept)
            rows.append(row)
        columns = np.minimum(np.searchsorted(trial.grid, trial.came), len(trial.grid) - 1)
        return np.asarray(self.late[rows, columns])


def table_of(
    grid: Floats, needed: Callable[[float], int], late: Callable[[float, int], float], gpus: int
) -> Table:
    """Build the table of one pool.

    Args:
        grid: rates, rising.
        needed: engines for a rate that is sure to come.
        late: share of requests that are late at a rate, with so many engines.
        gpus: of one engine.
    """
    fewest, most = needed(float(grid[0])), needed(float(grid[-1]))
    spread = np.linspace(fewest, most, min(most - fewest + 1, COUNTS_MOST))
    counts = tuple(sorted({round(float(count)) for count in spread}))
    late_requests = np.array(
        [[rate * late(float(rate), count) for rate in grid] for count in counts]
    )
    # requests late with any number of engines are not counted
    return Table(counts, late_requests - late_requests.min(axis=0), gpus)


def price_of(trial: PastTrial, tables: Sequence[Table], late_most: float) -> float | None:
    """Return the highest price that keeps the late share within a limit; None: there is none.

    A request may be late in any pool; the worst pool counts.
    """
    allowed = TRIED_LATE * late_most * float(trial.came.sum())

    def keeps(price: float) -> bool:
        late = np.max([table.late_of(trial, price) for table in tables], axis=0)
        return bool(late.sum() <= allowed)

    dear, cheap = 0, len(PRICES) - 1  # indices; late requests fall with the price
    if not len(trial.came) or not keeps(PRICES[cheap]):
        return None
    while dear < cheap:
        middle = (dear + cheap) // 2
        dear, cheap = (dear, middle) if keeps(PRICES[middle]) else (middle + 1, cheap)
    return float(PRICES[cheap])
