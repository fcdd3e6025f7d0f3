"""Fits that must not keep a decision waiting: one thread, and a deadline.

A library's fit cannot be stopped. One that is late goes on in the thread, and what it finds is
taken the next time; meanwhile nobody else waits for the thread: every other fit is late at once,
and the models from before go on. So a decision waits for one deadline at most, however many series
there are.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from select_service.planner.core.fitted import Fit, Forecast

__all__ = ["Fitter"]

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
            keeps: what a late fit finds can be used later, on a longer history.
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
                if job.done():  # the fit itself has raised it
                    raise
                late = job
                raise TimeoutError(f"a fit took longer than {self.deadline_s:g} s") from None

        return run


def _started(fit: Fit, history: Sequence[float]) -> Future[Forecast]:
    """Begin in a thread that does not keep the process alive: a fit may never end."""
    job: Future[Forecast] = Future()

    def work() -> None:
        try:
            job.set_result(fit(history))
        except Exception as error:  # noqa: BLE001 - who waits for it is told
            job.set_exception(error)

    threading.Thread(target=work, name="fit", daemon=True).start()
    return job
