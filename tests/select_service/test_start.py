"""What a start loads and what it does not: that is how long it takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec

from tests.live.ports import free_port
from tests.wait import PATIENCE_S

# The real command line in a process of its own. Instead of loading what can wait it says what has
# been loaded when the port opened, and ends.
REPORT = """
import json, os, signal, sys
from select_service import cli
before = sorted(sys.modules)
from select_service.edge import lazy_imports

async def report(_):
    import gc
    print(json.dumps({
        "before": before,
        "loaded": sorted(sys.modules),
        "blas_threads": os.environ["OPENBLAS_NUM_THREADS"],
        "full_collections": gc.get_stats()[2]["collections"],
    }))
    os.kill(os.getpid(), signal.SIGTERM)

lazy_imports.load_in_turns = report
sys.exit(cli.main(sys.argv[1:]))
"""

NEVER = (
    "attr",
    "httpcore",
    "pygments",
    "rich",
    "select_service.demo",
    "select_service.edge.console.assets",
    "select_service.edge.console.console_handlers",
    "select_service.edge.console.stream",
    "select_service.simulator",
    "structlog",
)
"""Nothing that serves needs them, installed or not; the console, when somebody opens it."""

LATE = (
    "http.client",
    "prometheus_client",
    "select_service.edge.metrics.exposition",
    "select_service.edge.codec.msgpack_codec",
    "select_service.edge.http.openapi",
    "urllib.request",
)
"""These wait until the port is open."""

ASKED_FOR = {
    "httpx": "--replica-sync-port",
    "indexer.edge.recovery": "--indexer-peers",
    "indexer.edge.snapshots": "--state-dir",
    "select_service.edge.discovery": "--workers-file",
    "select_service.edge.state.journal": "--state-dir",
    "select_service.edge.replication.plane": "--replica-sync-port",
    "select_service.edge.state.warm_start": "--state-dir",
    "sqlite3": "--state-dir",
    "yaml": "DYN_ROUTER_POLICY_CONFIG",
}
"""By the setting that does ask for them."""

EMBEDDED = ("starlette.applications",)
"""For those who mount the API in an application of their own."""


class Started(msgspec.Struct):
    """What the process says of itself when its port has opened."""

    before: set[str]  # modules loaded before `main` has run
    loaded: set[str]
    blas_threads: str
    full_collections: int


def start(*flags: str, **environment: str) -> Started:
    """Start a service; returns what `REPORT` prints."""
    ended = subprocess.run(
        [sys.executable, "-c", REPORT, "--host", "127.0.0.1", "--port", "0", *flags],
        env={"PYTHONPATH": ":".join(sys.path), **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return msgspec.json.decode(ended.stdout, type=Started)


def test_a_plain_start_loads_nothing_that_only_others_need() -> None:
    loaded = start().loaded
    assert "select_service.edge.app" in loaded
    assert not loaded & {*NEVER, *LATE, *ASKED_FOR, *EMBEDDED}


def test_the_process_is_prepared_before_anything_large_is_loaded() -> None:
    started = start()
    assert not {"numpy", "uvicorn", "zmq"} & started.before
    assert started.blas_threads == "1"
    assert started.full_collections == 0


def test_blas_threads_are_the_operators_to_choose() -> None:
    assert start(OPENBLAS_NUM_THREADS="2").blas_threads == "2"


def test_settings_load_what_they_need(tmp_path: Path) -> None:
    workers, policy = tmp_path / "workers.json", tmp_path / "policy.yaml"
    workers.write_text("[]", encoding="utf-8")
    policy.write_text("{}", encoding="utf-8")
    given = {
        "--state-dir": str(tmp_path / "state"),
        "--workers-file": str(workers),
        "--replica-sync-port": str(free_port()),
        "--indexer-peers": f"http://127.0.0.1:{free_port()}",
    }
    flags = [word for flag in given.items() for word in flag]
    started = start(*flags, "--recovery-hold-s", "0", DYN_ROUTER_POLICY_CONFIG=str(policy))
    assert set(ASKED_FOR.values()) == {*given, "DYN_ROUTER_POLICY_CONFIG"}
    missing = set(ASKED_FOR) - started.loaded
    assert not missing
