"""What the image installs, run as the image runs it: no root, no capability, nothing to write to.

There is no container engine here; `deploy/install.sh` and the kernel's own means are what it does.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.deploy.test_pins import pins
from tests.live.confined import USER, confined, why_not
from tests.live.ports import HOST, free_port
from tests.live.server import Server
from tests.select_service.edge.serving import PROMPT, worker

pytestmark = [pytest.mark.heavy, pytest.mark.e2e, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
BASE = Path(sys.base_prefix)  # the interpreter's own files


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder that somebody else can reach: those of pytest are closed to all but their owner."""
    with tempfile.TemporaryDirectory(prefix="select-service-") as name:
        path = Path(name)
        path.chmod(0o755)
        (path / "root").mkdir()
        yield path


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What `deploy/install.sh` makes of this checkout, once for all processes that run tests.

    It takes a minute, and whoever takes over some of these tests would build it again.
    """
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    base = tmp_path_factory.getbasetemp()
    ours = base if run is None else base.parent
    home = Path(tempfile.gettempdir(), f"select-service-{run or os.getpid()}")
    users = ours / "users-of-what-is-installed"
    with alone(ours):
        count = int(users.read_text()) if users.exists() else 0
        if not count:
            home.mkdir()
            home.chmod(0o755)
            install(home / "installed")
        users.write_text(str(count + 1))
    try:
        yield home / "installed"
    finally:
        with alone(ours):
            count = int(users.read_text()) - 1
            users.write_text(str(count))
            if not count:
                shutil.rmtree(home)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    with (folder / "installing").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def install(target: Path) -> None:
    python = str(BASE / "bin" / f"python3.{sys.version_info.minor}")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment["CC"] = str(ROOT / "tests/live/quick_cc")
    done = subprocess.run(
        [ROOT / "deploy/install.sh", target, python],
        check=False, capture_output=True, text=True, env=environment,
    )  # fmt: skip
    if done.returncode:
        shutil.rmtree(target.parent)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture
def state(place: Path) -> Path:
    path = place / "state"
    path.mkdir(mode=0o700, exist_ok=True)
    os.chown(path, USER, USER)
    return path


def test_what_is_installed_is_what_is_pinned(installed: Path) -> None:
    code = (
        "import importlib.metadata as m, json;"
        "print(json.dumps({d.metadata['Name'].lower().replace('_', '-'): d.version"
        " for d in m.distributions()}))"
    )
    said = subprocess.run(
        [installed / "bin/python", "-I", "-c", code], check=True, capture_output=True, text=True
    )
    found = json.loads(said.stdout)
    assert found.pop("select-service")
    assert found == pins("requirements.txt"), "no pip, no setuptools, nothing by the way"


def test_the_image_sees_the_kernels_it_built(installed: Path, tmp_path: Path) -> None:
    """Its builder looks for them where the sources lie, too, which have none."""
    stage = (ROOT / "deploy/Dockerfile").read_text("utf-8").partition("\nFROM ${PYTHON}\n")[0]
    last = re.compile(r"^RUN deploy/install.sh (\S+) python \\\n    && (.*)$", re.MULTILINE)
    [(place, look)] = last.findall(stage)
    for package in ("indexer", "select_service"):
        without = shutil.ignore_patterns("*.so", "_*.c", "__pycache__")
        shutil.copytree(ROOT / package, tmp_path / package, ignore=without)

    def looked(**more: str) -> subprocess.CompletedProcess[str]:
        command = ["sh", "-c", look.replace(place, str(installed))]
        return subprocess.run(
            command, cwd=tmp_path, env=os.environ | more,
            check=False, capture_output=True, text=True,
        )  # fmt: skip

    assert looked().returncode == 0, looked().stderr
    assert "'select_service._speed': False" in looked(SELECT_SERVICE_PURE="1").stderr


def test_a_wrong_hash_is_refused(place: Path) -> None:
    """`--require-hashes` does what is expected of it here, whatever pip is configured to."""
    text = (ROOT / "deploy/requirements-build.txt").read_text("utf-8")
    wrong = place / "wrong.txt"
    wrong.write_text(re.sub("sha256:[0-9a-f]{64}", "sha256:" + "0" * 64, text))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"),
            *("--dest", place / "wrong", "-r", wrong),
        ],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr
    assert not list((place / "wrong").glob("*.whl"))


@pytest.fixture
def jail() -> None:
    """Skip where nothing can be confined."""
    if why := why_not():
        pytest.skip(f"nothing can be confined here: {why}")


@pytest.mark.usefixtures("jail")
def test_the_jail_is_one(place: Path, installed: Path, state: Path) -> None:
    python = str(installed / "bin/python")

    def write(path: str) -> str:
        code = f"open({path!r}, 'w')"
        done = subprocess.run(
            confined(place / "root", [BASE, installed], [state], [python, "-c", code]),
            check=False, capture_output=True, text=True,
        )  # fmt: skip
        return done.stderr.strip().rpartition("\n")[2]

    for path in ("/probe", "/tmp/probe", "/dev/probe", f"{installed}/probe"):
        assert "OSError" in write(path) or "PermissionError" in write(path), path
    assert "FileNotFoundError" in write("/home/probe/x")
    assert write(f"{state}/probe") == ""
    (state / "probe").unlink()


@pytest.mark.usefixtures("jail")
def test_it_serves_without_any_privilege(place: Path, installed: Path, tmp_path: Path) -> None:
    command = confined(
        place / "root", [BASE, installed], [], [str(installed / "bin/select-service")]
    )
    arguments = ("--host", HOST, "--replica-sync-port", str(free_port()))
    with Server(tmp_path / "log", command=command, args=arguments) as server:
        assert server.process is not None
        status = Path(f"/proc/{server.process.pid}/status").read_text()
        said = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert said["Uid"].split() == [str(USER)] * 4
        assert said["Gid"].split() == [str(USER)] * 4
        assert said["Groups"].strip() == ""
        assert {said[f"Cap{kind}"] for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {"0" * 16}
        assert said["NoNewPrivs"] == "1"
        assert server.request("POST", "/workers", worker(1)).status == 201
        body = {**PROMPT, "reservation_id": "r"}
        assert server.request("POST", "/select_and_reserve", body).status == 200
        for path in ("/ready", "/metrics", "/console", "/openapi.json", "/dump"):
            assert server.request("GET", path).status == 200, path
    assert server.stop() == 0
    log = (tmp_path / "log").read_text()
    assert "Traceback" not in log
    kernels = re.search(r"kernels=(\d+)/(\d+)", log)
    assert kernels
    assert int(kernels[1]) == int(kernels[2]) > 0


@pytest.mark.usefixtures("jail")
def test_state_is_all_it_writes(place: Path, installed: Path, state: Path, tmp_path: Path) -> None:
    command = confined(
        place / "root", [BASE, installed], [state], [str(installed / "bin/select-service")]
    )
    arguments = ("--host", HOST, "--state-dir", str(state), "--durability", "strict")
    for name in ("first", "second"):
        log = tmp_path / name
        with Server(log, command=command, args=arguments) as server:
            if name == "first":
                assert server.request("POST", "/workers", worker(1)).status == 201
                body = {**PROMPT, "reservation_id": "r"}
                assert server.request("POST", "/select_and_reserve", body).status == 200
            else:
                assert server.request("DELETE", "/reservations/r").status == 200
        assert server.stop() == 0
        assert "Traceback" not in log.read_text()
    assert {one.stat().st_uid for one in state.iterdir()} == {USER}
    assert not [one for one in state.iterdir() if one.stat().st_mode & 0o077]
