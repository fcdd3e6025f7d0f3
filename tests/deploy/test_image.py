"""The Dockerfile, built and run: as nobody, on a root that cannot be written, with all kernels."""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from select_service.version import __version__
from tests.deploy import image as images
from tests.deploy.image import in_container
from tests.deploy.manifests import DEPLOY
from tests.live.ports import free_port
from tests.live.server import Server
from tests.wait import PATIENCE_S, block_until

pytestmark = [pytest.mark.heavy, pytest.mark.e2e, pytest.mark.timeout(1800)]

COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))["services"]
NAME = COMPOSE["select-service"]["image"]


class Image(NamedTuple):
    """The files of a container, and how one is started."""

    files: Path
    config: dict[str, Any]

    def command(self, *arguments: str, entrypoint: tuple[str, ...] | None = None) -> list[str]:
        command = self.config["Entrypoint"] if entrypoint is None else entrypoint
        return in_container(self.files, self.config, [*command, *arguments])

    def run(
        self, *arguments: str, entrypoint: tuple[str, ...] | None = None
    ) -> subprocess.CompletedProcess[str]:
        command = self.command(*arguments, entrypoint=entrypoint)
        return subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=PATIENCE_S
        )


def test_the_image_is_built_and_run(tmp_path: Path) -> None:
    """In one test: of several, every process that runs some would build it again."""
    with built() as image:
        started_by(image)
        serves_as_nobody_and_ends_when_asked(image, tmp_path)
        engines_of_compose_find_their_service(image, tmp_path)


@contextmanager
def built() -> Iterator[Image]:
    """The image, or a skip that says what is missing.

    Not in pytest's folder, which is closed to others than its owner.
    """
    if (why := images.why_not()) is not None:
        pytest.skip(why)
    with tempfile.TemporaryDirectory(prefix="select-service-image-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        try:
            images.make_base(folder)
        except images.ToolFailed as failed:
            pytest.skip(f"no base image can be made here: {failed}")
        builder = images.Builder(folder)
        try:
            builder.build(NAME)
            yield Image(builder.mount(NAME), builder.config(NAME))
        finally:
            builder("rm", "--all")  # which ends what is mounted, too


@contextmanager
def serving(image: Image, log: Path, *arguments: str) -> Iterator[Server]:
    """The service of the image on the loopback of this machine."""
    port = free_port()
    flags = ("--host=127.0.0.1", *arguments)
    with Server(log, command=image.command(), args=flags, port=port) as server:
        yield server


def status_of(server: Server) -> dict[str, str]:
    """What the kernel says of the process."""
    assert server.process is not None
    text = Path(f"/proc/{server.process.pid}/status").read_text("utf-8")
    return dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)


def started_by(image: Image) -> None:
    """What a runtime is given, and that nothing is left of the build."""
    config = image.config
    assert config["User"] == "65532:65532"
    assert config["Entrypoint"] == ["select-service"]
    assert not config.get("Cmd")
    assert config["ExposedPorts"].keys() == {"8092/tcp", "9092/tcp"}
    assert config["StopSignal"] in {"SIGTERM", "15"}
    assert config["Healthcheck"]["Test"][:2] == ["CMD", "python"]
    for left in ("src", "usr/bin/gcc", "opt/select-service/bin/pip"):
        assert not (image.files / left).exists(), f"{left} is for building only"
    assert image.run("--version").stdout.split()[-1] == __version__


def serves_as_nobody_and_ends_when_asked(image: Image, tmp_path: Path) -> None:
    check = image.config["Healthcheck"]["Test"][1:]

    def healthy(port: int) -> bool:
        command = [word.replace("8092", str(port)) for word in check]
        return image.run(*command[1:], entrypoint=(command[0],)).returncode == 0

    with serving(image, tmp_path / "log", "--log-format=json") as server:
        assert server.request("GET", "/health").status == 200
        status = status_of(server)
        assert set(status["Uid"].split()) == set(status["Gid"].split()) == {"65532"}
        assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
        assert status["NoNewPrivs"] == "1"
        assert healthy(server.port)
        assert image.run("-c", "touch /x", entrypoint=("sh",)).returncode != 0
        assert server.stop() == 0, server.log_tail()
        assert not healthy(server.port)
    lines = [json.loads(line) for line in (tmp_path / "log").read_text("utf-8").splitlines()]
    (listening,) = (line for line in lines if line["event"] == "listening")
    built, asked_for = listening["kernels"].split("/")
    assert built == asked_for != "0"


def engines_of_compose_find_their_service(image: Image, tmp_path: Path) -> None:
    """Its two services of ours, as compose.yaml starts them, on another port."""
    ours, engines = COMPOSE["select-service"], COMPOSE["engines"]
    flags = [one for one in ours["command"] if not one.startswith("--port=")]
    with serving(image, tmp_path / "log", *flags) as server:
        command = [word.replace(":8092", f":{server.port}") for word in engines["command"]]
        demo = subprocess.Popen(image.command(*command), stdout=subprocess.DEVNULL)
        try:
            block_until(lambda: selections(server) >= 20, server.log_tail)
            assert demo.poll() is None
        finally:
            demo.send_signal(getattr(signal, engines["stop_signal"]))
            assert demo.wait(PATIENCE_S) in {0, 130}
        assert server.stop() == 0, server.log_tail()


def selections(server: Server) -> float:
    text = server.request("GET", "/metrics").raw.decode()
    lines = (one for one in text.splitlines() if one.startswith("select_service_selections_total "))
    return float(next(lines).split()[1])
