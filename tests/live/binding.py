"""`dynamo.llm.SelectionService` in a process of its own, called from tests: the binding, or ours.

As a script this file is that process. It has nothing but the standard library, because it also
runs in the interpreter of the reference: a line of JSON on stdin is a call, a line on stdout what
came of it.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

_OURS = "--ours"


class Binding:
    """One process with one service."""

    def __init__(self, python: str, *args: str, log: Path, **variables: str) -> None:
        """Start it.

        Args:
            python: the interpreter, which has ai-dynamo-runtime unless it is ours.
            args: `--ours` for ours.
            log: where stderr goes.
            variables: of its environment.
        """
        self._log = log.open("ab")
        self._process = subprocess.Popen(
            [python, __file__, *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "DYN_LOG": "error", **variables},
            cwd=Path(__file__).parents[2] if _OURS in args else log.parent,
        )

    @classmethod
    def ours(cls, log: Path, **variables: str) -> Self:
        """Start this package's."""
        return cls(sys.executable, _OURS, log=log, **variables)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            assert pipe is not None
            pipe.close()

    def call(self, method: str, *args: object, **kwargs: object) -> dict[str, Any]:
        """Call a method; return {"answer", "is_async"}, or {"error", "text", "kind", "status"}."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([method, args, kwargs]).encode() + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, Path(self._log.name).read_text("utf-8")[-2000:]
        outcome: dict[str, Any] = json.loads(line)
        return outcome


async def _carry_out(service: Any, method: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if method == "upsert_worker":  # JSON has no numbers as keys, which the reference demands
        args = [_ranks_as_numbers(args[0])]
    try:
        answer = getattr(service, method)(*args, **kwargs)
        is_async = inspect.isawaitable(answer)
        if is_async:
            answer = await answer
    except Exception as error:  # noqa: BLE001 - it is the outcome
        return {
            "error": type(error).__name__,
            "text": str(error),
            "kind": getattr(error, "kind", None),
            "status": getattr(error, "status_code", None),
        }
    return {"answer": answer, "is_async": is_async}


def _ranks_as_numbers(worker: Any) -> Any:
    if not isinstance(worker, dict) or "kv_events_endpoints" not in worker:
        return worker
    endpoints = {int(rank): one for rank, one in worker["kv_events_endpoints"].items()}
    return {**worker, "kv_events_endpoints": endpoints}


async def _serve() -> None:
    from dynamo.llm import SelectionService  # type: ignore[import-not-found]

    service = SelectionService(indexer_threads=2)
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await _carry_out(service, *json.loads(line))), flush=True)  # noqa: T201


if __name__ == "__main__":
    if _OURS in sys.argv:
        sys.path.insert(0, os.getcwd())
        from select_service.compat.dynamo import install

        install()
    asyncio.run(_serve())
