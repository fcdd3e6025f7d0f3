"""The service under clocks that a test sets: the wall's goes back and forth, time passes at once.

`python -m tests.live.clocked …` is `tests.live.window` in everything else. The clocks are those of
the process, put in before anything that asks for the time is imported: no library is preloaded.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import time
from pathlib import Path

CLOCKED = (sys.executable, "-m", "tests.live.clocked")
VARIABLE = "TEST_CLOCKS"
_OFFSETS = struct.Struct("<dd")  # seconds: what has passed beside real time; what the wall is off


class Clocks:
    """What the test holds of the clocks of one process."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(_OFFSETS.pack(0.0, 0.0))
        self._path = path
        self._passed = self._off = 0.0

    @property
    def env(self) -> dict[str, str]:
        """For the process."""
        return {VARIABLE: str(self._path)}

    def wall(self) -> float:
        """The wall clock of the process."""
        return time.time() + self._passed + self._off

    def set_wall(self, by_s: float) -> None:
        """Set its wall clock, forward or back."""
        self._off += by_s
        self._write()

    def pass_time(self, seconds: float) -> None:
        """Let time pass at once, by all clocks, as for a machine that stood still."""
        self._passed += seconds
        self._write()

    def _write(self) -> None:
        with self._path.open("r+b") as file:
            file.write(_OFFSETS.pack(self._passed, self._off))


def _put_in(path: str) -> None:
    with open(path, "r+b") as file:
        offsets = mmap.mmap(file.fileno(), _OFFSETS.size)
    monotonic, wall = time.monotonic, time.time
    read = _OFFSETS.unpack_from
    vars(time).update(
        monotonic=lambda: monotonic() + read(offsets)[0],
        time=lambda: wall() + sum(read(offsets)),
    )


if __name__ == "__main__":
    _put_in(os.environ[VARIABLE])
    from tests.live import window

    sys.exit(window.main())
