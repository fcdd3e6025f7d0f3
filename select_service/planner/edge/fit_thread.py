"""Fits that must not delay a decision: one thread, and a deadline.

A library's fit cannot be stopped. A late one continues in the thread, and its result is used next
time; until then no other fit waits for the thread: each is late at once, and the previous models
stay in use. So a decision waits for one deadline at most, however many series there are.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from select_service.planner.core.fitted import Fit, Forecast

DEADLINE_S: Final = 10.0


class Fitter:
    """Runs the fits of one planner, one at a time.

    Args:
        deadline_s: how long a decision waits for a fit.
    """

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self.deadline_s = deadline_s
        self._running: Future[Forecast] | None = None

    def bounded(self, fit: Fit, *, keeps: bool) -> Fit:
        """Return the fit with a deadline, for one series.

        Args:
            fit: may take any time.
            keeps: the result of a late fit can be used later, on a longer history.
        """
        late: Future[Forecast] | None = None

        def run(history: Sequence[float]) -> Forecast:
            nonlocal late
            if late is not None and late.done():
                found, late = late, None
                if keeps:
                    return found.result()
            if self._running is not None and not self._running.done():
                raise TimeoutError("another fit is still running")
            # a copy: the series goes on while the thread reads
            job = self._running = _started(fit, list(history))
            try:
                return job.result(self.deadline_s)
            except LateError:
                if job.done():  # raised by the fit itself
                    raise
                late = job
                raise TimeoutError(f"a fit took longer than {self.deadline_s:g} s") from None

        return run


def _started(fit: Fit, history: Sequence[float]) -> Future[Forecast]:
    """Start in a thread that does not keep the process alive, as a fit may never end."""
    job: Future[Forecast] = Future()

    def work() -> None:
        try:
            job.set_result(fit(history))
        except Exception as error:  # noqa: BLE001 - the waiting caller gets it
            job.set_exception(error)

    threading.Thread(target=work, name="fit", daemon=True).start()
    return job
