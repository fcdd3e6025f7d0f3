"""Sets of processor cores, as text and as what is left."""

from __future__ import annotations

__all__ = ["other_cores", "parse_cores"]


def parse_cores(text: str) -> tuple[int, ...]:
    """`0,2` → (0, 2); `all` → (), which stands for all.

    Raises:
        ValueError: neither.
    """
    if text.strip() == "all":
        return ()
    return tuple(sorted({int(one) for one in text.split(",")}))


def other_cores(cores: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The cores for clients: those the server does not have, all if it has all."""
    return tuple(one for one in range(count) if one not in cores) or tuple(range(count))
