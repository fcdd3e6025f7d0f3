"""`select-service leave`: has the service on this machine say that it will go, before it must.

What a preStop hook runs: Kubernetes sends SIGTERM when it has returned. By then the news has
travelled, and the service ends as soon as nobody needs it. No token is asked for: who may signal
the process may end it.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["main"]

WORD: Final = signal.SIGUSR1
LOOK_S: Final = 0.1
_NAMES: Final = (b"select-service", b"select_service")
_WORDS_MAX: Final = 8  # of an interpreter and its own flags, our name, and what comes first then


def main(
    argv: Sequence[str],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Tell a process, and wait until the news has had its time; 1 when there is none to tell."""
    parser = argparse.ArgumentParser(
        prog="select-service leave",
        description="Tells a service on this machine that it will have to go (SIGUSR1): /ready is "
        "503 from now on, replicas know, every answer closes its connection, and all requests are "
        "served until SIGTERM. For preStop hooks.",
    )
    parser.add_argument("--pid", type=int, default=1, help="of the service (1: in a container)")
    parser.add_argument(
        "--wait-s", type=float, default=5.0, help="return after so long, or when it has gone"
    )
    args = parser.parse_args(argv)
    if not is_service(args.pid):  # to anybody else that signal is the end
        return _fail(f"process {args.pid} is no select-service")
    try:
        os.kill(args.pid, WORD)
    except OSError as error:
        return _fail(f"cannot tell process {args.pid}: {error}")
    until = clock() + args.wait_s
    while clock() < until and is_service(args.pid):
        sleep(LOOK_S)
    return 0


def _fail(reason: str) -> int:
    sys.stderr.write(f"select-service leave: {reason}\n")
    return 1


def is_service(pid: int) -> bool:
    """Whether a process is one that serves."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return serves([word for word in words if word])


def serves(words: Sequence[bytes]) -> bool:
    """Whether a process that was started with these words serves: no other command of ours does."""
    names = [word.rpartition(b"/")[2] for word in words[:_WORDS_MAX]]
    at = next((at for at, name in enumerate(names) if name in _NAMES), None)
    if at is None or (at and not names[0].startswith(b"python")):
        return False
    return all(word.startswith(b"-") for word in words[at + 1 : at + 2])
