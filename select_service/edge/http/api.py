"""The environment of handlers: decoders for bodies, writers for answers, settling on disk.

The handlers are in `handlers/`, the route table is `routes.py`. They take a neutral request and
return a neutral response, so that any transport can serve them: `application.py` is one, and
`driver.py` behind them does the work. They are independent of the format of bodies and answers: an
`Api` holds the decoders and the writer for one pair of formats.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar, cast

import msgspec

from indexer.errors import IndexerError
from select_service.edge.codec.body_limits import BodyGuard
from select_service.edge.codec.encoder import JSON_WRITER, Writer
from select_service.edge.codec.formats import Format
from select_service.edge.codec.json_codec import RequestDecoder, judge_unknown
from select_service.edge.codec.responses import DurableResponse, Response
from select_service.edge.routing import unknown_in_query
from select_service.errors import ServiceError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from select_service.edge.codec.json_codec import Decoded
    from select_service.edge.config_reload import ConfigReload
    from select_service.edge.driver.driver import Driver
    from select_service.edge.routing import Route
    from select_service.edge.state.keeper import Keeper
    from select_service.settings import FieldValidation


class Bodies(dict[type[msgspec.Struct], Any]):
    """The decoders of the API, by the type they produce; each is created when it is asked for."""

    def __init__(self, form: Format, validation: FieldValidation, guard: BodyGuard) -> None:
        """Decode one format.

        Args:
            form: the format of bodies.
            validation: what happens to unknown fields.
            guard: the limits of bodies.
        """
        super().__init__()
        self._form, self._validation, self._guard = form, validation, guard

    if TYPE_CHECKING:

        def __getitem__(self, kind: type[R]) -> RequestDecoder[R]: ...

    def __missing__(self, kind: type[R]) -> RequestDecoder[R]:
        decoder: Any
        if self._form is Format.JSON:
            decoder = RequestDecoder(kind, self._validation, self._guard)
        else:
            from select_service.edge.codec.msgpack_codec import (
                MsgpackDecoder,  # see `lazy_imports.py`
            )

            decoder = MsgpackDecoder(kind, self._validation, self._guard)
        self[kind] = decoder
        return decoder  # type: ignore[no-any-return]  # one of two with the same methods


R = TypeVar("R", bound=msgspec.Struct)

_REFUSED: Final = 400


class Request(msgspec.Struct, frozen=True):
    """What a handler may know of a request."""

    params: tuple[str, ...]  # decoded path segments, in the order of the pattern
    query: bytes
    body: bytes  # b"" unless the route takes one


Reply: TypeAlias = "Response | Awaitable[Response]"
"""An awaitable if the request has to wait for capacity or for the disk."""

Handler: TypeAlias = "Callable[[Api, Request], Reply]"


class Api:
    """What handlers work with. One per pair of formats; it has no state of its own.

    Attributes:
        service: does the work, or the part of it that the callers may see.
        bodies: decodes request bodies.
        writer: encodes answers.
        brief: makes the error for callers of /ready?verbose=true who may see only the status.
        reloading: changes settings.
        render_metrics: renders /metrics as (body, content type).
        describe: renders /openapi.json.
    """

    def __init__(
        self,
        service: Driver,
        validation: FieldValidation,
        *,
        metrics: Callable[[], Awaitable[tuple[bytes, str]]],
        openapi: Callable[[], Awaitable[bytes]],
        reloading: ConfigReload | None = None,
        guard: BodyGuard | None = None,
        refused: Callable[[Exception], None] = lambda _: None,
        reads: Format = Format.JSON,
        writer: Writer = JSON_WRITER,
        brief: Callable[[], ServiceError] | None = None,
    ) -> None:
        """Set up for handlers.

        Args:
            service: does the work.
            validation: what happens to unknown fields.
            metrics: renders /metrics as (body, content type).
            openapi: renders /openapi.json.
            reloading: changes settings.
            guard: the limits of bodies.
            refused: counts refusals that handlers return as answers.
            reads: the format of bodies.
            writer: encodes answers.
            brief: set if /ready shows these callers only its status; makes the error for more.
        """
        self.service = service
        self.brief = brief
        self.render_metrics = metrics
        self.describe = openapi
        self.reloading = reloading
        self.writer = writer
        self._validation = validation
        self._guard = guard or BodyGuard()
        self._refused = refused
        self.bodies = Bodies(reads, validation, self._guard)

    def for_formats(
        self,
        reads: Format,
        writer: Writer,
        seen: Callable[[Driver], object] | None = None,
        brief: Callable[[], ServiceError] | None = None,
    ) -> Api:
        """Return the same for other formats, or for callers with a restricted view.

        Args:
            reads: the format of bodies.
            writer: encodes answers.
            seen: restricts the service to what the callers may see; None: all.
            brief: as in the constructor.
        """
        service = self.service if seen is None else cast("Driver", seen(self.service))
        return Api(
            service,
            self._validation,
            metrics=self.render_metrics,
            openapi=self.describe,
            reloading=self.reloading,
            guard=self._guard,
            refused=self._refused,
            reads=reads,
            writer=writer,
            brief=brief,
        )

    def judge_query(self, route: Route[Handler], query: bytes) -> str | None:
        """Return a Warning header for query parameters that the route does not know.

        Otherwise a misspelt scope would silently list all scopes. The console's own routes are not
        part of the API: its page has the same version.

        Raises:
            UnknownField: under `FieldValidation.STRICT`.
        """
        if route.answers is None:
            return None
        unknown = unknown_in_query(query, route.query)
        return judge_unknown(unknown, self._validation, "parameter") if unknown else None

    def answer(
        self, decoded: Decoded[R], verb: Callable[[R, bytes], object], status: int = 200
    ) -> Response:
        """Call a verb with a decoded body; return its answer, or its refusal."""
        try:
            answer = verb(decoded.request, decoded.unknown)
        except (ServiceError, IndexerError) as error:
            return self.refusal(error, decoded.warning)
        return self.writer.reply(answer, status, decoded.warning)

    def refusal(self, error: ServiceError | IndexerError, warning: str | None) -> Response:
        """Return an error as an answer, and count it."""
        self._refused(error)
        return self.writer.refusal(error, warning)


def when_durable(answer: Reply, keeper: Keeper) -> Reply:
    """Return an answer that may be given once the changes behind it are on disk."""
    if isinstance(answer, Response):
        return _settling(answer, keeper)
    return _settle_later(answer, keeper)


def _settling(answer: Response, keeper: Keeper) -> Response | DurableResponse:
    if answer.status >= _REFUSED:
        return answer
    written = keeper.settled()
    return answer if written is None else DurableResponse(answer, written)


async def _settle_later(answer: Awaitable[Response], keeper: Keeper) -> Response:
    response = await answer
    settling = _settling(response, keeper)
    if not isinstance(settling, DurableResponse):
        return settling
    try:
        return await settling
    except BaseException:  # a disk that refuses, too: no client will learn of the booking
        response.lost()
        raise
