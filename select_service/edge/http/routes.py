"""The route table, which is the API: paths, handlers, bodies, answers and refusals.

`application.py` finds the route of a request and calls its handler; /openapi.json, the API
reference and the access matrix are generated from this table, and `embedded.py` has the same
operations.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from select_service.edge.codec.responses import Status
from select_service.edge.config_reload import ConfigChange, ConfigStatus
from select_service.edge.http.bodies import PeerRequest
from select_service.edge.http.handlers import (
    inspection,
    operation,
    process,
    replicas,
    reservations,
    selection,
    workers,
)
from select_service.edge.http.handlers.inspection import DECISION_QUERY, SHADOW_QUERY
from select_service.edge.http.handlers.operation import THRESHOLD_QUERY
from select_service.edge.http.handlers.process import READY_QUERY
from select_service.edge.http.handlers.reservations import LEASE_QUERY
from select_service.edge.http.handlers.workers import CANDIDATE_QUERY
from select_service.edge.http.scope_query import SCOPE_QUERY
from select_service.edge.routing import OPEN, Route
from select_service.types import Answer as Decided
from select_service.types import (
    BatchAnswer,
    BatchRequest,
    BriefReady,
    Consistency,
    LeaseList,
    LeaseRecord,
    LeaseRenewal,
    LeaseRequest,
    LoadRow,
    OutputBlockRequest,
    OverlapScores,
    OverlapScoresRequest,
    PairSelection,
    PotentialLoadsRequest,
    PrefillCompleteRequest,
    Ready,
    ReservationAnswer,
    ReservationRequest,
    ScopeLoads,
    SelectAndReserveRequest,
    SelectPairRequest,
    SelectRequest,
    TrustTable,
    WorkerPatch,
    WorkerRecord,
    WorkerSpec,
)
from select_service.types.admission import (
    AdmissionChange,
    AdmissionStatus,
    BusyThreshold,
    BusyThresholdChange,
    BusyThresholds,
    WorkerMetrics,
    WorkerMetricsAnswer,
)
from select_service.types.batches import SelectBatchRequest, WaveAnswer
from select_service.types.decisions import Decision, DecisionList
from select_service.types.drains import DrainRequest, DrainStatus, ScaleDownCandidates
from select_service.types.shadow import ShadowStatus

if TYPE_CHECKING:
    import msgspec

    from select_service.edge.http.api import Handler

__all__ = ["OPERATIONS", "ROUTES"]


def _route(
    method: str,
    pattern: str,
    handler: Handler,
    answers: object,
    *refusals: int,  # besides those of every route
    scope: str,  # that a token needs
    of_process: bool = False,  # not for tokens bound to tenants
    takes: type[msgspec.Struct] | None = None,
    status: int = 200,
    status_again: int | None = None,
    query: tuple[str, ...] = (),
    body_optional: bool = False,
    body_lenient: bool = False,
    changes: bool | None = None,  # None: unless it is a GET
) -> Route[Handler]:
    summary = (handler.__doc__ or "").partition("\n")[0]
    return Route(
        method,
        pattern,
        handler,
        takes,
        answers,
        status,
        refusals,
        query,
        summary,
        name=handler.__name__,
        changes=method != "GET" if changes is None else changes,
        body_optional=body_optional,
        scope=scope,
        of_process=of_process,
        body_lenient=body_lenient,
        status_again=status_again,
    )


_get, _post = partial(_route, "GET"), partial(_route, "POST")
_ask = partial(_route, "POST", changes=False)
_CATALOG, _SELECT, _LIFECYCLE = "catalog", "select", "lifecycle"
_READ, _ADMIN = "read", "admin"
_WORKER: Final = "/workers/{worker_id}"
_DRAIN: Final = _WORKER + "/drain"
_RESERVATION: Final = "/reservations/{reservation_id}"
_LEASE: Final = "/leases/{lease_id}"

ROUTES: Final[tuple[Route[Handler], ...]] = (
    _get("/health", process.health, Status, scope=OPEN),
    _get("/ready", process.ready, Ready | BriefReady, 503, scope=OPEN, query=READY_QUERY),
    _get("/metrics", process.metrics, None, scope=_READ, of_process=True),
    _get("/openapi.json", process.openapi, dict[str, Any], scope=_READ),
    # the catalog
    _post(
        "/workers",
        workers.upsert_worker,
        WorkerRecord,
        scope=_CATALOG,
        takes=WorkerSpec,
        status=201,
    ),
    _get("/workers", workers.workers, list[WorkerRecord], scope=_READ, query=SCOPE_QUERY),
    _route(
        "PATCH",
        _WORKER,
        workers.patch_worker,
        WorkerRecord,
        404,
        scope=_CATALOG,
        takes=WorkerPatch,
    ),
    _route("DELETE", _WORKER, workers.delete_worker, WorkerRecord, 404, scope=_CATALOG),
    _post(
        _DRAIN,
        workers.drain_worker,
        DrainStatus,
        404,
        scope=_CATALOG,
        takes=DrainRequest,
        body_optional=True,
    ),
    _get(_DRAIN, workers.drain_status, DrainStatus, 404, scope=_READ),
    _get(
        "/scale_down_candidates",
        workers.scale_down_candidates,
        ScaleDownCandidates,
        scope=_READ,
        query=CANDIDATE_QUERY,
    ),
    _route("DELETE", _DRAIN, workers.undrain_worker, DrainStatus, 404, scope=_CATALOG),
    _post(
        _WORKER + "/metrics",
        workers.report,
        WorkerMetricsAnswer,
        404,
        scope=_CATALOG,
        changes=False,
        takes=WorkerMetrics,
    ),
    # selection
    _ask("/select", selection.select, Decided, 503, scope=_SELECT, takes=SelectRequest),
    _post(
        "/select_and_reserve",
        selection.select_and_reserve,
        Decided,
        404,
        409,
        503,
        scope=_SELECT,
        takes=SelectAndReserveRequest,
    ),
    _post(
        "/select_pair",
        selection.select_pair,
        PairSelection,
        404,
        409,
        503,
        scope=_SELECT,
        takes=SelectPairRequest,
    ),
    _post(
        "/select_batch",
        selection.select_batch,
        WaveAnswer,
        404,
        409,
        503,
        scope=_SELECT,
        takes=SelectBatchRequest,
    ),
    # reservations
    _post(
        "/reservations",
        reservations.reserve,
        ReservationAnswer,
        404,
        409,
        503,
        scope=_LIFECYCLE,
        takes=ReservationRequest,
        status=201,
    ),
    _post(
        _RESERVATION + "/prefill_complete",
        reservations.prefill_complete,
        Status,
        404,
        scope=_LIFECYCLE,
        takes=PrefillCompleteRequest,
        body_optional=True,
        body_lenient=True,
    ),
    _post(
        _RESERVATION + "/output_block",
        reservations.output_block,
        Status,
        404,
        scope=_LIFECYCLE,
        takes=OutputBlockRequest,
    ),
    _route("DELETE", _RESERVATION, reservations.free, Status, 404, scope=_LIFECYCLE),
    _post(
        "/reservations/batch",
        reservations.batch,
        BatchAnswer,
        scope=_LIFECYCLE,
        takes=BatchRequest,
    ),
    # leases
    _post(
        "/leases",
        reservations.open_lease,
        LeaseRecord,
        409,
        503,
        scope=_LIFECYCLE,
        takes=LeaseRequest,
        status=201,
    ),
    _get("/leases", reservations.leases, LeaseList, scope=_READ, query=LEASE_QUERY),
    _post(
        _LEASE + "/renew",
        reservations.renew_lease,
        LeaseRecord,
        404,
        scope=_LIFECYCLE,
        changes=False,  # renewals must work even while the disk is full
        takes=LeaseRenewal,
        body_optional=True,
    ),
    _route("DELETE", _LEASE, reservations.close_lease, Status, 404, scope=_LIFECYCLE),
    # admission
    _get("/admission", operation.admission, AdmissionStatus, scope=_READ, of_process=True),
    _route(
        "PUT",
        "/admission",
        operation.change_admission,
        AdmissionStatus,
        scope=_ADMIN,
        of_process=True,
        takes=AdmissionChange,
    ),
    _get(
        "/busy_threshold", operation.busy_thresholds, BusyThresholds, scope=_READ, of_process=True
    ),
    _post(
        "/busy_threshold",
        operation.change_threshold,
        BusyThreshold,
        404,
        409,
        scope=_ADMIN,
        of_process=True,
        takes=BusyThresholdChange,
    ),
    _route(
        "DELETE",
        "/busy_threshold",
        operation.forget_threshold,
        BusyThreshold,
        scope=_ADMIN,
        of_process=True,
        query=THRESHOLD_QUERY,
    ),
    # settings
    _get("/config", operation.config, ConfigStatus, scope=_ADMIN, of_process=True),
    _route(
        "PUT",
        "/config",
        operation.change_config,
        ConfigStatus,
        409,
        scope=_ADMIN,
        of_process=True,
        takes=ConfigChange,
    ),
    # inspection
    _get("/loads", inspection.loads, list[ScopeLoads], scope=_READ, query=SCOPE_QUERY),
    _ask(
        "/potential_loads",
        inspection.potential_loads,
        list[LoadRow],
        503,
        scope=_SELECT,
        takes=PotentialLoadsRequest,
    ),
    _ask(
        "/overlap_scores",
        inspection.overlap_scores,
        OverlapScores,
        503,
        scope=_SELECT,
        takes=OverlapScoresRequest,
    ),
    _get("/decisions", inspection.decisions, DecisionList, 404, scope=_READ, query=DECISION_QUERY),
    _get("/decisions/{id}", inspection.decision, Decision, 404, scope=_READ),
    _get("/trust", inspection.trust, TrustTable, scope=_READ, query=SCOPE_QUERY),
    _get("/shadow", inspection.shadow, ShadowStatus, scope=_READ, query=SHADOW_QUERY),
    _get("/debug/consistency", inspection.consistency, Consistency, scope=_READ, of_process=True),
    _get("/dump", inspection.dump, dict[str, dict[str, Any]], 503, scope=_READ),
    # replicas
    _get("/replica_sync/peers", replicas.peers, list[str], scope=_READ, of_process=True),
    _get(
        "/replica_sync/snapshot",
        replicas.replica_snapshot,
        bytes,
        409,
        503,
        scope=_READ,
        of_process=True,
    ),
    _post(
        "/replica_sync/register_peer",
        replicas.register_peer,
        Status,
        409,
        scope=_CATALOG,
        of_process=True,
        takes=PeerRequest,
        status=201,
        status_again=200,
    ),
    _post(
        "/replica_sync/deregister_peer",
        replicas.deregister_peer,
        Status,
        404,
        409,
        scope=_CATALOG,
        of_process=True,
        takes=PeerRequest,
    ),
)

OPERATIONS: Final = {route.name: route for route in ROUTES}
"""The same by name: that of the handler, and of the method of an embedded service."""
