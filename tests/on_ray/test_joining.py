"""A planner that is to join a Ray that is not there."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.live.ports import HOST, free_port


def test_a_cluster_nobody_answers_for_is_reported_at_once() -> None:
    """Ray itself would try for two minutes."""
    pytest.importorskip("ray", reason="Ray is not installed: make test-ray")
    address = f"{HOST}:{free_port()}"
    code = "from select_service.planner.edge.ray_cluster import joined; joined('the connector')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"RAY_ADDRESS": address},
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    error = done.stderr.strip().rpartition("\n")[2]
    assert "the connector needs a Ray cluster to join" in error
    assert f"RAY_ADDRESS={address}" in error
