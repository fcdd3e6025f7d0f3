"""Pages, scripts and styles of the console and of /docs, read from the package, and their headers.

Client-written paths never reach the file system: names are looked up among the files read once from
the folder. The policies let pages load from and connect to this server only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from xxhash import xxh3_64_hexdigest

from select_service.edge.codec.responses import Response
from select_service.errors import RouteNotFound

PAGE: Final = "index.html"
CONSOLE: Final = Path(__file__).with_name("static")
DOCS: Final = Path(__file__).with_name("docs")
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
_DOCS_POLICY: Final = (  # Swagger UI writes HTML that it has cleaned, and its styles have pictures
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
    b" connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_COMMON: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
SAFE: Final = (*_COMMON, (b"content-security-policy", _POLICY))
"""Headers of everything under /console."""


class Assets:
    """The files by name, in memory once the page was opened: 0.2 MB, of /docs 2 MB."""

    def __init__(self, folder: Path = CONSOLE) -> None:
        """Read the files of a page."""
        self._files: dict[str, Response] = {}
        safe = SAFE if folder == CONSOLE else (*_COMMON, (b"content-security-policy", _DOCS_POLICY))
        texts = {
            one.name: one.read_bytes()
            for one in folder.iterdir()
            if one.name.rpartition(".")[2] in _TYPES
        }
        self.digest = xxh3_64_hexdigest(b"".join(texts[name] for name in sorted(texts)))
        """Of all files: a page loaded from other ones should reload."""
        for name, text in texts.items():
            kind = _TYPES[name.rpartition(".")[2]]
            headers = ((b"content-type", kind), (b"cache-control", b"no-cache"), *safe)
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
            raise RouteNotFound("the page has no such file")
        return Response(found.status, found.body, found.headers)
