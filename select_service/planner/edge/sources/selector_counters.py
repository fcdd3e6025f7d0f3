"""The counters of one selector: what a scrape shows, and how much they have grown since the last.

A restart begins them anew. Several processes that answer at one address look like restarts; they
are distinguished by their ids and start times: one that started while another still answered has
not replaced it.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Final, TypeAlias

from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from collections.abc import Iterable

PREFIX: Final = "select_service_"
Samples: TypeAlias = dict[tuple[str, str, str, str], float]
"""By name, model, tenant, and bucket or moment; summed over all other labels."""


STARTED: Final = ("process_start_time_seconds", "", "", "")
_READ: Final = tuple(
    PREFIX + name
    for name in (
        "demand_",
        "rank_prefill_tokens{",
        "reservations{",
        "pending_isl_tokens{",
        "measured_prefill_moments_total{",
        "measured_itl_moments_total{",
        "measured_rank_kv_tokens{",
        "measured_prefill_worker_ranks{",
        "measured_decode_worker_ranks{",
    )
)
_INSTANCE: Final = PREFIX + "instance_info"
_REPLICAS: Final = PREFIX + "replica_publishers{"
_HEARD: Final = tuple(("replica_publishers", state, "", "") for state in ("synced", "behind"))
_PROCESSES_MAX: Final = 64  # processes behind one address, distinguished from restarts
_SKEW_S: Final = 5.0  # clocks of two machines may differ by this much
_SAME_MIN: Final = 12  # answers in a row of one process, at an address that had several

Since: TypeAlias = tuple[float, float]
"""Seconds since 1970."""


def parse(text: str, models: Iterable[str] | None = None) -> Samples:
    """Parse the parts of an exposition that the planner needs; names are without the prefix.

    Of a thousand models and ranks few lines are needed: the others are skipped unparsed.

    Args:
        text: the page.
        models: names of the models to read; None: all.

    Raises:
        ValueError: one of these lines is malformed.
    """
    ours = None if models is None else [f'model_name="{_escaped(name)}"' for name in set(models)]
    lines = [
        line
        for line in text.split("\n")
        if (line.startswith(_READ) and (ours is None or any(one in line for one in ours)))
        or line.startswith((_REPLICAS, _INSTANCE, STARTED[0]))
    ]
    samples: Samples = defaultdict(float)
    for family in text_string_to_metric_families("\n".join([*lines, ""])):
        for one in family.samples:
            labels = one.labels
            if not math.isfinite(one.value):
                continue
            if one.name == STARTED[0]:
                samples[STARTED] = one.value
            elif one.name == _INSTANCE:
                samples["instance_info", labels.get("instance_id", ""), "", ""] = one.value
            elif one.name == PREFIX + "replica_publishers":
                samples["replica_publishers", labels.get("state", ""), "", ""] = one.value
            elif "model_name" in labels:
                key = (
                    one.name.removeprefix(PREFIX),
                    labels["model_name"],
                    labels.get("tenant_id", "default"),
                    labels.get("le") or labels.get("moment", ""),
                )
                samples[key] += one.value
    return dict(samples)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class SeveralProcesses(ValueError):
    """Several selectors answer at one address, in turns."""


class SelectorCounters:
    """One selector's last scrape, and the growth of its counters since the window began.

    Attributes:
        error: why the last scrape failed; empty: it succeeded.
        is_new: counting began after the start of the window.
        is_new_to_looks: counting began after the last look.
        answered_at: monotonic seconds of the last answer; None: there was none.
        is_one_of_several: its name has other addresses.
        instance: the id of the process that answered last; empty: it does not say.
    """

    def __init__(self, shown: str) -> None:
        self.shown = shown
        self.is_one_of_several = False
        self.instance = ""
        self.last: Samples | None = None
        self._counted: Samples = {}  # including series absent from the last page
        self.grown: Samples = defaultdict(float)
        self.error = "not scraped yet"
        self.is_new = self.is_new_to_looks = False
        self.answered_at: float | None = None
        # processes that have answered, by id or start time, the latest last
        self._processes: deque[str] = deque(maxlen=_PROCESSES_MAX)
        self._started: float | None = None  # when the latest began
        self._same_wanted = 0  # answers of one process, until several are assumed no more
        self._seen_at = -math.inf  # seconds since 1970 of the last answer

    @property
    def is_several(self) -> bool:
        """Whether several processes have answered here lately."""
        return self._same_wanted > 0

    @property
    def replicas(self) -> int:
        """How many other replicas it knows, by its last page."""
        last = self.last or {}
        return sum(int(last.get(key, 0.0)) for key in _HEARD)

    def take(self, samples: Samples, now: float, wall: float, *, since: Since | None) -> None:
        """Add the growth of counters since the last scrape.

        Args:
            samples: of this scrape.
            now: monotonic seconds.
            wall: seconds since 1970.
            since: when the window and the look began that count a selector which is new; None:
                such a one has counted an unknown part before.

        Raises:
            SeveralProcesses: the answer is from another process than the last one, which had not
                ended.
        """
        self.answered_at, seen_at, self._seen_at = now, self._seen_at, wall
        started = samples.get(STARTED)
        has_restarted = self._is_another(samples, started, seen_at)
        if self._same_wanted:
            self._same_wanted = _SAME_MIN if has_restarted else self._same_wanted - 1
        if self._same_wanted:
            self.last = None  # counting begins anew when it is one process again
            raise SeveralProcesses(
                "several processes answer in turns: name every selector by itself, or the headless "
                "Service that leads to all"
            )
        if self.last is None:
            self._begin(samples, started, since)
        else:
            if has_restarted:
                self._counted = {}
            self._grow(samples)
        self.last = samples
        self._counted |= samples
        self.error = ""

    def _is_another(self, samples: Samples, started: float | None, seen_at: float) -> bool:
        """Note the process that answers; returns whether it is another than before."""
        self.instance = next((key[1] for key in samples if key[0] == "instance_info"), "")
        process = self.instance or ("" if started is None else repr(started))
        last = self._processes[-1] if self._processes else ""
        if not process or process == last:
            return False
        before, self._started = self._started, started
        is_known = process in self._processes
        if is_known:
            self._processes.remove(process)
        self._processes.append(process)
        is_beside = started is not None and (started == before or started < seen_at - _SKEW_S)
        if last and (is_known or is_beside):
            self._same_wanted = _SAME_MIN  # each alternation would count everything as new
        return bool(last)

    def begin(self) -> None:
        """Begin a window with the last scrape."""
        self.grown = defaultdict(float)
        self.is_new = self.is_new_to_looks = False

    def _begin(self, samples: Samples, started: float | None, since: Since | None) -> None:
        self._counted = {}
        self.is_new = self.is_new_to_looks = True
        if since is not None and started is not None:
            window, look = since
            self.is_new, self.is_new_to_looks = started < window, started < look
        if not self.is_new:
            self._grow(samples)  # all of it came since it started

    def _grow(self, samples: Samples) -> None:
        for key, value in samples.items():
            before = self._counted.get(key, 0.0)
            self.grown[key] += value - before if value >= before else value
