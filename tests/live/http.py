"""HTTP as bytes: paths and bodies go out exactly as given, nothing is normalised on the way.

Ordinary clients fold `//health` and refuse half of what a hostile or sloppy client sends; tests of
a contract must be able to send it.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass

from tests.live.ports import HOST
from tests.wait import PATIENCE_S

JSON_TYPE = "application/json"


@dataclass(frozen=True)
class Answer:
    """What came back."""

    status: int
    headers: Mapping[str, str]
    raw: bytes

    @property
    def json(self) -> object:
        """The body as JSON; the text itself where it is none (so comparisons can name it)."""
        try:
            return json.loads(self.raw)
        except ValueError:
            return self.raw.decode("utf-8", "replace")


def exchange(port: int, method: str, path: str, body: object = None, *, host: str = HOST) -> Answer:
    """Send `body` as JSON (None: no body at all) and read the answer."""
    if body is None:
        return exchange_raw(port, method, path, None, {}, host=host)
    content = json.dumps(body).encode()
    return exchange_raw(port, method, path, content, {"Content-Type": JSON_TYPE}, host=host)


def exchange_raw(
    port: int,
    method: str,
    path: str,
    body: bytes | None,
    headers: Mapping[str, str],
    *,
    timeout_s: float = PATIENCE_S,
    host: str = HOST,
) -> Answer:
    """Send exactly this request on a fresh connection and read the answer."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.putrequest(method, path, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        if body is not None or method in {"POST", "PUT", "PATCH"}:
            connection.putheader("Content-Length", str(len(body or b"")))
        connection.endheaders(body)
        response = connection.getresponse()
        fields = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, fields, response.read())
    finally:
        connection.close()
