"""What those who run the service set: admission, busy thresholds, settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from select_service.edge.config_reload import ConfigChange, ConfigStatus
from select_service.edge.driver.admission_operations import AdmissionOperations
from select_service.edge.http.decorators import delete, get, post, put
from select_service.edge.http.worker_list import written
from select_service.edge.routing import read_query
from select_service.errors import InvalidQuery, ServiceError
from select_service.types.admission import (
    AdmissionChange,
    AdmissionStatus,
    BusyThreshold,
    BusyThresholdChange,
    BusyThresholds,
)

if TYPE_CHECKING:
    from select_service.edge.codec.responses import Response
    from select_service.edge.http.api import Api, Reply, Request

THRESHOLD_QUERY: Final = ("model", "tenant_id")


@get("/admission", AdmissionStatus, scope="read", of_process=True)
async def admission(api: Api, _: Request) -> Response:
    """Say which policy is in force, and what became of every class."""
    return await _reply(api, await api.service.admission())


async def _reply(api: Api, status: AdmissionStatus, warning: str | None = None) -> Response:
    scopes = await written(api.writer, status.scopes)
    thresholds = await written(api.writer, status.thresholds)
    return api.writer.reply(replace(status, scopes=scopes, thresholds=thresholds), 200, warning)


@put("/admission", AdmissionStatus, scope="admin", of_process=True, takes=AdmissionChange)
async def change_admission(api: Api, request: Request) -> Response:
    """Put another policy in force at once; waiting requests are judged again."""
    decoded = api.bodies[AdmissionChange].decode(request.body)
    try:
        status = await api.service.change_admission(decoded.request)
    except ServiceError as error:
        return api.refusal(error, decoded.warning)
    return await _reply(api, status, decoded.warning)


@get("/busy_threshold", BusyThresholds, scope="read", of_process=True)
async def busy_thresholds(api: Api, _: Request) -> Response:
    """List the busy thresholds of every model."""
    found = await api.service.busy_thresholds()
    return api.writer.reply(BusyThresholds(await written(api.writer, found.thresholds)))


change_threshold: Final = post(
    "/busy_threshold",
    BusyThreshold,
    404,
    409,
    scope="admin",
    of_process=True,
    takes=BusyThresholdChange,
).calls(AdmissionOperations.change_threshold)


@delete("/busy_threshold", BusyThreshold, scope="admin", of_process=True, query=THRESHOLD_QUERY)
def forget_threshold(api: Api, request: Request) -> Response:
    """Drop what was set for a model or one tenant of it. Repeatable."""
    values = read_query(request.query, THRESHOLD_QUERY)
    model = values.get("model")
    if model is None:
        raise InvalidQuery("`model` must be given", field="model")
    return api.writer.reply(api.service.forget_threshold(model, values.get("tenant_id")))


@get("/config", ConfigStatus, scope="admin", of_process=True)
def config(api: Api, _: Request) -> Response:
    """Say what every setting is, its source, and whether it may change without a restart."""
    assert api.reloading is not None
    return api.writer.reply(api.reloading.describe())


@put("/config", ConfigStatus, 409, scope="admin", of_process=True, takes=ConfigChange)
def change_config(api: Api, request: Request) -> Reply:
    """Put settings in force at once, all or none."""
    reloading = api.reloading
    assert reloading is not None
    return api.answer(
        api.bodies[ConfigChange].decode(request.body), lambda change, _: reloading.put(change)
    )
