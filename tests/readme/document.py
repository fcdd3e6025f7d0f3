"""README.md and its chapters (deploy/docs) as examples: commands and Python with what they print.

A `console` block is a sequence of `$ curl …` lines (a quoted body may run over several) and what
follows each; those of a document build on each other, and those of a chapter on the tour's. A
`python` block directly before a `text` block prints it.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.wait import PATIENCE_S

README = Path(__file__).parents[2] / "README.md"
MIGRATION = README.parent / "deploy" / "MIGRATION.md"
DOCS = README.parent / "deploy" / "docs"
CHAPTERS = sorted(DOCS.glob("*.md"))
INDEX = DOCS / "README.md"
TOUR = DOCS / "tour.md"
REFERENCE = README.parent / "deploy" / "reference"
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PORT_IN_TEXT = "localhost:8092"


@dataclass(frozen=True)
class Exchange:
    """One curl command of a document and what it shows."""

    text: str
    method: str
    path: str
    headers: dict[str, str]
    body: bytes | None
    expected_headers: list[str]
    expected: object


@dataclass(frozen=True)
class Program:
    """One Python example and what it prints."""

    source: str
    expected: str


def blocks(file: Path = README) -> list[tuple[str, str]]:
    """(language, text) of every fenced block, in order."""
    return FENCE.findall(file.read_text("utf-8"))


def headings(text: str) -> list[tuple[int, str]]:
    """Level and title of every heading, in order."""
    plain = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return [(len(one), title) for one, title in re.findall(r"^(#+) (.*)$", plain, re.MULTILINE)]


def anchor(title: str) -> str:
    """What GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def exchanges(file: Path = README) -> list[Exchange]:
    """Every curl command of every console block of a document, in order."""
    found = (text for language, text in blocks(file) if language == "console")
    return [one for text in found for one in _console(text)]


def with_exchanges() -> list[Path]:
    """README.md, and the chapters that show curl commands; the tour among them."""
    return [README, *(file for file in CHAPTERS if exchanges(file))]


def programs() -> list[Program]:
    """Every Python block that is followed by its output, of all documents."""
    return [
        Program(text, after)
        for found in map(blocks, (README, *CHAPTERS, MIGRATION))
        for (language, text), (next_language, after) in itertools.pairwise(found)
        if language == "python" and next_language == "text"
    ]


def _console(text: str) -> list[Exchange]:
    found = []
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        lines = part.splitlines()
        count = 1
        while "\n".join(lines[:count]).count("'") % 2:  # a body that is not closed yet
            count += 1
        found.append(_exchange("\n".join(lines[:count]), lines[count:]))
    return found


def _exchange(command: str, output: list[str]) -> Exchange:
    """Read the few options of curl that the documents use; an unknown one is an error."""
    arguments = shlex.split(command)
    if arguments.pop(0) != "curl":
        raise ValueError(f"not a curl command: {command}")
    method, body, url, headers = "GET", None, "", {}
    while arguments:
        word = arguments.pop(0)
        if word == "-X":
            method = arguments.pop(0)
        elif word == "-H":
            name, _, value = arguments.pop(0).partition(": ")
            headers[name] = value
        elif word == "-d":
            method = "POST" if method == "GET" else method
            body = arguments.pop(0).encode()
        elif word in ("-D", "-sw"):
            arguments.pop(0)
        else:
            if word.startswith("-") or url:
                raise ValueError(f"unknown word {word!r} in: {command}")
            url = word
    if not url.startswith(PORT_IN_TEXT):
        raise ValueError(f"not our service: {command}")
    shown = [line for line in output if line.strip()]
    start = next(i for i, line in enumerate(shown) if line[0] in "[{")
    return Exchange(
        text=command,
        method=method,
        path=url.removeprefix(PORT_IN_TEXT),
        headers=headers,
        body=body,
        expected_headers=shown[:start],
        expected=json.loads("\n".join(shown[start:])),
    )


def run_program(source: str, folder: Path, port: int | None = None) -> tuple[int, str, str]:
    """Run a printed program as it is, against a service on this port; returns code and outputs."""
    script = folder / "program.py"
    script.write_text(source.replace(PORT_IN_TEXT, f"127.0.0.1:{port}"), "utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def ray_program() -> str:
    """The Python block that needs Ray."""
    return _ray_programs()[0]


def ray_llm_program() -> str:
    """The Python block that needs Ray Serve LLM."""
    return _ray_programs()[2]


def ray_kv_aware_program() -> str:
    """The Python block with Ray Serve LLM's own KV-aware router."""
    return _ray_programs()[1]


def _ray_programs() -> list[str]:
    return [text for language, text in blocks(DOCS / "ray.md") if language == "python"]
