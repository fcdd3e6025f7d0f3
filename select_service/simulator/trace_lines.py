"""Lines of JSON: read one by one, and named by their number where one is wrong."""

from __future__ import annotations

from codecs import BOM_UTF8
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

T = TypeVar("T")
_TEXTS: Final = {"Input data was truncated": "it ends within a value"}


class BadTrace(ValueError):
    """An unreadable line; the text names it, from 1."""


def numbered(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that say something, with their numbers from 1."""
    for number, line in enumerate(lines, 1):
        text = line.removeprefix(BOM_UTF8) if number == 1 else line
        if text.strip():
            yield number, text


def decoded(decoder: msgspec.json.Decoder[T], line: bytes, number: int) -> T:
    """Decode a line.

    Raises:
        BadTrace: it is not of this form.
    """
    with naming(number):
        return decoder.decode(line)


@contextmanager
def naming(number: int) -> Iterator[None]:
    """Let an error of a line name it.

    Raises:
        BadTrace: instead of that error.
    """
    try:
        yield
    except (msgspec.DecodeError, ValueError) as error:
        raise BadTrace(fault(error, f"line {number}")) from None


def fault(error: Exception, what: str) -> str:
    """Return what is wrong with a line or a file: it is not JSON, or JSON of something else."""
    if isinstance(error, msgspec.ValidationError):
        return f"{what}: {error}"
    if isinstance(error, (msgspec.DecodeError, UnicodeDecodeError)):
        why = str(error).removeprefix("JSON is malformed: ")
        return f"{what} is not JSON: {_TEXTS.get(why, why)}"
    return f"{what}: {error}"
