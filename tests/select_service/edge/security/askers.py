"""Whom tests ask as, and what: every route has a path and a body."""

from __future__ import annotations

import re
from typing import Any, Final

from select_service.edge.config_reload import ConfigChange
from select_service.edge.http.api import Handler
from select_service.edge.http.handlers.replicas import PeerRequest
from select_service.edge.routing import Route
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
from tests.select_service.edge.serving import PROMPT, Wire, worker

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
    """One answer, read whether it has a length or comes in pieces."""
    wire.ask(route.method, path or path_of(route), body, *lines)
    head = (await wire.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head[1:] if line)}
    if "content-length" in headers:
        content = await wire.reader.readexactly(int(headers["content-length"]))
    else:
        content = b""
        while size := int((await wire.reader.readuntil(b"\r\n")).strip(), 16):
            content += (await wire.reader.readexactly(size + 2))[:-2]
        await wire.reader.readexactly(2)
    return int(head[0].split()[1]), headers, content
