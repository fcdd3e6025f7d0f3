"""`select-service leave`: makes the service on this machine announce that it will leave.

Meant for a preStop hook: Kubernetes sends SIGTERM once the hook has returned. By then clients
know, and the service ends as soon as it is not needed. No token is required: a user that may
signal the process may end it anyway.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from select_service.standard_output import parse_command

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from select_service.standard_output import Commands

WORD: Final = signal.SIGUSR1
LOOK_S: Final = 0.1
_NAMES: Final = (b"select-service", b"select_service")
_WORDS_MAX: Final = 8  # an interpreter, its flags, our name, and the first argument


def main(
    argv: Sequence[str],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Signal a process and wait for the notice to spread; return 1 if it cannot be signalled."""
    args = parse_command(add_commands, argv)
    if not is_service(args.pid):  # SIGUSR1 kills a process that does not handle it
        return _fail(f"process {args.pid} is no select-service")
    try:
        os.kill(args.pid, WORD)
    except OSError as error:
        return _fail(f"cannot signal process {args.pid}: {error}")
    until = clock() + args.wait_s
    while clock() < until and is_service(args.pid):
        sleep(LOOK_S)
    return 0


def add_commands(commands: Commands) -> None:
    """Add the command of this module."""
    parser = commands.add_parser(
        "leave",
        help="Announces that the service on this machine will stop.",
        description="Notifies a service on this machine that it will have to go (SIGUSR1): /ready "
        "is 503 from now on, replicas know, every answer closes its connection, and all requests "
        "are served until SIGTERM. For preStop hooks.",
        examples="select-service leave --pid 4711 --wait-s 5",
    )
    parser.add_argument(
        "--pid",
        type=int,
        default=1,
        help="The process of the service. Default: %(default)s, as in a container.",
    )
    parser.add_argument(
        "--wait-s",
        type=float,
        default=5.0,
        metavar="S",
        help="Return after so many seconds, or when it has gone. Default: %(default)s.",
    )


def _fail(reason: str) -> int:
    sys.stderr.write(f"select-service leave: {reason}\n")
    return 1


def is_service(pid: int) -> bool:
    """Whether a process is a running service."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return serves([word for word in words if word])


def serves(words: Sequence[bytes]) -> bool:
    """Whether this command line starts the server, not another subcommand."""
    names = [word.rpartition(b"/")[2] for word in words[:_WORDS_MAX]]
    at = next((at for at, name in enumerate(names) if name in _NAMES), None)
    if at is None or (at and not names[0].startswith(b"python")):
        return False
    return all(word.startswith(b"-") for word in words[at + 1 : at + 2])
