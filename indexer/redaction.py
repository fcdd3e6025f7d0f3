"""Removes secrets from text that people see: logs, errors, decisions, metrics, reports.

Names and passwords in URLs, tokens in URLs, and the values of Authorization headers are replaced.
The text is redacted where it leaves the process, whatever wrote it: an error of a library may quote
the address or the header that it could not use.
"""

from __future__ import annotations

import re
from typing import Final

_HIDDEN: Final = "***"
# up to the last @: a password may have a slash, or another @, that is not escaped
_USER: Final = re.compile(
    r"""([a-z][a-z0-9+.-]*:(?:/|\\/){2})(?:(?!://)[^\s"'<>])*@""", re.IGNORECASE
)
_HEADER: Final = re.compile(
    r"""\b(bearer|basic)((?:[ \t]|%20)+)(?!<|tokens?\b|auth|credentials?\b)[^\s"',;\\]+""",
    re.IGNORECASE,
)
_QUERY: Final = re.compile(
    r"""([?&;](?:access[_-]?token|api[_-]?key|auth|key|password|secret|sig|signature|token)=)"""
    r"""[^&;\s"'<>]+""",
    re.IGNORECASE,
)


def redact(text: str) -> str:
    """Return a text without secrets; one that has none is returned as it is."""
    if "@" in text:
        text = _USER.sub(rf"\1{_HIDDEN}@", text)
    if "=" in text:
        text = _QUERY.sub(rf"\1{_HIDDEN}", text)
    lower = text.lower()  # as the log has many lines, and few of them have any of this
    if "bearer" in lower or "basic" in lower:
        text = _HEADER.sub(rf"\1\2{_HIDDEN}", text)
    return text
