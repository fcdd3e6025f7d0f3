"""The selectors in order: which one is asked now, and which body format each accepts.

`attempts.py` moves through them.
"""

from __future__ import annotations


class Selectors:
    """Sticky: the current selector is used until it fails, then the next one, in a circle."""

    __slots__ = ("current", "is_down", "json_only", "moves")

    def __init__(self, count: int, *, msgpack: bool) -> None:
        if count < 1:
            raise ValueError("a client needs at least one selector")
        self.current = 0
        self.is_down = False  # a round over all of them has brought no answer
        self.json_only = [not msgpack] * count
        self.moves = 0

    def __len__(self) -> int:
        return len(self.json_only)

    def worked(self, selector: int) -> None:
        """Note an answer; if all were down, that selector becomes the current one."""
        if self.is_down:
            self.is_down = False
            self.current = selector

    def failed(self, selector: int) -> None:
        """Move on to the next selector, unless another call already has."""
        if selector == self.current and len(self) > 1:
            self.current = (selector + 1) % len(self)
            self.moves += 1
