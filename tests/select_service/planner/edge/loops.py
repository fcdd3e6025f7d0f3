"""The planner's loop, with a source that returns what is set."""

from __future__ import annotations

import httpx

from select_service.planner.core.fleet_plan import FleetPlan
from select_service.planner.edge.connectors.connector import Connector, DryRun
from select_service.planner.edge.connectors.kubernetes import KubernetesConnector
from select_service.planner.edge.http_server import create_app
from select_service.planner.edge.leases.file_lease import FileLease
from select_service.planner.edge.leases.lease import LeaderLease
from select_service.planner.edge.loop import Loop
from select_service.planner.edge.predictors import PredictorSettings
from select_service.planner.edge.run_settings import ModelSettings, PoolTarget, build_fleet
from select_service.planner.edge.state_file import StateFile
from select_service.planner.types import Load, ModelKey, PoolState, Window
from tests.select_service.planner.core.planned_fleet import BUSY
from tests.select_service.planner.edge.fakes import DECODE, PREFILL, Clock, FakeKube
from tests.select_service.planner.golden import PROFILE

START = {PREFILL: 1, DECODE: 1}
ONE_OF_EACH = {PREFILL: PoolState(1, 1), DECODE: PoolState(1, 1)}


class SetSource:
    """A source that returns what is set."""

    warnings: tuple[str, ...] = ()

    def __init__(self, window: Window = BUSY) -> None:
        self.window = window
        self.load = Load()

    async def begin(self, models: list[ModelKey]) -> None:
        pass

    async def windows(self, models: list[ModelKey], seconds: float) -> dict[ModelKey, Window]:
        return dict.fromkeys(models, self.window)

    async def loads(self, models: list[ModelKey]) -> dict[ModelKey, Load]:
        return dict.fromkeys(models, self.load)

    async def close(self) -> None:
        pass


def fleet(gpus_max: int = 64, name: str = "m") -> FleetPlan:
    model = ModelSettings(
        model_name=name,
        profile_results_dir=str(PROFILE),
        itl_ms=20.0,
        pools=[PoolTarget(role="prefill"), PoolTarget(role="decode")],
    )
    return build_fleet([model], PredictorSettings(name="constant"), gpus_max)


def loop_of(
    connector: Connector | None = None,
    lease: LeaderLease | None = None,
    state: StateFile | None = None,
    source: SetSource | None = None,
    gpus_max: int = 64,
) -> Loop:
    return Loop(
        fleet(gpus_max),
        source or SetSource(),  # type: ignore[arg-type] # lists are sequences
        connector or DryRun(START),
        lease or FileLease(),
        clock=Clock(),
        wall=lambda: 1000.0,
        state=state,
    )


def kube_loop(
    fake: FakeKube,
    lease: LeaderLease | None = None,
    *,
    prefill: tuple[int, int] = (1, 1),
    decode: tuple[int, int] = (1, 1),
    gpus_max: int = 64,
) -> Loop:
    """One that scales deployments, of each so many replicas and of these so many that are ready."""
    fake.deployment("prefill", *prefill)
    fake.deployment("decode", *decode)
    resources = {PREFILL: "deployments/prefill", DECODE: "deployments/decode"}
    return loop_of(KubernetesConnector(fake.kube(), resources), lease, gpus_max=gpus_max)


def asking(loop: Loop) -> httpx.AsyncClient:
    """A client of the planner's own pages."""
    transport = httpx.ASGITransport(create_app(loop))
    return httpx.AsyncClient(transport=transport, base_url="http://planner")
