"""Credentials in files: read again for each use, as Kubernetes and others replace them.

A token is alone in its file, or in a line of a token file of the service that has the token itself
(`edge/security/tokens.py`). `name:password` for basic authentication is alone in its file.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Final

import msgspec

from indexer.plain_file import open_plain

TOKEN_BYTES_MAX: Final = 16384
"""Limit of a file: identity providers' tokens have some thousand bytes."""


class TokenUnreadable(Exception):
    """The file cannot be read, or has no credentials; the text names it and nothing in it."""


class _Line(msgspec.Struct):
    """What a client reads of a line of a token file."""

    token: str | None = None


def read_token(path: str | Path) -> str:
    """Return the token of a file, the first if it is a token file of the service.

    Raises:
        TokenUnreadable: there is none.
    """
    text = _content(path)
    if text.startswith(("{", "#")):
        text = _first_token(path, text)
    if " " in text or not (text.isascii() and text.isprintable()):
        raise TokenUnreadable(f"{path}: not a token alone")
    return text


def _first_token(path: str | Path, text: str) -> str:
    stripped = map(str.strip, text.splitlines())
    lines = [line for line in stripped if line and not line.startswith("#")]
    try:
        read = (msgspec.json.decode(line, type=_Line).token for line in lines)
        token = next((one for one in read if one is not None), None)
    except msgspec.DecodeError:  # the error might quote it
        raise TokenUnreadable(f"{path}: not a JSON object per line") from None
    if token is None:
        why = "its lines have no `token`: a hash cannot be shown (`token new --with-token`)"
        raise TokenUnreadable(f"{path}: {why}")
    return token


def bearer_header(path: str | Path | None) -> dict[str, str]:
    """Return the header that shows the token of a file; no file: no header.

    Raises:
        TokenUnreadable: there is no token.
    """
    return {} if path is None else {"authorization": f"Bearer {read_token(path)}"}


def basic_header(path: str | Path) -> dict[str, str]:
    """Return the header of basic authentication with the `name:password` of a file.

    Raises:
        TokenUnreadable: there is none.
    """
    text = _content(path)
    if ":" not in text or not text.isprintable():
        raise TokenUnreadable(f"{path}: not name:password alone")
    return {"authorization": f"Basic {base64.b64encode(text.encode()).decode()}"}


def _content(path: str | Path) -> str:
    try:
        with open_plain(path) as file:
            content = file.read(TOKEN_BYTES_MAX + 1)
        text = content.decode().strip()
    except OSError as error:
        raise TokenUnreadable(f"{path}: {error.strerror}") from None
    except ValueError:  # not UTF-8; the error would quote it
        raise TokenUnreadable(f"{path}: not text") from None
    if len(content) > TOKEN_BYTES_MAX:
        raise TokenUnreadable(f"{path}: longer than {TOKEN_BYTES_MAX} bytes")
    if not text:
        raise TokenUnreadable(f"{path}: empty")
    return text
