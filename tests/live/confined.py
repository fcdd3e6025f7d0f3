"""A command as in a container: a root of its own that nobody can write, no privilege, not root.

Made of mount namespaces and `setpriv`, for machines without a container engine; needs root itself.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

USER = 65532
SYSTEM = ("/bin", "/lib", "/lib64", "/usr", "/etc")
DEVICES = ("/dev/null", "/dev/urandom")


def why_not() -> str | None:
    """Why nothing can be confined here; None if it can."""
    for tool in ("unshare", "setpriv", "chroot", "mount"):
        if shutil.which(tool) is None:
            return f"{tool} is missing"
    if os.geteuid():
        return "mounting takes root"
    done = subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"],
        check=False,
        capture_output=True,
    )
    return None if done.returncode == 0 else done.stderr.decode().strip()


def confined(
    root: Path, readable: Sequence[Path], writable: Sequence[Path], command: Sequence[str]
) -> list[str]:
    """Return what runs a command, in the place of the process that is started.

    Args:
        root: an empty directory.
        readable: directories that the command sees besides the system's, under their names.
        writable: likewise, and may write.
        command: the program under its absolute name, and arguments; others may be put behind.
    """
    lines = [f"root={shlex.quote(str(root))}", 'mount -t tmpfs -o mode=755,size=1m none "$root"']
    for path in (*map(Path, SYSTEM), *readable, *writable):
        if not path.exists():
            continue
        place = f'"$root"{shlex.quote(str(path))}'
        options = "bind" if path in writable else "bind,ro"
        lines += [
            f"mkdir -p {place}",
            f"mount --bind {shlex.quote(str(path))} {place}",
            f"mount -o remount,{options},nosuid,nodev {place}",
        ]
    lines += ['mkdir -p "$root/dev" "$root/proc" "$root/tmp"', 'mount --rbind /proc "$root/proc"']
    for device in DEVICES:
        lines += [f'touch "$root{device}"', f'mount --bind {device} "$root{device}"']
    lines += [
        'mount -o remount,ro "$root"',
        'cd "$root"',
        f"exec chroot . setpriv --reuid {USER} --regid {USER} --clear-groups --no-new-privs"
        ' --inh-caps=-all --ambient-caps=-all --bounding-set=-all "$@"',
    ]
    script = "set -eu\n" + "\n".join(lines)
    return ["unshare", "--mount", "sh", "-c", script, "confined", *command]
