"""Whom tests ask as, and what: every route has a path and a body."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

from select_service.edge.config_reload import ConfigChange
from select_service.edge.driver.driver import Driver
from select_service.edge.http.api import Handler
from select_service.edge.http.handlers.replicas import PeerRequest
from select_service.edge.routing import Route
from select_service.edge.security.tokens import SCOPES
from select_service.types import (
    BatchRequest,
    LeaseRenewal,
    LeaseRequest,
    OutputBlockRequest,
    OverlapScoresRequest,
    PotentialLoadsRequest,
    PrefillCompleteRequest,
    ReservationRequest,
    SelectAndReserveRequest,
    SelectPairRequest,
    SelectRequest,
    WorkerPatch,
    WorkerSpec,
)
from select_service.types.admission import AdmissionChange, BusyThresholdChange, WorkerMetrics
from select_service.types.batches import SelectBatchRequest
from select_service.types.workers import DrainRequest
from tests.select_service.edge.security.credentials_made import TokenFile
from tests.select_service.edge.serving import PROMPT, Wire, listening, worker

OURS, THEIRS, NOBODYS = "acme corp", "rival", "nobody"
PATHS: Final = {"worker_id": "77", "reservation_id": "r-none", "lease_id": "l-none", "id": "d-none"}
BODIES: Final[dict[type, dict[str, Any]]] = {
    WorkerSpec: worker(500, tenant_id=OURS),
    WorkerPatch: {},
    WorkerMetrics: {"ranks": [{"dp_rank": 0}]},
    SelectRequest: {"tenant_id": OURS, **PROMPT},
    SelectAndReserveRequest: {"tenant_id": OURS, **PROMPT},
    SelectPairRequest: {"tenant_id": OURS, **PROMPT},
    SelectBatchRequest: {"requests": [{"tenant_id": OURS, **PROMPT}]},
    ReservationRequest: {
        "reservation_id": "booked",
        "worker_id": 1,
        "tenant_id": OURS,
        **PROMPT,
    },
    PotentialLoadsRequest: {"tenant_id": OURS, **PROMPT},
    OverlapScoresRequest: {"tenant_id": OURS, **PROMPT},
    OutputBlockRequest: {},
    PrefillCompleteRequest: {},
    BatchRequest: {"operations": [{"op": "free", "reservation_id": "r-none"}]},
    LeaseRequest: {"owner": "me", "ttl_s": 60, "lease_id": "lease"},
    LeaseRenewal: {},
    AdmissionChange: {"policy": "always-admit"},
    BusyThresholdChange: {"model": "default"},
    PeerRequest: {"endpoint": "tcp://127.0.0.1:9"},
    ConfigChange: {"settings": {}},
    DrainRequest: {},
}


def path_of(route: Route[Handler], ids: dict[str, str] = PATHS) -> str:
    return re.sub(r"\{(\w+)\}", lambda found: ids[found[1]], route.pattern)


def body_of(route: Route[Handler]) -> dict[str, Any] | None:
    return None if route.takes is None else BODIES[route.takes]


async def ask(
    wire: Wire, route: Route[Handler], body: object, *lines: str, path: str = ""
) -> tuple[int, dict[str, str], bytes]:
    return await wire.exchange(route.method, path or path_of(route), body, *lines)


def two_tenants(tmp_path: Path) -> TokenFile:
    """Tokens of each, and of an operator without a tenant."""
    file = TokenFile(tmp_path / "tokens")
    file.add("ours", *SCOPES, tenants=[OURS])
    file.add("theirs", *SCOPES, tenants=[THEIRS])
    file.add("all", "admin")
    return file


class Asker:
    """Asks on one connection, in the names of a token file or in none."""

    def __init__(self, file: TokenFile, wire: Wire, port: int) -> None:
        self.file, self.wire, self.port = file, wire, port

    async def __call__(
        self, who: str | None, method: str, path: str, body: object = None
    ) -> tuple[int, Any]:
        lines = () if who is None else (self.file.line(who),)
        status, _, content = await self.wire.exchange(method, path, body, *lines)
        return status, json.loads(content)


@contextlib.asynccontextmanager
async def asked_by(file: TokenFile, **settings: Any) -> AsyncIterator[tuple[Asker, Driver]]:
    """A server that reads these tokens, and who asks it."""
    async with listening(**file.setting, **settings) as (port, service, _):
        yield Asker(file, await Wire.to(port), port), service
