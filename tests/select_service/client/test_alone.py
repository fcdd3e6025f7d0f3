"""The client where nothing of the server is installed."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.wait import PATIENCE_S

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
CLIENT = tomllib.loads((ROOT / "deploy/client/pyproject.toml").read_text("utf-8"))["project"]
_IMPORT = """
import sys
import importlib.abc

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in BLOCKED or name in PACKAGES:
            raise ModuleNotFoundError(name + " is not there", name=name)

BLOCKED, PACKAGES = set(sys.argv[1].split()), set(sys.argv[2].split())
sys.meta_path.insert(0, Blocked())
import select_service.client
import select_service.client.cli
from select_service import Selection, ServiceError, WorkerSpec
print(*sorted(name for name in sys.modules if name.startswith(("select_service", "indexer"))))

PACKAGES = set()
from select_service.cli import main
print(main(["workers", "--url", "http://127.0.0.1:1"]), main([]))
try:
    from select_service import SelectionService
except ImportError as error:
    print(error)
"""
SERVER_PACKAGES = ("select_service.edge", "select_service.core", "select_service.settings")
MODULES = {
    "prometheus-client": "prometheus_client",
    "pyyaml": "yaml",
    "pyzmq": "zmq",
    "typing-extensions": "typing_extensions",
}


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[>=<;]", one)[0] for one in requirements}


def test_it_is_imported_without_what_the_server_needs() -> None:
    server = names(PROJECT["dependencies"]) - names(CLIENT["dependencies"])
    assert {"numpy", "pyzmq", "uvicorn", "xxhash"} <= server
    blocked = " ".join(sorted(MODULES.get(name, name) for name in server - {"typing-extensions"}))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _IMPORT, blocked, " ".join(SERVER_PACKAGES)],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    loaded, codes, embedded = done.stdout.splitlines()
    assert "select_service.client.core.session" in loaded.split()
    assert not [one for one in loaded.split() if one.startswith(SERVER_PACKAGES)]
    assert codes == "2 1", done.stderr
    (missing,) = re.findall(
        r"this needs (\S+), which select-service brings and its client alone does not", done.stderr
    )
    assert missing in server
    assert embedded.endswith("pip install . in a checkout, or its wheel")


def test_its_own_wheel_asks_for_httpx_and_msgspec_as_the_service_does() -> None:
    assert names(CLIENT["dependencies"]) == {"httpx", "msgspec"}
    assert set(CLIENT["dependencies"]) < set(PROJECT["dependencies"])
