"""How long a request waits for a full worker, where `--queue-deadline-s` does not say.

As long as it can still be in time, if it has a target of its own; else several times as long as
it is measured to take until its turn. Policies' own queues have their own deadlines.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from select_service.core.admission.policy_api import AdmissionRequest
    from select_service.core.admission.rank_limits import RankLimits

LATER_MAX: Final = 4.0
"""A turn may come so many times as late as the mean says: some answers are much longer than others.
Whose turn has not come by then waits behind a worker that hangs."""


def in_time_s(target_s: float, computing_s: float) -> float:
    """Return how long a request may wait and still have its first token in time.

    Half of the target at least: what is predicted to be late may yet be in time.
    """
    return max(target_s / 2, target_s - computing_s)


def known_wait_s(ask: AdmissionRequest, limits: RankLimits, worker_id: int | None) -> float | None:
    """Return how long a request may wait; None: nothing is known.

    Args:
        ask: the request.
        limits: of the ranks that it waits for.
        worker_id: the worker whose waiting place it holds.
    """
    if ask.target_s != inf:
        speed, _, _ = limits.pool.outlook()
        computing_s = 0.0 if speed is None else speed.ttft_s(0.0, ask.work)
        return in_time_s(ask.target_s, computing_s)
    stay_s = limits.stays.at(0.0)
    if worker_id is None or stay_s is None:
        return None
    cap = limits.caps[worker_id]
    return LATER_MAX * stay_s * cap.queued / cap.max_inflight
