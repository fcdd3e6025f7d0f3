"""Refused by codec and HTTP, before anybody has looked at what is meant."""

from __future__ import annotations

from select_service.errors.refusal import BoundReached, ServiceError


class InvalidJson(ServiceError):
    """Not JSON at all."""

    status = 400
    code = "invalid_json"


class InvalidMsgpack(ServiceError):
    """Declared as MessagePack, but it is not."""

    status = 400
    code = "invalid_msgpack"


class InvalidPath(ServiceError):
    """A number or an id in the path that cannot be read."""

    status = 400
    code = "invalid_path"


class InvalidQuery(ServiceError):
    """A query string with a repeated key."""

    status = 400
    code = "invalid_query"


class InvalidField(ServiceError):
    """JSON of the wrong shape, type or range; `field` says where."""

    status = 422
    code = "invalid_field"


class TooManyTokens(InvalidField):
    """A prompt of more tokens than `--tokens-per-request-max`."""

    code = "too_many_tokens"

    def __init__(self, field: str, most: int) -> None:
        super().__init__(f"{field}: a prompt may have at most {most} tokens", field=field)


class TooMuchInBody(InvalidField):
    """A body with more small values than are read at once; the text names the flag."""

    code = "too_much_in_body"

    def __init__(self, why: str, limit: str, field: str | None = None) -> None:
        where, flag = f"{field}: " if field else "", limit.replace("_", "-")
        super().__init__(f"{where}{why} (--{flag})", field=field, limit=limit)


class NameRefused(InvalidField):
    """An id or a name that is too long, or that cannot be printed."""

    def __init__(self, field: str, most: int, limit: str | None = None) -> None:
        self.most = most
        why = f"{field} must have at most {most} characters, and only printable ones"
        super().__init__(why, field=field, limit=limit)

    @classmethod
    def of(cls, field: str, text: str, most: int, limit: str) -> NameRefused:
        """Say what is wrong with a text; if it is too long that limit was crossed."""
        return cls(field, most, limit if len(text) > most else None)


class UnknownField(ServiceError):
    """An unknown field, under `--field-validation strict`."""

    status = 422
    code = "unknown_field"


class UnsupportedMediaType(ServiceError):
    """A body that does not claim to be JSON, or is compressed."""

    status = 415
    code = "unsupported_media_type"


class BodyTooLarge(ServiceError):
    """More bytes than `--max-body-bytes`, or than `--body-short-bytes-max` without a prompt."""

    status = 413
    code = "body_too_large"


class RequestTimeout(ServiceError):
    """A request that did not arrive in time."""

    status = 408
    code = "request_timeout"


class MalformedHttp(ServiceError):
    """Bytes that are no HTTP/1.1 request."""

    status = 400
    code = "malformed_http"


class HeadTooLarge(ServiceError):
    """A request line and headers that are too long."""

    status = 431
    code = "head_too_large"


class TooManyConnections(BoundReached):
    """More open connections than `--connections-max`, or than a tenant's room in it."""

    status = 503
    code = "too_many_connections"


class HttpVersionTooOld(ServiceError):
    """A streamed answer, for a client of HTTP/1.0, which needs its length."""

    status = 505
    code = "http_version_too_old"


class RouteNotFound(ServiceError):
    """No such path."""

    status = 404
    code = "route_not_found"


class MethodNotAllowed(ServiceError):
    """A known path with another method."""

    status = 405
    code = "method_not_allowed"
