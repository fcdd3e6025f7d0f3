"""A test may be a coroutine: who runs it gives the first arguments, pytest keyword-only ones."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any

from tests import wait


def run_by(
    play: Callable[..., object], *fixtures: str, **options: Any
) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Callable[..., None]]:
    """Let `play` run a coroutine as a test.

    Args:
        play: takes the coroutine function, calls it with as many arguments as it gives, awaits it.
        fixtures: of pytest's, for the parameters of `play` of these names.
        options: for `play`, the same for every run.
    """
    first = next(name for name in inspect.signature(play).parameters if name not in fixtures)

    def made(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
        parameters = inspect.signature(test).parameters.values()
        taken = sum(one.kind is not one.KEYWORD_ONLY for one in parameters)
        own = [one for one in parameters if one.kind is one.KEYWORD_ONLY]
        names = [one.name for one in own]

        @functools.wraps(test)
        def run(**given: Any) -> None:
            chosen = {name: given[name] for name in names}

            async def use(*places: Any) -> None:
                await test(*places[:taken], **chosen)

            play(**{first: use}, **{name: given[name] for name in fixtures}, **options)

        own += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
            for name in fixtures
            if name not in names
        ]
        run.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
        return run

    return made


def within(
    context: Callable[..., AbstractAsyncContextManager[Any]], *fixtures: str, **options: Any
) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Callable[..., None]]:
    """Run a coroutine within a context, as a test: its first arguments are what that yields."""

    def play(use: Callable[..., Coroutine[Any, Any, None]], **given: Any) -> None:
        async def run() -> None:
            async with context(**given) as found:
                await use(*(found if isinstance(found, tuple) else (found,)))

        wait.run(run())

    return run_by(play, *fixtures, **options)
