"""One target of `decoders.py` under atheris, which keeps every input that reaches new code.

    python -m tests.fuzz.guided TARGET CORPUS [libFuzzer's flags]

The same seed and number of runs do the same again. Half of the changes are made to what MessagePack
or JSON says instead of to its bytes: most changed bytes are no MessagePack at all.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any, Final

import msgspec

RUNS: Final = {
    "events": 3_000,
    "replicas": 40_000,
    "dumps": 1_000,
    "loads": 60_000,
    "files": 6_000,
    "recordings": 1_500,
    "bodies": 16_000,
}
"""Some seconds each."""

LENGTH_MAX: Final = 4096
MEMORY_MB: Final = 64
"""Most that may be asked for at once: sixteen thousand times what came in."""

VALUES: Final[list[Any]] = [
    *(None, True, False, 0, -1, 1, 127, 128, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1),
    *(-(1 << 63), 1.0, 1e308, float("nan"), float("inf"), "", "a", "type", b"", b"\0" * 8, [], {}),
    *([None], [[]], {"a": 1}, ["BlockStored"], ["BlockRemoved", [1]], ["AllBlocksCleared"], "GPU"),
]


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Change what the bytes say if they say anything, else the bytes."""
    for prefix in (0, 1):
        for codec in (msgspec.msgpack, msgspec.json):
            try:
                value = codec.decode(data[prefix:])
                new: bytes = codec.encode(_changed(value, rng, 0))
                return data[:prefix] + new
            except (ValueError, TypeError, RecursionError, OverflowError):
                continue
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.randbytes(rng.randrange(3)) + data[at + rng.randrange(3) :]


def _changed(value: Any, rng: random.Random, depth: int) -> Any:
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice(list(value))
        odds = rng.random()
        if odds < 0.1:
            return {one: kept for one, kept in value.items() if one != name}
        if odds < 0.2:
            return value | {rng.choice(["x", "", *value]): rng.choice(VALUES)}
        return value | {name: _changed(value[name], rng, depth + 1)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at, odds = rng.randrange(len(value)), rng.random()
        if odds < 0.1:
            return value[:at] + value[at + 1 :]
        if odds < 0.2:
            return value[:at] + [value[at]] * rng.randrange(1, 4) + value[at:]
        return [*value[:at], _changed(value[at], rng, depth + 1), *value[at + 1 :]]
    if isinstance(value, int) and rng.random() < 0.3:
        return value + rng.choice([-1, 1, 1 << 8, 1 << 16])
    return rng.choice(VALUES)


def main() -> None:
    """Run one target until its bounds are reached or something is found."""
    import atheris  # no part of an ordinary installation

    target, corpus = sys.argv[1], Path(sys.argv[2])
    with atheris.instrument_imports(include=["indexer", "select_service"]):
        from tests.fuzz.decoders import TARGETS  # instrumented as they come
        from tests.fuzz.seeds import seeds
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds(target)):
        (corpus / f"seed-{number:04}").write_bytes(seed)

    def change(data: bytes, most: int, seed: int) -> bytes:
        rng = random.Random(seed)
        new = mutated(data, rng) if rng.random() < 0.5 else atheris.Mutate(data, len(data))
        return bytes(new[:most])

    flags = [f"-max_len={LENGTH_MAX}", f"-malloc_limit_mb={MEMORY_MB}", "-timeout=20"]
    arguments = [sys.argv[0], *flags, *sys.argv[3:], str(corpus)]
    atheris.Setup(arguments, TARGETS[target], custom_mutator=change)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
