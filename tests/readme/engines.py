"""deploy/reference/engines.md: which engines' KV events are read, out of what the tests replay.

`python -m tests.readme.engines` (or `make readme`) writes it; `test_engines.py` fails when it
differs. A row is a file of messages that an engine's own encoder made (`tests/golden/events`,
decoded by `tests/indexer/core/test_wire.py`); engines of `tests/e2e/engines.py` also publish live.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tests.e2e.engines import ENGINES
from tests.readme.document import README, REFERENCE

COMMAND: Final = "make readme"
FILE: Final = REFERENCE / "engines.md"
VECTORS: Final = README.parent / "tests" / "golden" / "events"
SALT: Final = "tenant-a"  # of the scenario
NAMES: Final = {"vllm": "vLLM", "sglang": "SGLang"}
HEAD: Final = """# Engines whose events are read

The versions that are tested, and what the events of each say. The decoder goes by the form of an
event, not by a version, and ignores fields that it does not know: versions between these rows work
as long as they use one of these forms. [Engines](../docs/engines.md) says what a prediction is
worth with each of them. TensorRT-LLM is read as Dynamo's publisher passes its events on.

* **Recorded**: messages that the engine's own encoder made are decoded in each run of the tests.
* **Live**: the engine's own publisher, from its wheel, also sends to a running service, with lost
  batches that are replayed, and with a restart (`make test-full`).
* **Adapters** are indexed if events give their names; blocks of an adapter that has only a number
  are counted and left out (`nameless_adapter`).

| engine | version | events | hashes | tiers | adapters | `cache_salt` | KV-cache groups | tested |
|---|---|---|---|---|---|---|---|---|
"""


def written() -> str:
    """The whole page."""
    return HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows())


def rows() -> Iterator[list[str]]:
    """A row for each file, the newest version of each engine first."""
    live = {(engine.package, engine.version) for engine in ENGINES}
    files: list[Any] = [json.loads(path.read_text()) for path in VECTORS.glob("vectors_*.json")]
    files.sort(key=lambda one: _version(one["version"]), reverse=True)
    for name, shown in NAMES.items():
        for one in (one for one in files if one["engine"] == name):
            tested = "recorded, live" if (name, one["version"]) in live else "recorded"
            yield [shown, one["version"], *_facts(one), tested]


def _facts(one: Any) -> Iterator[str]:
    events = [
        event
        for message in one["messages"]
        for event in (message.get("meaning") or {}).get("events", ())
    ]

    def values(field: str) -> list[Any]:
        return [event[field] for event in events if event.get(field) is not None]

    yield f"{one['event_encoding']}s"
    yield "numbers or bytes" if one["bytes_hashes_allowed"] else "numbers"
    yield ", ".join(sorted(set(values("medium")))) or "not said"
    yield "by name" if values("lora_name") else "by number"
    yield "said" if values("cache_salt") or SALT in json.dumps(values("extra_keys")) else "not said"
    kinds = set(values("kv_cache_spec_kind"))
    yield ", ".join(f"`{kind}`" for kind in sorted(kinds)) or "not said"


def _version(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def write(file: Path = FILE) -> None:
    """Write the page."""
    file.write_text(written(), "utf-8")


if __name__ == "__main__":
    write()
