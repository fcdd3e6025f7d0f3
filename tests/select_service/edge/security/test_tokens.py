"""The token file: what may stand in it, how a token is compared, and what is never shown."""

from __future__ import annotations

import hashlib
import hmac
import json
import math
from pathlib import Path
from typing import Any

import pytest

from select_service.edge.security.authority import Authority
from select_service.edge.security.credentials_cli import main
from select_service.edge.security.security_files import SecurityFiles
from select_service.edge.security.tokens import (
    SCOPES,
    TokenBook,
    TokenRecord,
    new_token,
    read_token_file,
)
from select_service.errors import TokenFileUnusable
from select_service.settings import Settings
from select_service.token_file import TokenUnreadable, read_token
from tests.harms import HARMS, Harm

TOKEN, DIGEST = new_token()


def record(**fields: Any) -> TokenRecord:
    return TokenRecord(**{"name": "one", "sha256": DIGEST, "scopes": ["read"]} | fields)


def test_a_new_token_is_long_random_and_known_by_its_hash() -> None:
    assert TOKEN.startswith("sst_")
    assert len(TOKEN) >= 43
    assert new_token()[0] != TOKEN
    assert hashlib.sha256(TOKEN.encode()).hexdigest() == DIGEST
    entry = TokenBook([record()]).by_token(TOKEN.encode())
    assert entry is not None
    assert entry.name == "one"


def test_admin_is_every_scope() -> None:
    entry = TokenBook([record(scopes=["admin"])]).by_token(TOKEN.encode())
    assert entry is not None
    assert entry.scopes == set(SCOPES)


@pytest.mark.parametrize(
    "token",
    ["", "x", "k" * 21, "x" * 513, TOKEN[:-1], TOKEN + "x"],
    ids=["empty", "short", "21", "513", "cut", "longer"],  # others differ from run to run
)
def test_other_tokens_are_nobodys(token: str) -> None:
    assert TokenBook([record()]).by_token(token.encode()) is None


def test_a_short_secret_is_refused_although_its_hash_is_listed() -> None:
    digest = hashlib.sha256(b"correct horse").hexdigest()
    assert TokenBook([record(sha256=digest)]).by_token(b"correct horse") is None


def test_how_long_a_token_may_be_is_a_setting() -> None:
    """Found on the way: one of an identity provider's was nobody's, whatever the file said."""
    token = "t" * 1000
    listed = [record(sha256=hashlib.sha256(token.encode()).hexdigest())]
    assert TokenBook(listed).by_token(token.encode()) is None
    assert TokenBook(listed, chars_max=1000).by_token(token.encode()) is not None


def test_hashes_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    genuine = hmac.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return genuine(one, other)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    book = TokenBook([record()])
    book.by_token(TOKEN.encode())
    book.by_token(b"y" * 43)
    assert compared[0] == (bytes.fromhex(DIGEST), bytes.fromhex(DIGEST))
    assert compared[1][1] == bytes(32), "an unknown token costs a comparison too"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "no JSON object"),
        ("[" * 100_000, "got `array`"),
        ('{"name":"x","sha256":"DIGEST"}', "scopes"),
        ('{"name":"x","sha256":"TOKEN"}', "sha256"),
        ('{"name":"x","sha256":"TOKEN","scopes":["read"]}', "sha256"),
        ('{"name":"x","bearer":"TOKEN","scopes":["read"]}', "unknown field"),
        ('{"name":"x","sha256":"DIGEST","token":"TOKEN","scopes":["read"]}', "either"),
        ('{"name":"x","token":"too short","scopes":["read"]}', "token"),
        ("TOKEN", "a token alone is a client's"),
        ('{"name":"x","TOKEN":1,"scopes":["read"]}', "unknown field"),
        ('{"name":"x","sha256":"DIGEST","scopes":["TOKEN"]}', "unknown scope"),
        ('{"name":"x","sha256":"DIGEST","scopes":[]}', "scopes"),
        ('{"name":"x","sha256":"DIGEST","scopes":["read"],"tenants":[]}', "tenants"),
        ('{"name":"x","scopes":["read"]}', "either"),
        ('{"name":"x","sha256":"DIGEST","certificate":"c","scopes":["read"]}', "either"),
        ('{"name":"x\\n","sha256":"DIGEST","scopes":["read"]}', "printable"),
        ('{"name":"x","sha256":"DIGEST","scopes":["read"],"expires":"2026-01-01T00:00:00"}',
         "expires"),
    ],
)  # fmt: skip
def test_a_bad_line_is_named_and_not_shown(tmp_path: Path, line: str, why: str) -> None:
    path = tmp_path / "tokens"
    line = line.replace("DIGEST", DIGEST).replace("TOKEN", TOKEN)
    path.write_text(f"# a remark\n\n{line}\n")
    with pytest.raises(TokenFileUnusable) as error:
        read_token_file(str(path))
    text = str(error.value)
    assert "line 3" in text
    assert why in text
    assert TOKEN not in text
    assert DIGEST not in text
    assert error.value.__cause__ is None


@pytest.mark.parametrize(
    "others",
    [{"name": "one", "sha256": "0" * 64}, {"name": "two", "sha256": DIGEST}],
    ids=["name", "token"],
)
def test_names_and_tokens_are_unique(tmp_path: Path, others: dict[str, Any]) -> None:
    path = tmp_path / "tokens"
    lines = [{"name": "one", "sha256": DIGEST, "scopes": ["read"]}, others | {"scopes": ["read"]}]
    path.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(TokenFileUnusable):
        read_token_file(str(path))


def test_one_file_serves_both_sides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The service knows whom it names, and a client shows the first token in it."""
    path = tmp_path / "tokens"
    new = ("token", "new", "--scopes", "read")
    assert main([*new, "--name", "hashed"]) == 0
    hashed = capsys.readouterr().out
    assert main([*new, "--name", "shared", "--with-token"]) == 0
    output = capsys.readouterr()
    token = output.err.split()[-1]
    path.write_text(f"# both\n{hashed}{output.out}")
    assert read_token(path) == token
    found = read_token_file(str(path)).by_token(token.encode())
    assert found is not None
    assert found.name == "shared"
    path.chmod(0o644)
    SecurityFiles(Settings(token_file=str(path)))
    assert "can be read by others" in caplog.text
    assert token not in caplog.text
    path.write_text("\n".join(path.read_text().splitlines()[:2]))
    with pytest.raises(TokenUnreadable, match="a hash cannot be shown"):
        read_token(path)


def test_two_cannot_have_one_certificate() -> None:
    one = record(sha256=None, certificate="ops")
    with pytest.raises(TokenFileUnusable):
        TokenBook([one, record(name="two", sha256=None, certificate="ops")])


def test_no_file_and_one_that_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(TokenFileUnusable, match="cannot read"):
        read_token_file(str(tmp_path / "none"))
    with pytest.raises(TokenFileUnusable, match="cannot read"):
        read_token_file(str(tmp_path))
    path = tmp_path / "tokens"
    path.write_bytes(b"#" * 100)
    for most in (100, 101):
        assert not len(read_token_file(str(path), most))
    with pytest.raises(TokenFileUnusable, match="longer than 99 bytes"):
        read_token_file(str(path), 99)


def test_a_file_that_has_grown_too_long_is_not_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_bytes(b"#" * 100)
    authority = Authority(str(path), bytes_max=100)
    path.write_bytes(b"#" * 101)
    with pytest.raises(TokenFileUnusable, match="longer"):
        authority.prepare()


def test_the_next_to_expire(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(
        '{"name":"x","sha256":"DIGEST","scopes":["read"],"expires":"2026-01-01T00:00:00Z"}'.replace(
            "DIGEST", DIGEST
        )
    )
    book = read_token_file(str(path))
    at = 1767225600.0
    assert book.next_expiry(at - 1) == at
    assert book.next_expiry(at) == math.inf


@pytest.mark.parametrize("harm", HARMS)
def test_a_file_changed_anywhere_gives_nobody_more_rights(memory_path: Path, harm: Harm) -> None:
    """An operator writes it, so it has no checksum; what a disk does to it takes rights away."""
    second, digest = new_token()
    records = [
        {"name": "one", "sha256": DIGEST, "scopes": ["read"], "tenants": ["acme", "rival"]},
        {"name": "two", "sha256": digest, "scopes": ["select", "lifecycle"], "tenants": ["acme"]},
    ]
    path = memory_path / "tokens"
    path.write_text("# ours\n" + "".join(json.dumps(one) + "\n" for one in records))
    data = path.read_bytes()
    book = read_token_file(str(path))
    refused = 0
    for at in range(len(data)):
        path.write_bytes(harm(data, at))
        try:
            found = read_token_file(str(path))
        except TokenFileUnusable:
            refused += 1
            continue
        assert len(found) <= len(book)
        for token in (TOKEN, second):
            before, after = book.by_token(token.encode()), found.by_token(token.encode())
            assert before is not None
            if after is not None:
                assert after.scopes <= before.scopes
                assert after.tenants is not None, "bound to tenants, as before"
    assert refused > len(data) // 3
