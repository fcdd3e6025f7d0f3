"""What the planner shows to whom: no proxy of the environment, and no secret to any reader."""

from __future__ import annotations

import asyncio
import base64
import ssl
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import httpx
import pytest

from select_service.client import AsyncClient, Options
from select_service.kubernetes_api import KubernetesApi
from select_service.planner.cli import main
from select_service.planner.edge import run_command
from select_service.planner.edge.kube import Kube
from select_service.planner.edge.selectors import SelectorFleet
from select_service.planner.edge.sources.prometheus import PrometheusSource
from select_service.planner.edge.state_file import Memory
from select_service.planner.errors import PlannerError, SettingsError
from select_service.planner.settings import RunSettings
from select_service.planner.types import Missing
from tests.live.ports import free_port
from tests.live.tcp_server import tcp_server
from tests.select_service.edge.security.credentials_made import Authority
from tests.select_service.planner.edge.fakes import KEY, PREFILL
from tests.select_service.planner.golden import PROFILE
from tests.wait import block_until

SECRET = "hunter2-s3cret"
PROXIED = "--proxy-from-environment"
VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


class Listening:
    """Takes the first bytes of every connection, and answers 200 with an empty object."""

    def __init__(
        self,
        status: str = "200 OK",
        body: bytes = b"{}",
        tls: ssl.SSLContext | None = None,
        port: int = 0,
    ) -> None:
        self._tls = tls
        self.port = port
        self.received: list[bytes] = []
        self._answer = b"HTTP/1.1 %s\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s" % (
            status.encode(),
            len(body),
            body,
        )

    async def __aenter__(self) -> Self:
        self._serving = tcp_server(self._serve, port=self.port, tls=self._tls)
        self.port = port = await self._serving.__aenter__()
        scheme, host = ("http", "127.0.0.1") if self._tls is None else ("https", "localhost")
        self.url = f"{scheme}://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._serving.__aexit__(None, None, None)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.received.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(self._answer)
        await writer.drain()


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


def by_proxy(monkeypatch: pytest.MonkeyPatch, proxy: Listening) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, proxy.url)
        monkeypatch.setenv(name.lower(), proxy.url)


async def ask(which: str, url: str, settings: Callable[..., RunSettings], token: Path) -> None:
    """Ask as `select-planner run` would; what comes of it does not matter."""
    if which == "kubernetes":
        chosen = settings(connector="kubernetes", kubernetes_api=url, namespace="n")
        kube = run_command._kube(chosen)
        assert kube is not None
        await kube.ask("GET", "/version")
        await kube.close()
    elif which == "ray":
        chosen = settings(connector="ray", ray_dashboard=url)
        connector = run_command._connector(chosen, FLEET, {PREFILL: "serve/a/b"}, None, Memory())
        await connector.states([PREFILL])
        await connector.close()
    elif which == "drain":
        selectors = SelectorFleet([url], token.read_text)
        with pytest.raises(PlannerError):
            await selectors.workers(KEY)
        await selectors.close()
    else:
        flags: dict[str, dict[str, Any]] = {
            "selector": {"metrics_source": "selector", "selector": (url,), "token_file": token},
            "prometheus": {"prometheus_url": url},
            "token": {"prometheus_url": url, "prometheus_token_file": token},
        }
        source = run_command._source(settings(**flags[which]))
        await source.windows([KEY], 10.0)
        await source.close()


FLEET: Any = SimpleNamespace(models=[])
CASES = ("kubernetes", "ray", "drain", "selector", "prometheus", "token")


@pytest.mark.parametrize("which", CASES)
async def test_no_client_takes_a_proxy_from_the_environment(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "token"
    token.write_text(SECRET)
    async with Listening() as proxy, Listening() as server:
        by_proxy(monkeypatch, proxy)
        await ask(which, server.url, RunSettings, token)
        assert proxy.received == []
        assert server.received


@pytest.mark.parametrize(
    ("which", "is_proxied"), list(zip(CASES, (False, True, False, False, True, False), strict=True))
)
async def test_a_flag_asks_through_it_and_shows_it_no_credentials(
    which: str, is_proxied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without TLS a proxy reads what it passes on: what may carry credentials goes directly."""
    token = tmp_path / "token"
    token.write_text(SECRET)

    def settings(**more: Any) -> RunSettings:
        return RunSettings(proxy_from_environment=True, **more)

    async with Listening() as proxy, Listening() as server:
        by_proxy(monkeypatch, proxy)
        await ask(which, server.url, settings, token)
        assert bool(proxy.received) is is_proxied
        assert bool(server.received) is not is_proxied
        assert SECRET.encode() not in b"".join(proxy.received)


async def test_inside_tls_credentials_may_pass_a_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "token"
    token.write_text(SECRET)
    async with Listening("502 no") as proxy:
        by_proxy(monkeypatch, proxy)
        made = RunSettings(
            prometheus_url="https://prometheus:9090",
            prometheus_token_file=token,
            proxy_from_environment=True,
        )
        source = run_command._source(made)
        await source.windows([KEY], 10.0)
        await source.close()
        assert proxy.received
        assert all(one.startswith(b"CONNECT prometheus:9090 ") for one in proxy.received)
        assert SECRET.encode() not in b"".join(proxy.received)


def test_a_proxy_that_cannot_be_used_is_named_without_its_password(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"gopher://me:{SECRET}@proxy:1")
    code = main(["run", "--model-name", "m", "--profile-results-dir", str(PROFILE), PROXIED])
    errors = capsys.readouterr().err
    assert code == 1
    assert "--proxy-from-environment: the proxy of the environment: " in errors
    assert SECRET not in errors


# -- credentials of Prometheus ---------------------------------------------------------------------


def basic(text: str) -> bytes:
    return b"Basic " + base64.b64encode(text.encode())


@pytest.mark.parametrize(
    ("flag", "first", "then", "shown"),
    [
        (
            "prometheus_token_file",
            "one\n",
            "two\n",
            [b"Bearer one", b"Bearer two"],
        ),
        (
            "prometheus_basic_auth_file",
            "me:one",
            "me:two:x",
            [basic("me:one"), basic("me:two:x")],
        ),
    ],
)
async def test_credentials_of_prometheus_are_read_again(
    flag: str, first: str, then: str, shown: list[bytes], tmp_path: Path
) -> None:
    file = tmp_path / "credentials"
    file.write_text(first)
    async with Listening() as server:
        made: Any = {"prometheus_url": server.url, flag: file}
        source = run_command._source(RunSettings(**made))
        await source.loads([KEY])
        assert all(shown[0] in one for one in server.received)
        server.received.clear()
        file.write_text(then)  # Kubernetes rotates it
        await source.loads([KEY])
        assert server.received
        assert all(shown[1] in one for one in server.received)
        file.unlink()
        arrived = (await source.loads([KEY]))[KEY].arrived
        assert isinstance(arrived, Missing)
        assert f"{file}: No such file or directory" in arrived.why
        await source.close()


async def test_prometheus_may_have_a_certificate_of_a_private_authority(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*authority.issue("prometheus"))
    token = tmp_path / "token"
    token.write_text(SECRET)
    async with Listening(tls=tls) as server:
        for ca, is_received in ((None, False), (authority.cert, True)):
            made = RunSettings(
                prometheus_url=server.url, prometheus_token_file=token, prometheus_ca=ca
            )
            source = run_command._source(made)
            await source.loads([KEY])
            await source.close()
            assert bool(server.received) is is_received
        assert all(f"Bearer {SECRET}".encode() in one for one in server.received)
    bad = RunSettings(prometheus_url="https://p", prometheus_ca=token)
    with pytest.raises(SettingsError, match=f"--prometheus-ca {token}: ") as caught:
        run_command._source(bad)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("which", ["prometheus", "kubernetes", "sdk"])
async def test_an_authority_that_rotates_is_read_again(which: str, tmp_path: Path) -> None:
    """The file of --prometheus-ca, ca.crt of the service account, `ca` of a client."""
    mounted = tmp_path / "ca.crt"
    authorities = [Authority(tmp_path, name) for name in ("old", "new")]
    contexts = [ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) for _ in authorities]
    for authority, tls in zip(authorities, contexts, strict=True):
        tls.load_cert_chain(*authority.issue(f"server-of-{authority.cert.stem}"))
    old, new = (authority.cert.read_text() for authority in authorities)
    mounted.write_text(old)
    async with Listening(tls=contexts[0]) as server:
        ask, close = asker(which, server.url, mounted)

        async def received(text: str, at: Listening) -> int:
            mounted.write_text(text)
            at.received.clear()
            with suppress(Exception):  # it may not believe who answers, or be of another kind
                await ask()
            return len(at.received)

        assert await received(old, server) == 1
        assert await received("half a certifi", server) == 1, "nothing changes"
        assert await received(new, server) == 0
    async with Listening(tls=contexts[1], port=server.port) as successor:
        assert await received(new, successor) == 1
        assert await received(old, successor) == 0
    await close()


def asker(
    which: str, url: str, ca: Path
) -> tuple[Callable[[], Awaitable[object]], Callable[[], Awaitable[object]]]:
    """Return what asks once, and what closes its client."""
    if which == "prometheus":
        source = run_command._source(RunSettings(prometheus_url=url, prometheus_ca=ca))
        assert isinstance(source, PrometheusSource)
        return lambda: source._rows("up"), source.close
    if which == "kubernetes":
        kube = Kube(KubernetesApi(url, str(ca.parent), "default"))
        return lambda: kube.ask("GET", "/"), kube.close
    one = AsyncClient(url, ca=str(ca), options=Options.single_attempt(10.0))
    return one.ready, one.aclose


async def test_the_name_and_password_of_a_url_are_sent_and_not_shown() -> None:
    async with Listening("401 Unauthorized", b"no") as server:
        url = server.url.replace("://", f"://me:{SECRET}@")
        source = run_command._source(RunSettings(prometheus_url=url))
        arrived = (await source.loads([KEY]))[KEY].arrived
        await source.close()
        assert basic(f"me:{SECRET}") in server.received[0]
        assert arrived == Missing(f"{server.url}/api/v1/query: answered 401")


@pytest.mark.parametrize("content", ["", "two words", "\x00", "ü", "a" * 20_000])
def test_a_file_without_a_token_is_an_error_that_does_not_quote_it(
    content: str, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text(content)
    with pytest.raises(SettingsError, match=str(file)) as caught:
        run_command._source(RunSettings(prometheus_token_file=file))
    assert not content or content not in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--token-file", "t"], "--token-file is for the selectors of"),
        (
            ["--prometheus-token-file", "t", "--metrics-source", "selector"],
            "--prometheus-token-fil",
        ),
        (["--prometheus-ca", "c"], "--prometheus-ca is for a --prometheus-url with https://"),
        (["--prometheus-url", "http://p:1", "--metrics-source", "trace"], "--prometheus-url is of"),
        (
            ["--prometheus-token-file", "t", "--prometheus-basic-auth-file", "b"],
            "--prometheus-token-file and --prometheus-basic-auth-file: one of them is shown",
        ),
        (
            ["--prometheus-token-file", "t", "--prometheus-url", f"http://a:{SECRET}@p:9"],
            "--prometheus-url contains a user's name",
        ),
    ],
)
def test_credentials_that_would_not_be_used_are_refused(
    flags: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--model-name", "m", "--profile-results-dir", "d", *flags]) == 1
    errors = capsys.readouterr().err
    assert errors.startswith(f"select-planner run: {why}")
    assert SECRET not in errors


@pytest.mark.parametrize(
    "flags",
    [
        ["--selector", f"http://me:{SECRET}@s:1"],
        ["--kubernetes-api", f"https://me:{SECRET}@k"],
        ["--ray-dashboard", f"http://me:{SECRET}@r:8265"],
        ["--prometheus-url", f"gopher://me:{SECRET}@p"],
        ["--prometheus-url", f"http://me:se/{SECRET}@p"],
        [f"--promteheus-url=http://me:{SECRET}@p"],
        [f"http://me:{SECRET}@p"],
    ],
)
def test_an_address_that_is_refused_is_shown_without_its_secret(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["run", *flags])
    errors = capsys.readouterr().err
    assert "***@" in errors
    assert SECRET not in errors


# -- a process -------------------------------------------------------------------------------------


LEAKY = """
import http.server, json, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        secret, shown = sys.argv[1], self.headers["authorization"]
        text = f"bad {shown} http://me:{secret}@here/?token={secret}"
        body = json.dumps({"status": "error", "error": text}).encode()
        self.send_response(401)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


@pytest.fixture
def leaky() -> Iterator[str]:
    """A server that quotes in its error what was shown to it, as some do."""
    process = subprocess.Popen(
        [sys.executable, "-c", LEAKY, SECRET], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    yield f"127.0.0.1:{process.stdout.readline().strip()}"
    process.kill()
    process.wait()
    process.stdout.close()


def _is_up(base: str) -> bool:
    try:
        return httpx.get(f"{base}/health", trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.parametrize("how", ["url", "file"])
def test_a_planner_shows_no_secret_to_anybody(how: str, leaky: str, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(SECRET)
    flags = {
        "url": ("--prometheus-url", f"http://me:{SECRET}@{leaky}"),
        "file": ("--prometheus-url", f"http://{leaky}", "--prometheus-token-file", str(token)),
    }[how]
    log, port = tmp_path / "log", free_port()
    command = (
        *(sys.executable, "-m", "select_service.planner", "run", "--model-name", "m"),
        *("--profile-results-dir", str(PROFILE), "--port", str(port), "--state-dir", str(tmp_path)),
        *("--adjustment-interval", "0.2", "--load-interval", "0.1", *flags),
    )
    with log.open("w") as written:
        process = subprocess.Popen(command, stderr=written, stdout=written)
    try:
        base = f"http://127.0.0.1:{port}"

        def output() -> str:
            return "\n".join(
                httpx.get(base + path, trust_env=False).text
                for path in ("/decisions", "/metrics", "/ready", "/health")
            )

        block_until(lambda: _is_up(base))
        block_until(lambda: "bad Ba" in output() or "bad Be" in output())
        shown = output()
        assert SECRET not in shown
        assert "http://***@here/?token=***" in shown
    finally:
        process.terminate()
        process.wait()
    text = log.read_text()
    assert f"listening on localhost port {port}; the first plan comes in 0.2 s" in text
    assert text.endswith("stopped\n")
    assert SECRET not in text
    assert base64.b64encode(f"me:{SECRET}".encode()).decode() not in text + shown
    state = "".join(one.read_text() for one in tmp_path.glob("planner*"))
    assert SECRET not in state
