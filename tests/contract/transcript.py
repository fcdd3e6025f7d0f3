"""Transcripts as data: where they lie, what a step is, what this product answers instead.

The format is described in tests/golden/contract/README.md. `replayer.py` plays what is read here,
`comparison.py` judges the answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "golden" / "contract"

# Every port of the recordings is 181xx; they move together to a free block.
SETTING = frozenset({"start", "http_peer"})  # lines that set the stage

RECORDED_PORT = re.compile(r"\b181(\d\d)\b")


@dataclass(frozen=True)
class Difference:
    """What this product answers where it differs from the recording, and by which D-number."""

    reason: str
    statuses: tuple[int, ...] | None = None
    responses: tuple[object, ...] | None = None
    header: str | None = None
    any_body: bool = False
    response_event: Mapping[str, Any] | None = None  # merged into a recorded replica event


@dataclass(frozen=True)
class Start:
    """One service of a transcript."""

    label: str
    env: Mapping[str, str]
    args: tuple[str, ...]  # without --port
    port: int | None

    @property
    def replica_port(self) -> int | None:
        """Where it publishes to replicas."""
        pairs = dict(zip(self.args[::2], self.args[1::2], strict=True))
        port = pairs.get("--replica-sync-port")
        return None if port is None else int(port)


@dataclass(frozen=True)
class Transcript:
    """One recorded scenario; ports are already moved to `base`."""

    name: str
    starts: tuple[Start, ...]  # those there from the beginning; others are steps
    http_peers: tuple[Mapping[str, Any], ...]
    steps: tuple[Mapping[str, Any], ...]
    differences: Mapping[int, Difference]

    @property
    def engine_ports(self) -> list[int]:
        """Ports on which a fake engine publishes."""
        return sorted({s["zmq_event"]["port"] for s in self.steps if "zmq_event" in s})

    @property
    def replica_ports(self) -> list[int]:
        """Ports on which the services publish to replicas."""
        return [start.replica_port for start in self.starts if start.replica_port is not None]

    @property
    def has_replica_events(self) -> bool:
        """Whether the wire between replicas was recorded."""
        return any("replica_event" in step for step in self.steps)


def names() -> list[str]:
    """Every transcript in the folder, by name."""
    return sorted(path.stem for path in FOLDER.glob("*.jsonl"))


def port_offsets(name: str) -> set[int]:
    """The last two digits of each port that the transcript mentions."""
    text = (FOLDER / f"{name}.jsonl").read_text("utf-8")
    return {int(digits) for digits in RECORDED_PORT.findall(text)}


def load(name: str, base: int) -> Transcript:
    """Read a transcript with its ports moved from 18100 to `base` (a multiple of 100)."""
    text = _move_ports((FOLDER / f"{name}.jsonl").read_text("utf-8"), base)
    lines = [json.loads(line) for line in text.splitlines()]
    lines[0]["start"] = "a"
    begin = next(at for at, line in enumerate(lines) if not SETTING.intersection(line))
    setting, steps = lines[:begin], lines[begin:]
    differing = _move_ports((FOLDER / "differences.json").read_text("utf-8"), base)
    return Transcript(
        name=name,
        starts=tuple(read_start(line) for line in setting if "start" in line),
        http_peers=tuple(line["http_peer"] for line in setting if "http_peer" in line),
        steps=tuple(steps),
        differences={
            int(step): _difference(entry)
            for step, entry in json.loads(differing).get(name, {}).items()
        },
    )


def _move_ports(text: str, base: int) -> str:
    return RECORDED_PORT.sub(lambda found: str(base + int(found[1])), text)


def read_start(line: Mapping[str, Any]) -> Start:
    """What a line says that starts a service."""
    pairs = list(zip(line["args"][::2], line["args"][1::2], strict=True))
    return Start(
        label=line["start"],
        env={k: v.replace("{DATA}", str(FOLDER)) for k, v in line["env"].items()},
        args=tuple(part for pair in pairs if pair[0] != "--port" for part in pair),
        port=next((int(value) for name, value in pairs if name == "--port"), None),
    )


def _difference(entry: Mapping[str, Any]) -> Difference:
    statuses = entry.get("status_in") or ([entry["status"]] if "status" in entry else None)
    responses: list[object] | None = None
    if "response" in entry:
        answer = entry["response"]
        responses = (
            answer["one_of"] if isinstance(answer, dict) and "one_of" in answer else [answer]
        )
    return Difference(
        reason=entry["d"],
        statuses=tuple(statuses) if statuses else None,
        responses=tuple(responses) if responses is not None else None,
        header=entry.get("header"),
        any_body=entry.get("any_body", False),
        response_event=entry.get("response_event"),
    )
