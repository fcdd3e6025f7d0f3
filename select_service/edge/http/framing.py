"""What the parser leaves open of one message: whose it is, and where it ends.

`protocol.py` and `fast_lane.py` ask whether a Host line is one; an answer to HTTP/1.0, which has no
chunks, ends with its connection.
"""

from __future__ import annotations

import re
from typing import Final

from typing_extensions import override

__all__ = ["UNTIL_CLOSED", "is_host"]

_HOST: Final = re.compile(
    rb"[ \t]*"
    rb"(?:\[[0-9A-Za-z:.%_~-]+\]|(?:[0-9A-Za-z._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*)(?::[0-9]*)?"
    rb"[ \t]*"
)
"""What a Host line may say (RFC 3986, 3.2.2 and 3.2.3): an address in brackets, or a name, which
may be empty; and a port."""


class _UntilClosed(int):
    """A length that is never used up and never missed: what uvicorn counts an answer down with."""

    @override
    def __lt__(self, _: object) -> bool:
        return False

    @override
    def __ne__(self, _: object) -> bool:
        return False

    @override
    def __sub__(self, _: int) -> _UntilClosed:
        return self

    __hash__ = int.__hash__


UNTIL_CLOSED: Final = _UntilClosed()


def is_host(value: bytes) -> bool:
    """Tell whether this may stand in a Host line."""
    return _HOST.fullmatch(value) is not None
