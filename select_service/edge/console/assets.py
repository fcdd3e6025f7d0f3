"""Page, scripts and styles of the console, read from the package, and their headers.

Client-written paths never reach the file system: names are looked up among the files read once from
the folder. The policy lets the page load from and connect to this server only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from xxhash import xxh3_64_hexdigest

from select_service.edge.codec.responses import Response
from select_service.errors import RouteNotFound

__all__ = ["PAGE", "SAFE", "Assets"]

PAGE: Final = "index.html"
_FOLDER: Final = Path(__file__).with_name("static")
_TYPES: Final = {
    "html": b"text/html; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "svg": b"image/svg+xml",
}
_POLICY: Final = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
    b" base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    b" require-trusted-types-for 'script'; trusted-types 'none'"
)
SAFE: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", _POLICY),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
"""Headers of everything under /console."""


class Assets:
    """The files by name, in memory: some hundred kilobytes once somebody has opened the page."""

    def __init__(self) -> None:
        self._files: dict[str, Response] = {}
        texts = {
            one.name: one.read_bytes()
            for one in _FOLDER.iterdir()
            if one.name.rpartition(".")[2] in _TYPES
        }
        self.digest = xxh3_64_hexdigest(b"".join(texts[name] for name in sorted(texts)))
        """Of all files: a page loaded from other ones should reload."""
        for name, text in texts.items():
            kind = _TYPES[name.rpartition(".")[2]]
            headers = ((b"content-type", kind), (b"cache-control", b"no-cache"), *SAFE)
            self._files[name] = Response(200, text, headers)

    @property
    def names(self) -> list[str]:
        """The names of all files."""
        return sorted(self._files)

    def get(self, name: str) -> Response:
        """Return a file.

        Raises:
            RouteNotFound: there is none of this name.
        """
        found = self._files.get(name)
        if found is None:
            raise RouteNotFound("the console has no such file")
        return Response(found.status, found.body, found.headers)
