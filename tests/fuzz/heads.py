"""Queries, path segments and header lines, right and wrong."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Final

from select_service.edge.http.routes import ROUTES
from select_service.edge.routing import Route
from tests.fuzz.bodies import PATHS, path_of

TEXTS: Final = [
    *(b"", b"1", b"+1", b"01", b"-1", b"0", b"1.0", b"1e3", b"0x1", b"true", b"false", b"True"),
    *(b"NaN", b"null", b"18446744073709551615", b"18446744073709551616", b"9" * 400, b"default"),
    *(b"%00", b"%ff", b"%C0%80", b"%ED%A0%80", b"%F0%9F%98%80", b"%", b"%z", b"%2", b"%2F..%2F"),
    *(
        b"a%20b",
        b"a+b",
        b"%0d%0aX-A:%20b",
        b"..",
        b".",
        b"a;b",
        b"a=b",
        b"[]",
        b"{}",
        b"~",
        b"x" * 7000,
    ),
    *(b"%41" * 900, b"batch", b"%EF%BF%BD", b"\xc3\xa9", b"%25", b"*"),
]
NAMES: Final = [b"nobody_knows", b"", b"%6Dodel_name", b"model_name%00", b"a[b]"]
TYPES: Final = [
    *(b"application/json", b"Application/JSON", b"application/json;charset=utf-8", b"text/plain"),
    *(
        b"application/x+json",
        b"application/+json",
        b"application/msgpack",
        b"application/x-msgpack",
    ),
    *(b"application/json, text/plain", b"", b" ", b"application/json;", b";", b"*/*", b"\xff"),
    *(b"application/json; charset=utf-16", b"application/" + b"x" * 500 + b"+json", b"json"),
]
ACCEPTS: Final = [
    *(
        b"*/*",
        b"application/json",
        b"application/msgpack",
        b"application/msgpack;q=0",
        b"text/html",
    ),
    *(b"application/msgpack;q=nan, */*;q=0.5", b",", b"", b"msgpack", b";q=1", b"a/b" * 300),
    *(b"application/vnd.msgpack;q=1.0000,application/json;q=0.9", b"\xff", b"application/*;q=2"),
]
LINES: Final = [
    *(
        b"traceparent: 00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01",
        b"traceparent: x",
        b"tracestate: =",
    ),
    *(b"x-request-id: \xff", b"cookie: " + b"a=b;" * 200, b"x: ", b"authorization: Bearer x"),
    *(b"accept-encoding: gzip", b"connection: keep-alive", b"range: bytes=0-1", b"te: trailers"),
    *(
        b"expect: nothing",
        b"upgrade: h2c",
        b"x" * 300 + b": y",
        b"if-match: *",
        b"bad line",
        b": y",
    ),
    *(b"content-encoding: gzip", b"x-forwarded-for: 1.2.3.4, \x01", b"host: t", b"x: a\x00b"),
]

Head = tuple[Route[Any], bytes, tuple[bytes, ...]]


def each() -> Iterator[Head]:
    """Every oddity at every place, once."""
    plain = b"content-type: application/json"
    for route in ROUTES:
        path = path_of(route).encode()
        for name in (*(one.encode() for one in route.query), *NAMES):
            for text in TEXTS:
                yield route, b"%b?%b=%b" % (path, name, text), (plain,)
            yield route, b"%b?%b=1&%b=2" % (path, name, name), (plain,)
            yield route, b"%b?%b&&=&%b" % (path, name, b"&".join([b"x=y"] * 300)), (plain,)
        for param in PATHS:
            hole = b"{%b}" % param.encode()
            if hole in route.pattern.encode():
                for text in TEXTS:
                    yield route, route.pattern.encode().replace(hole, text), (plain,)
        for kind in TYPES:
            yield route, path, (b"content-type: " + kind,)
        for accept in ACCEPTS:
            yield route, path, (plain, b"accept: " + accept)
        for line in LINES:
            yield route, path, (plain, line)
        yield route, path, (plain, plain)
        yield route, path, (plain, b"accept: application/json", b"accept: application/msgpack")
        yield route, path, ()


def shuffled(seed: int) -> list[Head]:
    """All of them, in an order that is the same for a seed."""
    found = list(each())
    random.Random(seed).shuffle(found)
    return found
