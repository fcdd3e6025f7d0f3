"""Syntax of a CURVE public key: 40 characters of Z85, ZMQ's encoding of 32 bytes.

Only the syntax is checked here; a handshake shows whether anybody has the secret half.
Configuration and worker records check keys here; `edge/curve` reads the files.
"""

from __future__ import annotations

import re
from typing import Final

_GROUPS: Final = 8
_WORD_END: Final = 1 << 32
_DIGITS: Final = (
    "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
)
_VALUE: Final = {digit: value for value, digit in enumerate(_DIGITS)}
_KEY: Final = re.compile(f"[{re.escape(_DIGITS)}]{{40}}")


def is_curve_key(text: str) -> bool:
    """Return whether a text is a key: five base-85 digits for every four bytes."""
    if not _KEY.fullmatch(text):
        return False
    for group in range(_GROUPS):
        word = 0
        for digit in text[5 * group : 5 * group + 5]:
            word = word * 85 + _VALUE[digit]
        if word >= _WORD_END:
            return False
    return True
