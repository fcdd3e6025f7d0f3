"""Simulations that are carried out once: each that has ended is a line of a file.

Started again with the same file, a benchmark goes on from there. A line names the code it was
measured with, and lines of other code do not count: so no table mixes two versions.
"""

from __future__ import annotations

import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from xxhash import xxh3_64_hexdigest

from bench.output import progress
from bench.provenance import git

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

__all__ = ["Kept"]

Task = TypeVar("Task")
Result = TypeVar("Result")
_CODE = ("indexer", "select_service")
_SHOWN_EVERY_S = 30.0


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One that has ended."""

    code: str
    key: str
    result: msgspec.Raw


def _key_of(what: str, task: object) -> str:
    return f"{what}/{xxh3_64_hexdigest(msgspec.json.encode(task))}"


def _code_of() -> str:
    """Return what names the code that is measured, with its changes that are not committed."""
    trees = git("rev-parse", *(f"HEAD:{folder}" for folder in _CODE))
    return xxh3_64_hexdigest(f"{trees}\n{git('diff', 'HEAD', '--', *_CODE)}".encode())


class Kept:
    """What has ended, in a file of lines.

    Args:
        path: of the file; its folder is made.
        jobs: processes that carry out what is missing.
    """

    def __init__(self, path: Path, jobs: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._jobs, self._code = path, jobs, _code_of()
        self._found: dict[str, msgspec.Raw] = {}
        lines = path.read_bytes().splitlines() if path.exists() else []
        for line in lines:
            one = msgspec.json.decode(line, type=Line)
            if one.code == self._code:
                self._found[one.key] = one.result
        if len(lines) > len(self._found):
            progress(f"{path}: {len(lines) - len(self._found)} lines of other code are left out")

    def results(
        self, what: str, do: Callable[[Task], Result], tasks: Sequence[Task], kind: type[Result]
    ) -> list[Result]:
        """Carry out what is missing; returns all results in the order of the tasks.

        Args:
            what: is done; a name beside the progress, and of the lines.
            do: carries out a task, in another process if there are several.
            tasks: all of them; equal ones are carried out once.
            kind: of a result.
        """
        left = {key: task for task in tasks if (key := _key_of(what, task)) not in self._found}
        progress(f"{what}: {len(left)} of {len(tasks)} to do")
        begun = shown_at = time.monotonic()
        with self._path.open("ab") as file:
            for number, (key, result) in enumerate(self._ended(do, left), 1):
                raw = msgspec.Raw(msgspec.json.encode(result))
                self._found[key] = raw
                line = Line(code=self._code, key=key, result=raw)
                file.write(msgspec.json.encode(line) + b"\n")
                file.flush()
                now = time.monotonic()
                if now - shown_at >= _SHOWN_EVERY_S:
                    shown_at, rest = now, len(left) - number
                    progress(f"{number}/{len(left)}, {(now - begun) / number * rest:.0f} s left")
        decoder: Any = msgspec.json.Decoder(kind)
        return [decoder.decode(self._found[_key_of(what, task)]) for task in tasks]

    def _ended(
        self, do: Callable[[Task], Result], left: dict[str, Task]
    ) -> Iterator[tuple[str, Result]]:
        if self._jobs <= 1 or len(left) <= 1:
            yield from ((key, do(task)) for key, task in left.items())
            return
        with ProcessPoolExecutor(min(self._jobs, len(left))) as pool:
            keys = {pool.submit(do, task): key for key, task in left.items()}
            try:
                yield from ((keys[one], one.result()) for one in as_completed(keys))
            except BaseException:  # Ctrl-C included: what has not begun is not waited for
                pool.shutdown(wait=False, cancel_futures=True)
                raise
