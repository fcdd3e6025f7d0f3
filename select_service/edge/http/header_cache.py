"""Selects the header lines that are the same in every request of a client, and reads the length.

Only a dozen header lines affect how a request is answered, and a client repeats them unchanged:
`connection.py` remembers what its parser found in them. All others (tracing, proxies, cookies,
idempotency keys) may differ in every request and are left out; so is the length of the body, which
is read anew each time.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

KEPT: Final = frozenset(
    (
        b"host",
        b"content-type",
        b"accept",
        b"content-encoding",
        b"expect",
        b"connection",
        b"proxy-connection",
        b"transfer-encoding",
        b"upgrade",
        b"http2-settings",
    )
)
"""Names of the lines that decide how a request is read, by us or by the parser, and answered."""

GUARDED: Final = KEPT | {b"authorization"}
"""The same if tokens are required."""

LENGTH_DIGITS_MAX: Final = 12
"""Of a Content-Length: a terabyte. The parser judges longer ones."""

_LENGTH_NAME: Final = b"content-length"
_LENGTH: Final = re.compile(
    rb"\r\n%b:[ \t]*+([0-9]{1,%d})[ \t]*+(?=\r\n|\Z)" % (_LENGTH_NAME, LENGTH_DIGITS_MAX),
    re.IGNORECASE,
)


class HeaderCache:
    """Reads the lines of heads.

    Attributes:
        names: of the lines that are kept, in lower case.
    """

    __slots__ = ("_left_out", "names")

    def __init__(self, names: frozenset[bytes]) -> None:
        self.names = names
        self._left_out = _left_out(names)

    def read(self, lines: bytes) -> tuple[bytes, int]:
        """Filter the lines of a head, each after its line break.

        Returns:
            The lines that are kept, and the length that was among them, or 0. Linear. Anything odd
            is kept, so that the head is not found in memory and the parser reports what is wrong.
        """
        kept = self._left_out(b"", lines)
        said = _LENGTH.search(kept)
        if said is None:
            return kept, 0
        return kept[: said.start()] + kept[said.end() :], int(said[1])


@lru_cache
def _left_out(names: frozenset[bytes]) -> Callable[[bytes, bytes], bytes]:
    """Return a function that replaces the lines that are not kept.

    The pattern never backtracks (`*+`): a line of blanks would hold the loop for most of a second.
    """
    kept = rb"|".join(sorted({*names, _LENGTH_NAME}))
    line = rb"\r\n(?!(?:%b):)[A-Za-z0-9_-]++:[\t -~]*+(?=\r\n|\Z)" % kept
    return re.compile(line, re.IGNORECASE).sub
