"""Every refusal of the index in one tree: a text for people, a stable code, an HTTP status.

Raised by the core and the sockets; HTTP servers turn them into responses. What
arrives from an engine never raises out of the core: bad events are counted, not thrown.
"""

from __future__ import annotations

from typing import ClassVar


class IndexerError(Exception):
    """Something the index refuses; `str(error)` is the text for people."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"


class InvalidEndpoint(IndexerError):
    """An endpoint that is not written the way ZMQ endpoints are."""

    status = 400
    code = "invalid_endpoint"

    def __init__(self, endpoint: str, reason: str) -> None:
        super().__init__(f"invalid ZMQ endpoint `{endpoint}`: {reason}")
        self.endpoint = endpoint
        self.reason = reason


class EndpointRefused(IndexerError):
    """A well-written endpoint that libzmq will not connect to, such as `tcp://*:5557`."""

    status = 400
    code = "endpoint_refused"

    def __init__(self, endpoint: str, reason: str) -> None:
        where = f"connect to `{endpoint}`" if endpoint else "open a socket"  # it has no address yet
        super().__init__(f"cannot {where}: {reason}")
        self.endpoint = endpoint
        self.reason = reason


class NoDescriptorLeft(EndpointRefused):
    """There are as many open files as there may be: the endpoint may be a good one."""

    status = 503
    code = "no_descriptor_left"


class SchemeRefused(EndpointRefused):
    """A well-written endpoint of a scheme that is switched off."""


class HostNotFound(IndexerError):
    """A name that leads nowhere, as far as anybody could tell in time."""

    status = 502
    code = "host_not_found"

    def __init__(self, host: str, reason: str) -> None:
        super().__init__(f"cannot resolve `{host}`: {reason}")


class ScopeConflict(IndexerError):
    """An index is asked for with another block size, or another kind of blocks, than it has."""

    status = 409
    code = "scope_conflict"


class BadDump(IndexerError):
    """What a peer answers to GET /dump is no dump."""

    status = 502
    code = "bad_dump"


class KeyFileUnusable(IndexerError):
    """A file of CURVE keys cannot be used; the text says where and why, and shows no key."""
