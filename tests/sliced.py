"""Answers that are worked out in slices, all at once: tests have nobody else to let in between."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

__all__ = ["answer_of"]

T = TypeVar("T")


def answer_of(asked: Generator[None, None, T]) -> T:
    while True:
        try:
            next(asked)
        except StopIteration as ended:
            answer: T = ended.value
            return answer
