"""Looks at the state: loads, overlap, decisions, trust, shadow, the index."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import msgspec

from select_service.edge.codec.responses import ALWAYS_JSON, Response
from select_service.edge.cooperative import TimeSlices
from select_service.edge.decision_report import LISTED, LISTED_MAX, Wanted
from select_service.edge.driver.query_operations import SHADOW_SCOPES_LISTED, QueryOperations
from select_service.edge.http.decorators import get, safe_post
from select_service.edge.routing import (
    SCOPE_QUERY,
    read_count,
    read_id,
    read_query,
    read_scope,
    read_switch,
    scope_in,
)
from select_service.types import (
    Consistency,
    LoadRow,
    OverlapScores,
    OverlapScoresRequest,
    PotentialLoadsRequest,
    ScopeLoads,
    TrustTable,
)
from select_service.types.decisions import Decision, DecisionList
from select_service.types.shadow import ShadowStatus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from indexer.types import Scope
    from select_service.core.decisions.record import DecisionRecord
    from select_service.core.decisions.trust_monitor import TrustedRank
    from select_service.edge.http.api import Api, Reply, Request
    from select_service.types import RankTrustRow

DECISION_QUERY: Final = ("worker_id", *SCOPE_QUERY, "limit", "candidates")
SHADOW_QUERY: Final = (*SCOPE_QUERY, "limit")
SHADOW_SCOPES_MAX: Final = 200
"""Written in one go: a few µs each."""
SCOPES_AT_ONCE_MAX: Final = 16
"""So many are written without a pause, and without a task of their own; 10 µs each."""
_TRUST_SLICE: Final = 16
"""Rows of GET /trust sent in one go: a few µs each."""


@get("/loads", list[ScopeLoads], scope="read", query=SCOPE_QUERY)
def loads(api: Api, request: Request) -> Reply:
    """Return the load of every rank, by scope; each is of one moment."""
    scopes = api.service.load_scopes(*read_scope(request.query))
    if len(scopes) > SCOPES_AT_ONCE_MAX:
        return _loads(api, scopes)
    return api.writer.reply(
        [loads for scope in scopes if (loads := api.service.load_of(scope)) is not None]
    )


async def _loads(api: Api, scopes: list[Scope]) -> Response:
    slices, written = TimeSlices(), list[msgspec.Raw]()
    for scope in scopes:
        if (loads := api.service.load_of(scope)) is not None:
            written.append(msgspec.Raw(api.writer.encode(loads)))
        await slices.yield_if_due()
    return api.writer.reply(written)


potential_loads: Final = safe_post(
    "/potential_loads", list[LoadRow], 503, scope="select", takes=PotentialLoadsRequest
).calls(QueryOperations.potential_loads)


overlap_scores: Final = safe_post(
    "/overlap_scores", OverlapScores, 503, scope="select", takes=OverlapScoresRequest
).calls(QueryOperations.overlap_scores)


@get("/decisions/{id}", Decision, 404, scope="read")
def decision(api: Api, request: Request) -> Reply:
    """Return one decision with every rank and every term of its cost, by any of its ids."""
    return _decision(api, api.service.decision_reports.find(request.params[0]))


async def _decision(api: Api, record: DecisionRecord) -> Response:
    return api.writer.reply(await api.service.decision_reports.report(record, api.writer.written))


@get("/decisions", DecisionList, 404, scope="read", query=DECISION_QUERY)
def decisions(api: Api, request: Request) -> Reply:
    """List the last decisions that match the query, newest first; 50 without a limit."""
    values = read_query(request.query, DECISION_QUERY)
    model_name, tenant_id = scope_in(values)
    wanted = Wanted(
        worker_id=read_id("worker_id", values.get("worker_id")),
        model_name=model_name,
        tenant_id=tenant_id,
        limit=read_count("limit", values.get("limit"), LISTED, LISTED_MAX),
        candidates=read_switch("candidates", values.get("candidates")),
    )
    return _decisions(api, wanted)


async def _decisions(api: Api, wanted: Wanted) -> Response:
    decision_reports = api.service.decision_reports
    records = await decision_reports.matching(wanted)
    each = decision_reports.each(records, candidates=wanted.candidates, write=api.writer.written)
    return api.writer.reply_listing("decisions", each, len(records))


@get("/trust", TrustTable, scope="read", query=SCOPE_QUERY)
async def trust(api: Api, request: Request) -> Response:
    """Return how far every rank's index is believed, and why."""
    trusted_ranks = await api.service.trusted_ranks(*read_scope(request.query))
    return api.writer.reply_listing("ranks", _trust(api, trusted_ranks), len(trusted_ranks))


async def _trust(api: Api, trusted_ranks: list[TrustedRank]) -> AsyncIterator[RankTrustRow]:
    for number, trusted_rank in enumerate(trusted_ranks, 1):
        yield api.service.trust_row(trusted_rank)
        if not number % _TRUST_SLICE:
            await asyncio.sleep(0)


@get("/shadow", ShadowStatus, scope="read", query=SHADOW_QUERY)
def shadow(api: Api, request: Request) -> Reply:
    """Return what the shadow weights would have done, in all and by scope; 100 without a limit."""
    values = read_query(request.query, SHADOW_QUERY)
    limit = read_count("limit", values.get("limit"), SHADOW_SCOPES_LISTED, SHADOW_SCOPES_MAX)
    return _shadow(api, *scope_in(values), limit)


async def _shadow(api: Api, model_name: str | None, tenant_id: str | None, limit: int) -> Response:
    return api.writer.reply(await api.service.shadow(model_name, tenant_id, limit))


consistency: Final = get("/debug/consistency", Consistency, scope="read", of_process=True).calls(
    QueryOperations.consistency
)


@get("/dump", dict[str, dict[str, Any]], 503, scope="read")
def dump(api: Api, _: Request) -> Response:
    """Return the whole index, with one key model:tenant for each scope."""
    return Response(200, b"", ALWAYS_JSON, stream=api.service.dump())
