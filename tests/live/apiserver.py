"""A real kube-apiserver over a real etcd, alone on this machine: no scheduler, no kubelet.

Only those who record it run it (`python -m tests.live.record_apiserver`); what else a cluster does,
as writing the status of pods, `Admin` does instead.
"""

from __future__ import annotations

import base64
import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import yaml
from typing_extensions import override

from tests.live.ports import HOST, free_port
from tests.select_service.edge.security.credentials_made import Authority
from tests.wait import PATIENCE_S, block_until

NAMESPACE = "llm"
_ADMIN_TOKEN = "admin"
FEATURES = "EndpointSliceTerminatingCondition=true,IPv6DualStack=true"
"""Alpha in 1.20, and usual since."""


class Admin:
    """May do everything, and does what scheduler, kubelet and controllers would."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        headers = {"authorization": f"Bearer {_ADMIN_TOKEN}"}
        self._http = httpx.Client(
            base_url=cluster.url,
            verify=cluster.authority.client(),
            headers=headers,
            timeout=PATIENCE_S,
        )

    def ask(self, method: str, path: str, body: Any = None, kind: str = "") -> httpx.Response:
        """One request; refusals are answers, too."""
        kind = kind or ("application/merge-patch+json" if method == "PATCH" else "application/json")
        return self._http.request(method, path, json=body, headers={"content-type": kind})

    def do(self, method: str, path: str, body: Any = None) -> Any:
        """One request that succeeds; returns the object."""
        answer = self.ask(method, path, body)
        assert answer.is_success, answer.text
        return answer.json()

    def apply(self, one: Any, plural: str) -> None:
        """Create an object in our namespace."""
        version = one["apiVersion"]
        root = "/api" if version == "v1" else "/apis"
        self.do("POST", f"{root}/{version}/namespaces/{NAMESPACE}/{plural}", one)

    def apply_files(self, *files: Path) -> None:
        """Create what manifests name, except Deployments."""
        for one in (one for file in files for one in yaml.safe_load_all(file.read_text())):
            if one["kind"] != "Deployment":
                self.apply(one, f"{one['kind'].lower()}s")

    def token(self, account: str) -> str:
        """A token of a ServiceAccount, as it is mounted into pods."""
        path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{account}/token"
        kind = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        return str(self.do("POST", path, kind)["status"]["token"])

    def close(self) -> None:
        self._http.close()


class Cluster:
    """The two processes; each can be stopped and started.

    Args:
        programs: folder with `etcd` and `kube-apiserver`.
        folder: for what they keep.

    Attributes:
        SERVER: the name of the API server's program.
    """

    SERVER = "kube-apiserver"

    def __init__(self, programs: Path, folder: Path) -> None:
        self._programs, self._folder = programs, folder
        self.authority = Authority(folder)
        self.certificate, self._key = self.authority.issue("kube-apiserver")
        self.port, self._client_port, self._peer_port = free_port(), free_port(), free_port()
        self.url = f"https://{HOST}:{self.port}"
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._key_of_accounts = folder / "accounts.key"
        subprocess.run(
            ["openssl", "genrsa", "-out", str(self._key_of_accounts)],
            check=True,
            capture_output=True,
            timeout=PATIENCE_S,
        )
        (folder / "tokens.csv").write_text(f'{_ADMIN_TOKEN},admin,1,"system:masters"\n')
        (folder / "etcd").mkdir(mode=0o700)

    @contextlib.contextmanager
    def running(self) -> Iterator[Admin]:
        """Both run, and our namespace exists."""
        self.start_etcd()
        self.start_server()
        admin = Admin(self)
        try:
            self.prepare(admin)
            yield admin
        finally:
            admin.close()
            for name in list(self._running):
                self.stop(name)

    def prepare(self, admin: Admin) -> None:
        admin.do("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})

    def start_etcd(self) -> None:
        clients, peers = f"http://{HOST}:{self._client_port}", f"http://{HOST}:{self._peer_port}"
        self._start(
            "etcd",
            *("--data-dir", str(self._folder / "etcd"), "--unsafe-no-fsync"),
            *("--listen-client-urls", clients, "--advertise-client-urls", clients),
            *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers),
            *("--initial-cluster", f"default={peers}"),
        )
        self._await(lambda: httpx.get(f"{clients}/health").json()["health"] == "true")

    def start_server(self, *more: str) -> None:
        """Start the API server, and wait until it is ready.

        Args:
            more: flags.
        """
        self._start(
            self.SERVER,
            f"--etcd-servers=http://{HOST}:{self._client_port}",
            *(f"--bind-address={HOST}", f"--secure-port={self.port}"),
            *(f"--tls-cert-file={self.certificate}", f"--tls-private-key-file={self._key}"),
            *self._flags(),
            *more,
        )
        trust = self.authority.client()
        headers = {"authorization": f"Bearer {_ADMIN_TOKEN}"}
        url = f"{self.url}/readyz"
        self._await(lambda: httpx.get(url, verify=trust, headers=headers).text == "ok")

    def _flags(self) -> list[str]:
        accounts = str(self._key_of_accounts)
        return [
            *("--insecure-port=0", f"--token-auth-file={self._folder / 'tokens.csv'}"),
            *("--authorization-mode=RBAC", "--endpoint-reconciler-type=none"),
            f"--service-account-key-file={accounts}",
            f"--service-account-signing-key-file={accounts}",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--disable-admission-plugins=ServiceAccount",  # its tokens come from a controller
            f"--feature-gates={FEATURES}",
        ]

    def stop(self, name: str, *, kill: bool = False) -> None:
        process = self._running.pop(name)
        process.kill() if kill else process.terminate()
        process.wait(PATIENCE_S)

    def compact(self) -> None:
        """Forget all versions before the current one, as etcd does every five minutes."""
        url = f"http://{HOST}:{self._client_port}/v3/kv"
        key = base64.b64encode(b"/").decode()
        version = httpx.post(f"{url}/range", json={"key": key}).json()["header"]["revision"]
        done = httpx.post(f"{url}/compaction", json={"revision": version, "physical": True})
        assert done.is_success, done.text

    def save_etcd(self) -> None:
        """Make a backup of etcd's data."""
        shutil.rmtree(self._folder / "backup", ignore_errors=True)
        self.stop("etcd")
        shutil.copytree(self._folder / "etcd", self._folder / "backup")
        self.start_etcd()

    def restore_etcd(self) -> None:
        """Restore the backup: versions go back."""
        self.stop(self.SERVER)
        self.stop("etcd")
        shutil.rmtree(self._folder / "etcd")
        shutil.copytree(self._folder / "backup", self._folder / "etcd")
        self.start_etcd()
        self.start_server()

    def _start(self, name: str, *arguments: str) -> None:
        with (self._folder / f"{name}.log").open("ab") as log:
            command = [str(self._programs / name), *arguments]
            self._running[name] = subprocess.Popen(command, stdout=log, stderr=log)

    def _await(self, is_up: Any) -> None:
        def asked() -> bool:
            try:
                return bool(is_up())
            except (httpx.HTTPError, KeyError):
                return False

        block_until(asked)


class SliceCluster(Cluster):
    """The server of `endpointslice_server/main.go`: it has EndpointSlices alone, for everybody."""

    SERVER = "endpointslice_server"

    @override
    def prepare(self, admin: Admin) -> None:
        """There are no Namespaces."""

    @override
    def _flags(self) -> list[str]:
        return []
