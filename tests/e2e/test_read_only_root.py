"""A file system that cannot be written, a user nobody knows, no HOME: every command starts, or says
in one line what it needs."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live.http import exchange
from tests.live.ports import free_port
from tests.wait import PATIENCE_S, block_until

pytestmark = pytest.mark.e2e

WRITABLE = Path("/srv")
"""Covered in the mount namespace of a test alone."""

HERE = Path(__file__).parents[2]
PROFILE = HERE / "tests/golden/planner/profile_a"
PLANNER = (
    *("select_service.planner", "run", "--connector", "virtual", "--model-name", "m"),
    *("--profile-results-dir", str(PROFILE), "--metrics-source", "selector"),
    *("--selector", "http://127.0.0.1:9"),
)
SERVICE = ("select_service", "--port", "0")
CHAT = ("--workload", "chat,requests=20", "--workers", "2", "--quiet")
SIMULATE = ("select_service.simulator", "run", *CHAT)


@pytest.fixture(autouse=True, scope="module")
def _possible() -> None:
    if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "setpriv", "mount"))):
        pytest.skip("another user in a mount namespace of its own takes root and util-linux")


def confined(*command: str, is_writable: bool = False) -> list[str]:
    """A command for a random user on a read-only root, with one directory to write to at most."""
    steps: list[str] = []
    for path in (Path(sys.base_prefix).resolve(), HERE):
        steps += _opened(path)
    if is_writable:
        steps.append(f"mount -t tmpfs -o mode=0777 tmpfs {WRITABLE}")
    script = " && ".join([*steps, "mount -o remount,ro,bind /", 'cd / && exec "$@"'])
    user = ("setpriv", "--reuid", "12345", "--regid", "0", "--clear-groups")
    return [
        *("unshare", "--mount", "sh", "-c", script, "sh"),
        *("env", "-i", "PATH=/usr/bin:/bin"),
        *(*user, sys.executable, "-m", *command),
    ]


def _opened(path: Path) -> list[str]:
    """How a directory is shown to everybody that is inside one of root's own, like /root."""
    closed = [one for one in path.parents if not one.stat().st_mode & 0o001]
    if not closed:
        return []
    return [
        f"mount --bind {path} {WRITABLE}",
        f"mount -t tmpfs -o mode=0755 tmpfs {closed[-1]}",
        f"mkdir -p {path}",
        f"mount --move {WRITABLE} {path}",
        f"mount -o remount,ro {closed[-1]}",
    ]


def ended(*command: str) -> tuple[int, str]:
    """Run to the end; the exit code and standard error."""
    process = subprocess.run(
        confined(*command),
        check=False,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    return process.returncode, process.stderr


@contextlib.contextmanager
def running(
    port: int, *command: str, is_writable: bool = False
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that answers at a port."""
    process = subprocess.Popen(
        confined(*command, "--port", str(port), is_writable=is_writable), stderr=subprocess.PIPE
    )

    def answers() -> bool:
        assert process.poll() is None, f"it ended with {process.returncode}"
        with contextlib.suppress(OSError):
            return exchange(port, "GET", "/health").status == 200
        return False

    try:
        block_until(answers, lambda: "nobody answers")
        yield process
    finally:
        process.terminate()
        process.communicate()


@pytest.mark.parametrize(
    "command",
    [
        ("select_service", "--host", "127.0.0.1"),
        (*PLANNER, "--connector", "dry-run"),
    ],
    ids=["service", "planner"],
)
def test_what_needs_no_file_starts(command: tuple[str, ...]) -> None:
    with running(free_port(), *command):
        pass


def test_a_planner_with_a_state_directory_starts() -> None:
    with running(free_port(), *PLANNER, "--state-dir", f"{WRITABLE}/s", is_writable=True) as one:
        pass
    assert one.returncode == 0


def test_the_demo_and_a_simulation_run() -> None:
    demo = ("select_service", "demo", "--plain", "--requests", "10", "--rate", "50")
    for command in (demo, SIMULATE, (*SIMULATE, "--seeds", "2", "--jobs", "2")):
        assert ended(*command) == (0, "")


@pytest.mark.parametrize(
    ("command", "code", "needs"),
    [
        ((*SERVICE, "--state-dir", "/state"), 1, "/state: Read-only file system"),
        ((*SERVICE, "--record", "/record"), 1, "/record: Read-only file system"),
        ((*SERVICE, "--uds", "/x.sock"), 1, "/x.sock: Read-only file system"),
        (("select_service", "keys", "new", "/key"), 1, "/key: Read-only file system"),
        (("select_service", "demo", "--plain", "--snapshot", "/x.svg"), 1, "/x.svg: Permission de"),
        (PLANNER, 1, "--state-dir, XDG_RUNTIME_DIR or TMPDIR"),
        ((*PLANNER, "--state-dir", "/state"), 1, "/state: Read-only file system"),
        ((*SIMULATE, "--out", "/x.json"), 2, "/x.json: Permission denied"),
        ((*SIMULATE, "--report", "/x.html"), 2, "/x.html: Permission denied"),
        (
            ("select_service.planner", "profile", "inspect", str(PROFILE), "--out", "/x.html"),
            *(1, "/x.html: Permission denied"),
        ),
    ],
)
def test_what_needs_a_file_says_so_in_one_line(
    command: tuple[str, ...], code: int, needs: str
) -> None:
    found, errors = ended(*command)
    warnings = [line for line in errors.splitlines() if "[warning" in line or " WARNING " in line]
    lines = [line for line in errors.splitlines() if line not in warnings]
    assert (found, len(lines)) == (code, 1), errors
    assert needs in lines[0]
