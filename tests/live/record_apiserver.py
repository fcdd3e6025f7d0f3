"""Records what a real kube-apiserver answers us; see tests/golden/kubernetes-apiserver/README.md.

    python -m tests.live.record_apiserver PROGRAMS [SCENARIO ...]

PROGRAMS is a folder with `etcd` and `kube-apiserver` or `endpointslice_server`; unless scenarios
are named, all that this server has are recorded. Each scenario gets a cluster of its own.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

import msgspec

from tests.live.apiserver import Cluster, SliceCluster
from tests.live.recorded_apiserver import GOLDEN, LiveWorld, Scenario
from tests.select_service.edge.discovery.apiserver_scenarios import DISCOVERY
from tests.select_service.edge.discovery.endpointslice_scenarios import CURRENT
from tests.select_service.planner.edge.apiserver_scenarios import PLANNER
from tests.select_service.planner.edge.custom_resource_scenarios import CUSTOM

DEPLOY = Path(__file__).parents[2] / "deploy"
ACCOUNTS = {
    "select-service": [DEPLOY / "kubernetes" / "base" / "account.yaml"],
    "select-planner": [DEPLOY / "planner" / "kubernetes.yaml", DEPLOY / "planner" / "drain.yaml"],
}
"""The manifests that give our processes their rights: what they lack, a recording lacks."""


def kind(name: str) -> type[Cluster]:
    """What a scenario plays on."""
    return SliceCluster if name in CURRENT else Cluster


def record(programs: Path, name: str, scenario: Scenario) -> None:
    """Play a scenario against a new cluster, and write its recording."""
    with tempfile.TemporaryDirectory() as place:
        folder, credentials = Path(place) / "cluster", Path(place) / "credentials"
        folder.mkdir()
        credentials.mkdir()
        with kind(name)(programs, folder).running() as admin:
            account = ""
            if name not in CURRENT:
                for files in ACCOUNTS.values():
                    admin.apply_files(*files)
                account = "select-planner" if name in PLANNER | CUSTOM else "select-service"

            async def play() -> msgspec.Struct:
                world = LiveWorld(admin, credentials, account)
                async with world.serving():
                    await scenario(world)
                world.recording.exchanges = [one for one in world.recording.exchanges if one.head]
                return world.recording

            recording = asyncio.run(play())
    GOLDEN.mkdir(exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(recording), indent=1)
    (GOLDEN / f"{name}.json").write_bytes(text + b"\n")


def main() -> None:
    folder, *names = sys.argv[1:]
    programs = Path(folder)
    scenarios = DISCOVERY | CURRENT | PLANNER | CUSTOM
    for name in names or (one for one in scenarios if (programs / kind(one).SERVER).exists()):
        print(name, flush=True)  # noqa: T201
        record(programs, name, scenarios[name])


if __name__ == "__main__":
    main()
