"""How much of the machine others took while we measured: what makes a run one to distrust."""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DISTURBED", "Watch", "busy_ticks", "wait_for_quiet"]

DISTURBED = 0.1
"""From this share of all processors on, somebody else was at work and not only the kernel."""

_BUSY_FIELDS = (0, 1, 2, 5, 6, 7)  # user nice system irq softirq steal, of proc_stat(5)


@dataclass(frozen=True, slots=True)
class Watch:
    """Clocks at one moment; `share` is of the time since then."""

    busy_s: float
    own_s: float
    at_s: float

    @classmethod
    def now(cls) -> Watch:
        """Read the clocks. Children count once they have ended: ask between workloads."""
        stat = Path("/proc/stat").read_text(encoding="ascii")
        ticks = os.sysconf("SC_CLK_TCK")
        usages = [
            resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        ]
        uptime = Path("/proc/uptime").read_text(encoding="ascii").split()[0]
        return cls(
            busy_s=busy_ticks(stat) / ticks,
            own_s=sum(one.ru_utime + one.ru_stime for one in usages),
            at_s=float(uptime),
        )

    def share(self, now: Watch, processors: int) -> float:
        """Of all processors' time since, 0 to 1, what neither this process nor its children took.

        Softirq work for our own sockets is among it; it is a few per cent.
        """
        passed = (now.at_s - self.at_s) * processors
        others = (now.busy_s - self.busy_s) - (now.own_s - self.own_s)
        return max(0.0, others / passed) if passed > 0 else 0.0


def wait_for_quiet(
    most_s: float,
    look_s: float = 2.0,
    *,
    read: Callable[[], Watch] = Watch.now,
    sleep: Callable[[float], None] = time.sleep,
) -> float:
    """Return once others leave the machine alone for a look's time, or `most_s` have passed.

    Args:
        most_s: to wait.
        look_s: of one look.
        read: the clocks.
        sleep: lets so much time pass.

    Returns:
        What others took in the last look; 0 without one.
    """
    share, now = 0.0, read()
    deadline = now.at_s + most_s
    while now.at_s + look_s <= deadline:
        before = now
        sleep(look_s)
        now = read()
        share = before.share(now, os.cpu_count() or 1)
        if share <= DISTURBED:
            break
    return share


def busy_ticks(stat: str) -> int:
    """All processors' ticks that were not idle, out of the text of /proc/stat."""
    fields = stat.splitlines()[0].split()[1:]
    return sum(int(fields[place]) for place in _BUSY_FIELDS)
