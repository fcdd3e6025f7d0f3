"""The image of deploy/Dockerfile, built by Debian's buildah on a base that debootstrap makes.

No registry is asked: the base stands in for the one that the Dockerfile names, under its name, and
is kept in .manifests, as what tools.py fetches. Containers are started with the kernel's own means,
as a runtime with --read-only, --cap-drop ALL and no-new-privileges would.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tests.deploy.manifests import DEPLOY
from tests.deploy.tools import ROOT
from tests.live import confined

DEBIAN = "bookworm"
MIRROR = "http://deb.debian.org/debian"
PACKAGES = "python3,python3-dev,python3-venv,ca-certificates"
BASE = ROOT / f"base-{DEBIAN}.tar"
CHECKOUT = DEPLOY.parent
COMPILER = CHECKOUT / "tests/live/quick_cc"
AUTHORITIES = Path("/etc/ssl/certs/ca-certificates.crt")
"""Of this machine, where the registries' are: pip in the image knows no other."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

TIMEOUT_S = 1500


class ToolFailed(Exception):
    """A tool ended with an error."""


def why_not() -> str | None:
    """Why no image can be made here; None if it can."""
    for tool in ("buildah", "debootstrap"):
        if shutil.which(tool) is None:
            return f"{tool} is missing: make buildah"
    return confined.why_not()


def base_name() -> str:
    """The base image, as the Dockerfile names it."""
    (name,) = re.findall(r"^ARG PYTHON=(\S+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert isinstance(name, str)
    return name


def make_base(folder: Path) -> None:
    """Debian with its Python, and no more than the base image has for us, as a tar file.

    Raises:
        ToolFailed: it cannot be fetched.
    """
    if BASE.exists():
        return
    tree = folder / "base"
    flags = ("--variant=minbase", f"--include={PACKAGES}")
    # what it mounts there ends with it
    run("unshare", "--mount", "debootstrap", *flags, DEBIAN, str(tree), MIRROR)
    (tree / "usr/local/bin/python").symlink_to("/usr/bin/python3")
    shutil.rmtree(tree / "var/cache/apt/archives")
    fresh = folder / "base.tar"
    run("tar", "--create", "--file", str(fresh), "--directory", str(tree), "--exclude=./dev/*", ".")
    ROOT.mkdir(exist_ok=True)
    shutil.move(fresh, BASE)


def can_overlay(folder: Path) -> bool:
    """Whether the kernel lays one folder over another there."""
    names = ("lower", "upper", "work", "merged")
    for name in names:
        (folder / name).mkdir()
    lower, upper, work, merged = (str(folder / name) for name in names)
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    command = ["unshare", "--mount", "mount", "-t", "overlay", "overlay", "-o", options, merged]
    return not subprocess.run(command, check=False, capture_output=True).returncode


class Builder:
    """Images in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        where = ("--root", str(folder / "images"), "--runroot", str(folder / "run"))
        driver = "overlay" if can_overlay(folder) else "vfs"  # the latter copies every layer
        self._command = ("buildah", *where, "--storage-driver", driver)

    def __call__(self, *arguments: str) -> str:
        """Run buildah; returns what it prints, without the line's end."""
        return run(*self._command, *arguments).strip()

    def build(self, name: str) -> None:
        """Build the Dockerfile as it is."""
        container = self("from", "scratch")
        self("add", "--quiet", container, str(BASE), "/")
        # nothing of them is what is tested: a compiler that is quick, and where pip may ask
        ours = (f"PATH={PATH}", "CC=/quick_cc", f"PIP_CERT={AUTHORITIES}")
        self("config", *(word for one in ours for word in ("--env", one)), container)
        self("commit", "--quiet", "--rm", container, f"docker.io/library/{base_name()}")
        mounts = [f"{COMPILER}:/quick_cc:ro", f"{AUTHORITIES}:{AUTHORITIES}:ro"]
        self(
            *("build", "--quiet", "--format", "docker", "--pull-never", "--isolation", "chroot"),
            *(word for mount in mounts for word in ("--volume", mount)),
            *("--tag", name, "--file", str(DEPLOY / "Dockerfile"), str(CHECKOUT)),
        )

    def config(self, name: str) -> dict[str, Any]:
        """What a runtime starts it by."""
        inspected: dict[str, Any] = json.loads(self("inspect", "--type", "image", name))
        return dict(inspected["Docker"]["config"])

    def mount(self, name: str) -> Path:
        """The files of a new container."""
        return Path(self("mount", self("from", "--pull-never", name)))


def in_container(files: Path, config: dict[str, Any], command: list[str]) -> list[str]:
    """What runs a command in it, in the place of the process that is started: as its user, without
    privileges, with a root that cannot be written."""
    user, _, group = config["User"].partition(":")
    lines = [
        f"root={shlex.quote(str(files))}",
        'mount --bind "$root" "$root"',
        'touch "$root/etc/hosts" && mount --bind /etc/hosts "$root/etc/hosts"',  # as runtimes do
        'mount -o remount,bind,ro,nosuid,nodev "$root"',
        'mount --rbind /proc "$root/proc"',
        'mount -t tmpfs -o mode=755,size=1m none "$root/dev"',
    ]
    for device in confined.DEVICES:
        lines += [f'touch "$root{device}"', f'mount --bind {device} "$root{device}"']
    flags = f"--reuid {user} --regid {group} --clear-groups --no-new-privs"
    flags += " --inh-caps=-all --ambient-caps=-all --bounding-set=-all"
    environment = shlex.join(config["Env"])
    lines += ['cd "$root"', f'exec env -i {environment} chroot . setpriv {flags} "$@"']
    script = "set -eu\n" + "\n".join(lines)
    return ["unshare", "--mount", "sh", "-c", script, "container", *command]


def run(*command: str) -> str:
    """Run a tool; what it prints.

    Raises:
        ToolFailed: with what it said.
    """
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=TIMEOUT_S,
        env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"},
    )  # fmt: skip
    if done.returncode:
        raise ToolFailed(f"{command[0]}: {(done.stdout + done.stderr)[-3000:]}")
    return done.stdout
