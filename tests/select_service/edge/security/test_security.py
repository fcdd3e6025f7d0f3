"""Tokens, certificates and keys of one process: what is open, SIGHUP, and what nobody may see."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from indexer.edge.curve import new_key_file, read_key_file
from indexer.errors import KeyFileUnusable
from select_service import cli
from select_service.edge.security.exposure import open_doors, side_address
from select_service.edge.security.security_files import SecurityFiles
from select_service.edge.security.tokens import read_token_file
from select_service.errors import CertificatesUnusable
from select_service.settings import Settings
from tests.live.ports import HOST, free_port
from tests.live.server import Server
from tests.select_service.edge.security.credentials_made import Authority, TokenFile
from tests.select_service.edge.serving import (
    PROMPT,
    Wire,
    add_worker,
    app_client,
    listening,
)
from tests.wait import PATIENCE_S, block_until


@pytest.mark.parametrize(
    ("settings", "missing"),
    [
        ({}, {"tokens", "tls"}),
        ({"host": "::"}, {"tokens", "tls"}),
        ({"host": "a.name"}, {"tokens", "tls"}),
        ({"host": "127.0.0.1"}, set()),
        ({"host": "127.8.0.1"}, set()),
        ({"host": "::1"}, set()),
        ({"host": "localhost"}, set()),
        ({"port": None, "uds": "/s"}, set()),
        ({"port": None, "uds": "/s", "side_port": 1}, {"tokens", "tls"}),
        ({"host": "::1", "side_port": 1}, {"tokens", "tls"}),
        ({"host": "::1", "side_port": 1, "side_host": "127.0.0.1"}, set()),
        ({"token_file": "t"}, {"tls"}),
        ({"tls_cert": "c"}, {"tokens"}),
        ({"tls_cert": "c", "tls_client_ca": "c"}, set()),
        ({"host": "::1", "replica_sync_port": 1}, {"replicas"}),
        ({"host": "::1", "replica_sync_port": 1, "curve_key": "k"}, set()),
    ],
)
def test_what_is_open(settings: dict[str, Any], missing: set[str]) -> None:
    assert open_doors(Settings(**settings)).keys() == missing


@pytest.mark.parametrize(
    ("settings", "address"),
    [
        ({"side_host": "h"}, None),
        ({"side_port": 1}, ("0.0.0.0", 1)),
        ({"side_port": 1, "host": "10.0.0.1"}, ("10.0.0.1", 1)),
        ({"side_port": 1, "host": "127.0.0.1"}, ("0.0.0.0", 1)),
        ({"side_port": 1, "host": "localhost"}, ("0.0.0.0", 1)),
        ({"side_port": 1, "host": "::1"}, ("::", 1)),
        ({"side_port": 1, "host": "::1", "side_host": "10.0.0.1"}, ("10.0.0.1", 1)),
    ],
)
def test_where_the_side_entrance_is(
    settings: dict[str, Any], address: tuple[str, int] | None
) -> None:
    assert side_address(Settings(**settings)) == address


async def test_metrics_say_what_is_open_and_who_was_refused(tmp_path: Path) -> None:
    file = TokenFile(tmp_path / "tokens")
    file.add("ops", "admin")
    async with app_client(**file.setting, host="0.0.0.0") as (client, _):
        assert (await client.get("/workers")).status_code == 401
        text = (await client.get("/metrics", headers=file.header("ops"))).text
        assert 'select_service_security_open{missing="tokens"} 0.0' in text
        assert 'select_service_security_open{missing="tls"} 1.0' in text
        assert 'select_service_auth_refused_total{reason="missing"} 1.0' in text
        assert "select_service_auth_tokens 1.0" in text


async def test_a_token_is_looked_up_once_for_the_header_lines_it_comes_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = TokenFile(tmp_path / "tokens")
    file.add("gateway", "select")
    async with listening(**file.setting) as (port, service, _):
        add_worker(service)
        assert service.security is not None
        authority = service.security.authority
        assert authority is not None
        looked_up, genuine = [], authority.grant

        def grant(*of: Any) -> Any:
            looked_up.append(of)
            return genuine(*of)

        monkeypatch.setattr(authority, "grant", grant)
        for _ in range(3):
            wire = await Wire.to(port)
            for _ in range(10):
                assert await wire.status("POST", "/select", PROMPT, file.line("gateway")) == 200
        assert len(looked_up) == 1


def test_one_bad_file_and_nothing_is_changed(tmp_path: Path) -> None:
    ca, file = Authority(tmp_path), TokenFile(tmp_path / "tokens")
    cert, key = ca.issue("server")
    file.add("a", "read")
    new_key_file(str(tmp_path / "key"))
    (tmp_path / "replicas").write_text("")
    security = SecurityFiles(
        Settings(
            token_file=str(file.path),
            tls_cert=str(cert),
            tls_key=str(key),
            replica_sync_port=1,
            curve_key=str(tmp_path / "key"),
            curve_replica_keys=str(tmp_path / "replicas"),
        )
    )
    authority, certificates = security.authority, security.certificates
    assert authority is not None
    assert certificates is not None
    file.add("b", "read")
    (tmp_path / "replicas").write_text("nonsense")
    with pytest.raises(KeyFileUnusable, match="no CURVE key"):
        security.prepare()
    assert len(authority.book) == 1
    (tmp_path / "replicas").write_text("")
    content = cert.read_bytes()
    cert.write_text("nonsense")
    with pytest.raises(CertificatesUnusable, match=r"server\.pem") as caught:
        security.prepare()
    assert len(authority.book) == 1
    security.reject(caught.value)
    assert certificates.reloads["refused"] == 1
    cert.write_bytes(content)
    put_in_force = security.prepare()
    assert len(authority.book) == 1, "not before it is said"
    put_in_force()
    assert len(authority.book) == 2
    assert security.reloads == {"done": 1, "refused": 1}
    assert certificates.reloads == {"done": 1, "refused": 1}


def test_secrets_that_others_can_read_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    new_key_file(str(tmp_path / "key"))
    settings = Settings(replica_sync_port=1, curve_key=str(tmp_path / "key"))
    with caplog.at_level(logging.WARNING):
        SecurityFiles(settings)
        assert caplog.text == ""
        os.chmod(tmp_path / "key", 0o644)
        SecurityFiles(settings)
    assert "can be read by others" in caplog.text


# -- the command line ------------------------------------------------------------------------------


def test_a_new_token_is_shown_once_and_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["token", "new", "--name", "gw", "--scopes", "select,lifecycle"]
    assert cli.main([*arguments, "--tenant", "a b", "--tenant", "c", "--days", "90"]) == 0
    line, shown = capsys.readouterr()
    token = shown.split(": ")[1].strip()
    assert token not in line
    (tmp_path / "tokens").write_text(line)
    entry = read_token_file(str(tmp_path / "tokens")).by_token(token.encode())
    assert entry is not None
    assert (entry.name, entry.tenants) == ("gw", ("a b", "c"))
    assert entry.scopes == {"select", "lifecycle"}
    assert 89 < (entry.expires_at - time.time()) / 86_400 <= 90
    assert json.loads(line)["scopes"] == ["select", "lifecycle"]


def test_a_scope_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["token", "new", "--name", "gw", "--scopes", "root"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "--scopes: 'root' is none of catalog, " in output.err


@pytest.mark.parametrize("days", ["0", "-1", "nan", "1e99", "x"])
def test_days_there_are_not(days: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["token", "new", "--name", "gw", "--scopes", "select", f"--days={days}"])
    assert "--days" in capsys.readouterr().err


def test_new_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "key")
    assert cli.main(["keys", "new", path]) == 0
    assert capsys.readouterr().out.strip() == read_key_file(path).public
    assert cli.main(["keys", "new", path]) == 1
    assert "File exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tls-key", "k"],
        ["--tls-client-ca", "c"],
        ["--curve-replica-keys", "k"],
        ["--curve-worker-key", "nonsense"],
        ["--token-file", ""],
    ],
)
def test_flags_that_make_no_sense_alone(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.parse(arguments, {})
    assert arguments[0] in capsys.readouterr().err


# -- the process -----------------------------------------------------------------------------------


@pytest.mark.e2e
def test_sighup_reads_again_and_nothing_shows_a_token(tmp_path: Path) -> None:
    file = TokenFile(tmp_path / "tokens")
    file.add("one", "select")
    file.add("ops", "admin")
    args = ("--host", "0.0.0.0", "--token-file", str(file.path), "--access-log")
    with Server(tmp_path / "log", args=(*args, "--log-level", "debug")) as server:
        base = f"http://{HOST}:{server.port}"
        with httpx.Client(base_url=base, trust_env=False) as client:

            def status(name: str) -> int:
                return client.post("/select", json=PROMPT, headers=file.header(name)).status_code

            assert (status("one"), status("ops")) == (503, 503)
            file.drop("one")
            assert server.process is not None
            server.process.send_signal(signal.SIGHUP)
            block_until(lambda: status("one") == 401)
            file.path.write_text(file.tokens["ops"])
            server.process.send_signal(signal.SIGHUP)
            counted = 'security_reloads_total{outcome="refused"} 1.0'
            block_until(lambda: counted in client.get("/metrics", headers=file.header("ops")).text)
            assert (status("one"), status("ops")) == (401, 503)
            proc = Path(f"/proc/{server.process.pid}")
            shown = (proc / "cmdline").read_bytes() + (proc / "environ").read_bytes()
        log = (tmp_path / "log").read_text()
    assert log.count("OPEN TO THE NETWORK") == 1
    assert "there is no TLS" in log
    assert "--token-file)" not in log, "that is there"
    assert "line 1: no JSON object" in log
    for token in file.tokens.values():
        assert token not in log
        assert token.encode() not in shown


@pytest.mark.e2e
@pytest.mark.parametrize("flag", ["--token-file", "--tls-cert", "--curve-key"])
def test_no_start_without_the_files(flag: str, tmp_path: Path) -> None:
    arguments = [flag, str(tmp_path / "none"), "--replica-sync-port", str(free_port())]
    done = subprocess.run(
        [sys.executable, "-m", "select_service", "--port", str(free_port()), *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 1
    assert "cannot start" in done.stderr
    assert "No such file" in done.stderr
    assert "Traceback" not in done.stderr
