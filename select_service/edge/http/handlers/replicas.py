"""Replicas: which are listened to, and all that another one has to know of this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from indexer.errors import IndexerError
from select_service.edge.codec.responses import Response, Status
from select_service.edge.http.decorators import get, post
from select_service.errors import ServiceError

if TYPE_CHECKING:
    from select_service.edge.http.api import Api, Reply, Request

BYTES: Final = ((b"content-type", b"application/octet-stream"),)


class PeerRequest(msgspec.Struct):
    """Body of /replica_sync/register_peer and deregister_peer."""

    endpoint: str
    """ZMQ endpoint of the replica's `--replica-sync-port`, e.g. `"tcp://10.0.0.2:9091"`."""


@get("/replica_sync/peers", list[str], scope="read", of_process=True)
def peers(api: Api, _: Request) -> Response:
    """List the peers this process listens to."""
    plane = api.service.replicas
    return api.writer.reply([] if plane is None else plane.peers())


@post(
    "/replica_sync/register_peer",
    Status,
    409,
    scope="catalog",
    of_process=True,
    takes=PeerRequest,
    status=201,
    status_again=200,
)
def register_peer(api: Api, request: Request) -> Reply:
    """Listen to a replica: 201, or 200 if that is so already."""
    decoded = api.bodies[PeerRequest].decode(request.body)
    try:
        is_new = api.service.register_peer(decoded.request.endpoint)
    except (ServiceError, IndexerError) as error:
        return api.refusal(error, decoded.warning)
    return api.writer.reply(Status(), 201 if is_new else 200, decoded.warning)


@post(
    "/replica_sync/deregister_peer",
    Status,
    404,
    409,
    scope="catalog",
    of_process=True,
    takes=PeerRequest,
)
def deregister_peer(api: Api, request: Request) -> Reply:
    """Stop listening to a replica."""

    def verb(peer: PeerRequest, _: bytes) -> Status:
        api.service.deregister_peer(peer.endpoint)
        return Status()

    return api.answer(api.bodies[PeerRequest].decode(request.body), verb)


@get("/replica_sync/snapshot", bytes, 409, 503, scope="read", of_process=True)
def replica_snapshot(api: Api, _: Request) -> Response:
    """Give a replica everything it has to know of this process, as length-prefixed frames."""
    return Response(200, b"", BYTES, stream=api.service.replica_plane().snapshot())
