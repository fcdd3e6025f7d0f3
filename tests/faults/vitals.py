"""What a process takes, by the word of the kernel."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Vitals:
    """Of one moment."""

    rss_mb: float
    peak_mb: float  # since `forget_peak`
    fds: int
    threads: int
    cpu_s: float  # of processors, since it began


def vitals(pid: int) -> Vitals:
    """Look at a process."""
    proc = Path(f"/proc/{pid}")
    status = dict(
        line.split(":", 1) for line in (proc / "status").read_text().splitlines() if ":" in line
    )
    ticks = (proc / "stat").read_text().rpartition(")")[2].split()  # the name may have blanks
    return Vitals(
        int(status["VmRSS"].split()[0]) / 1024,
        int(status["VmHWM"].split()[0]) / 1024,
        len(os.listdir(proc / "fd")),
        int(status["Threads"]),
        sum(map(int, ticks[11:13])) / os.sysconf("SC_CLK_TCK"),
    )


def forget_peak(pid: int) -> None:
    """From now on the peak is that of what follows."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
