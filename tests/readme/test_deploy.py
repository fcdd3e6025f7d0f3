"""The manifests in deploy/ are YAML, and their flags are flags of the service."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from select_service.cli import parse

MANIFESTS = sorted((Path(__file__).parents[2] / "deploy" / "kubernetes").glob("*.yaml"))


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_manifest(path: Path) -> None:
    documents: list[dict[str, Any]] = list(yaml.safe_load_all(path.read_text("utf-8")))
    deployments = [one for one in documents if one["kind"] == "Deployment"]
    assert deployments
    for deployment in deployments:
        for container in deployment["spec"]["template"]["spec"]["containers"]:
            settings = parse(container["args"], {})
            ports = {port["name"]: port["containerPort"] for port in container["ports"]}
            assert ports == {"http": settings.port, "replica-sync": settings.replica_sync_port}
