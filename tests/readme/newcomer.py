"""What a newcomer types, in a fresh clone, with a clock: `make newcomer` (`--folder`: keep it).

The first start, the README's five minutes, the gateway of `gateways.md` with its engines, and those
examples that need neither Ray nor a cluster. The lines come from the documents. It ends with a
table of times, and with 1 if something did not do what the documents say.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import httpx

from tests.live.ports import HOST, free_port
from tests.readme.document import DOCS, PORT_IN_TEXT, README
from tests.readme.test_five_minutes import BRIEF, typed
from tests.wait import block_until

ROOT: Final = README.parent
START_S: Final = 600.0
"""Longest wait for a server; the first one compiles."""
COMMAND_S: Final = 300.0
PROGRAMS: Final = ("embedded/embedded.py", "planner/plan.py")


def say(what: str, seconds: float) -> None:
    """Show a row of the table."""
    sys.stdout.write(f"{seconds:8.1f} s  {what}\n")
    sys.stdout.flush()


class Newcomer:
    """Somebody in a fresh clone, and what took how long."""

    def __init__(self, clone: Path) -> None:
        self.clone = clone
        self.port = free_port()
        self.times: list[tuple[str, float]] = []
        made = ("VIRTUAL_ENV", "MAKEFLAGS", "MAKELEVEL", "PYTHONPATH")
        self.environment = {k: v for k, v in os.environ.items() if k not in made}

    @contextlib.contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Measure what is done inside."""
        began = time.monotonic()
        yield
        self.times.append((what, time.monotonic() - began))
        say(*self.times[-1])

    def run(self, line: str) -> str:
        """Run a line of the documents to its end, and return what it printed.

        Raises:
            SystemExit: it failed.
        """
        done = subprocess.run(
            shlex.split(line.replace(PORT_IN_TEXT, f"{HOST}:{self.port}")),
            cwd=self.clone,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{line}: ended with {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    @contextlib.contextmanager
    def running(self, line: str, what: str, url: str) -> Iterator[None]:
        """Start a server of the documents, and measure how long it takes to answer at `url`."""
        server = subprocess.Popen(
            shlex.split(line), cwd=self.clone, env=self.environment, stdout=subprocess.DEVNULL
        )
        try:
            with self.timed(what):
                block_until(lambda: _answers(url, server), deadline_s=START_S)
            yield
        finally:
            server.terminate()
            server.wait(timeout=COMMAND_S)


def _answers(url: str, server: subprocess.Popen[bytes]) -> bool:
    if server.poll() is not None:
        raise SystemExit(f"a server ended with {server.returncode}")
    try:
        return httpx.get(url).is_success
    except httpx.HTTPError:
        return False


def five_minutes(who: Newcomer) -> None:
    """Step 2 and 3 of the README; with fewer requests than one would watch."""
    demo, *commands = typed()
    (arguments,) = re.findall(r'^make demo ARGS="(.*)"$', demo)
    with who.timed("make demo: two engines, 60 requests, the audit"):
        address = arguments.replace(PORT_IN_TEXT, f"{HOST}:{who.port}")
        shown = who.run(shlex.join(["make", "demo", f"ARGS={address} {' '.join(BRIEF)}"]))
    if not re.search(r"hit=[1-9]", shown):
        raise SystemExit(f"no prompt was warm:\n{shown}")
    url = f"http://{HOST}:{who.port}"
    last = httpx.get(f"{url}/decisions").json()["decisions"][0]["decision_id"]
    for command in commands:
        with who.timed(command):
            who.run(f"{re.sub(r'ID$', last, command)} --url {url}")


def gateway(who: Newcomer) -> None:
    """The gateway of the documents, asked twice: the second time its prompt is warm."""
    text = (DOCS / "gateways.md").read_text("utf-8")
    (shell,) = re.findall(r"```sh\n(make run\n.*?)```", text, re.DOTALL)
    _, *engines, example, question = shell.splitlines()
    service = f"--service http://{HOST}:{who.port}"
    with contextlib.ExitStack() as stack:
        for typed_line in engines:
            port = free_port()
            line = re.sub(r"--port \d+", f"--port {port} {service}", typed_line)
            stack.enter_context(who.running(line, "an engine", f"http://{HOST}:{port}/health"))
        port = free_port()
        line = re.sub(r"--port \d+", f"--port {port} {service}", example)
        stack.enter_context(who.running(line, "the gateway", f"http://{HOST}:{port}/health"))
        asked = re.sub(r"localhost:\d+", f"{HOST}:{port}", question)
        for what in ("a chat through the gateway", "the same chat again"):
            with who.timed(what):
                answer = who.run(asked)
            if '"choices"' not in answer:
                raise SystemExit(f"{asked}: {answer}")


def main() -> None:
    """Play it in a clone of what is committed here."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--folder", type=Path, help="of the clone; default: one that is removed")
    folder: Path | None = parser.parse_args().folder
    with tempfile.TemporaryDirectory(prefix="newcomer-") as temporary:
        clone = folder or Path(temporary) / "select-service"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        who = Newcomer(clone)
        health = f"http://{HOST}:{who.port}/health"
        with who.running(f"make run PORT={who.port}", "make run, to /health", health):
            five_minutes(who)
            gateway(who)
        for program in PROGRAMS:
            with who.timed(f"examples/{program}"):
                who.run(f".venv/bin/python examples/{program}")
    say("in all", sum(seconds for _, seconds in who.times))


if __name__ == "__main__":
    main()
