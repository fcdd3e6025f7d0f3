"""One Ray cluster on this machine for all tests here: loopback, two processors, nothing to phone.

They run in an environment of their own (`make test-ray`), which has Ray and these tests' needs.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator

import pytest

from tests.live.ports import HOST, free_port
from tests.on_ray.cluster import PATIENCE_S, Cluster

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",  # parts of Ray listen on every interface
    "RAY_AUTH_TOKEN": secrets.token_hex(32),  # else one is left in the home directory
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "180",  # 5 s are not enough where others compute, too
    "RAY_worker_niceness": "0",  # 15 by default: behind all that computes beside it
    "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper": "true",
    "OPENBLAS_NUM_THREADS": "1",
}
OBJECT_STORE_BYTES = 80 * 2**20


def haproxy(folder: str) -> dict[str, str]:
    """What keeps HAProxy beside others of its kind, where Ray is set to use it."""
    return {
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{folder}/admin.sock",
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{folder}/metrics.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": folder,
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/server-state",
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "5",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
        "RAY_SERVE_HAPROXY_INGRESS_REQUEST_ROUTER_TIMEOUT_S": "60",
    }


@pytest.fixture
def cluster(running_cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, in which nothing runs afterwards."""
    from ray import serve

    yield running_cluster
    for name in serve.status().applications:
        serve.delete(name, _blocking=False)


@pytest.fixture(scope="session")
def folder() -> Iterator[str]:
    """For Ray's files; a socket's path has 107 characters."""
    made = tempfile.mkdtemp(prefix="r-", dir="/tmp")
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def quiet(folder: str) -> None:
    """Before anybody imports Ray: it reads them then."""
    os.environ.update(QUIET)
    if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1":
        os.environ.update(haproxy(folder))


@pytest.fixture(scope="session")
def running_cluster(quiet: None, folder: str) -> Iterator[Cluster]:
    ray = pytest.importorskip("ray", reason="Ray is not installed: make test-ray")
    from ray import serve
    from ray.serve._private import api, client

    for module in (api, client):
        assert module.HTTP_PROXY_TIMEOUT == 60, "a minute, which no variable makes longer"
        module.HTTP_PROXY_TIMEOUT = PATIENCE_S
    dashboard_port = free_port()
    ray.init(
        num_cpus=2,
        include_dashboard=True,  # Serve's REST API is a part of it
        dashboard_host=HOST,
        dashboard_port=dashboard_port,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        _node_ip_address=HOST,
        _temp_dir=folder,
        runtime_env={"worker_process_setup_hook": "select_service.compat.dynamo.install"},
    )
    try:
        port = free_port()
        serve.start(http_options={"host": HOST, "port": port})
        yield Cluster(port, f"http://{HOST}:{dashboard_port}")
        serve.shutdown()
    finally:
        ray.shutdown()
