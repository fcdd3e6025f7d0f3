"""The catalog: workers come, change, drain, go, and say what load they see themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast, get_args

from select_service.edge.driver.admission_operations import AdmissionOperations
from select_service.edge.driver.worker_operations import WorkerOperations
from select_service.edge.http.decorators import delete, get, patch, post
from select_service.edge.http.worker_list import AT_ONCE_MAX, records, written
from select_service.edge.routing import (
    SCOPE_QUERY,
    read_count,
    read_query,
    read_scope,
    read_share,
    scope_in,
)
from select_service.errors import InvalidQuery
from select_service.types import Role, WorkerPatch, WorkerRecord, WorkerSpec
from select_service.types.admission import WorkerMetrics, WorkerMetricsAnswer
from select_service.types.workers import (
    HIT_RATE_LOSS_MAX,
    DrainRequest,
    DrainStatus,
    ScaleDownCandidates,
)

if TYPE_CHECKING:
    from select_service.edge.codec.responses import Response
    from select_service.edge.http.api import Api, Reply, Request

CANDIDATE_QUERY: Final = ("count", "hit_rate_loss_max", "role", *SCOPE_QUERY)
CANDIDATES_MAX: Final = 64
"""Each costs a walk over the index; more are no answer to "whom first?" but a fleet that ends."""


upsert_worker: Final = post(
    "/workers", WorkerRecord, scope="catalog", takes=WorkerSpec, status=201
).calls(WorkerOperations.upsert_worker)


patch_worker: Final = patch(
    "/workers/{worker_id}", WorkerRecord, 404, scope="catalog", takes=WorkerPatch
).calls(WorkerOperations.patch_worker)


delete_worker: Final = delete("/workers/{worker_id}", WorkerRecord, 404, scope="catalog").calls(
    WorkerOperations.delete_worker
)


drain_worker: Final = post(
    "/workers/{worker_id}/drain",
    DrainStatus,
    404,
    scope="catalog",
    takes=DrainRequest,
    body_optional=True,
).calls(WorkerOperations.drain_worker)


undrain_worker: Final = delete(
    "/workers/{worker_id}/drain", DrainStatus, 404, scope="catalog"
).calls(WorkerOperations.undrain_worker)


drain_status: Final = get("/workers/{worker_id}/drain", DrainStatus, 404, scope="read").calls(
    WorkerOperations.drain_status
)


@get("/scale_down_candidates", ScaleDownCandidates, scope="read", query=CANDIDATE_QUERY)
def scale_down_candidates(api: Api, request: Request) -> Reply:
    """Name the workers that match the query and are cheapest to lose; 1 without a count.

    `advised` of each says whether more than `hit_rate_loss_max` (0.02) of the hit rate can go.
    """
    values = read_query(request.query, CANDIDATE_QUERY)
    count = read_count("count", values.get("count"), 1, CANDIDATES_MAX)
    loss = read_share("hit_rate_loss_max", values.get("hit_rate_loss_max"), HIT_RATE_LOSS_MAX)
    return _candidates(api, count, *scope_in(values), _role_in(values), loss)


def _role_in(values: dict[str, str]) -> Role | None:
    """Read what workers are for in a query.

    Raises:
        InvalidQuery: it is no role.
    """
    text = values.get("role")
    if text is None:
        return None
    for role in get_args(Role):
        if text == role:
            return cast("Role", role)
    raise InvalidQuery(f"`role` must be one of {', '.join(get_args(Role))}", field="role")


async def _candidates(
    api: Api,
    count: int,
    model_name: str | None,
    tenant_id: str | None,
    role: Role | None,
    hit_rate_loss_max: float,
) -> Response:
    found = await api.service.scale_down_candidates(
        count, model_name, tenant_id, role, hit_rate_loss_max
    )
    return api.writer.reply(ScaleDownCandidates(candidates=await written(api.writer, found)))


@get("/workers", list[WorkerRecord], scope="read", query=SCOPE_QUERY)
def workers(api: Api, request: Request) -> Reply:
    """List workers by ascending id."""
    scope = read_scope(request.query)
    ids = api.service.worker_ids(*scope)
    if len(ids) > AT_ONCE_MAX:
        return _many(api, ids, *scope)
    return api.writer.reply(api.service.workers(*scope))


async def _many(
    api: Api, ids: list[int], model_name: str | None, tenant_id: str | None
) -> Response:
    return api.writer.reply(await records(api, ids, model_name, tenant_id))


report: Final = post(
    "/workers/{worker_id}/metrics",
    WorkerMetricsAnswer,
    404,
    scope="catalog",
    changes=False,
    takes=WorkerMetrics,
).calls(AdmissionOperations.report)
