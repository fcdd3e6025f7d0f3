"""No text that people see has a secret in it, and what is none stays as it is."""

from __future__ import annotations

import pytest

from indexer.redaction import redact


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:pw@host:9090/x", "http://***@host:9090/x"),
        ("at https://me:p@w@host", "at https://***@host"),
        ("https://me:p/w@host failed", "https://***@host failed"),
        ("http://a:b@c,http://d:e@f", "http://***@c,http://***@f"),
        ("URL('http://me:[secure]@h')", "URL('http://***@h')"),
        ("http://token@host", "http://***@host"),
        (r'{"url":"http:\/\/me:pw@host"}', r'{"url":"http:\/\/***@host"}'),
        ("unix+http://me:pw@host", "unix+http://***@host"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer ***"),
        ("{'authorization': 'Bearer abc'}", "{'authorization': 'Bearer ***'}"),
        ("Illegal header value b'bearer x\\ny'", "Illegal header value b'bearer ***\\ny'"),
        ("authorization=BASIC bWU6cHc=", "authorization=BASIC ***"),
        ("GET /x?token=abc&y=1", "GET /x?token=***&y=1"),
        ("GET /x?y=1&api_key=abc HTTP", "GET /x?y=1&api_key=*** HTTP"),
    ],
)
def test_secrets_are_removed(text: str, shown: str) -> None:
    assert redact(text) == shown
    assert redact(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "",
        "http://host:9090/a/b?model=m",
        "me@example.org",
        "org/model@v2 at http://host",
        'http://p/api: up{job="a"} @ 17',
        "a bearer token is needed",
        "basic authentication, Bearer credentials",
        "a token is needed: Authorization: Bearer <token>",
        "tokens=7 token=8",
        "http://one and me@two",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text
