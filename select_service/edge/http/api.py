"""The HTTP API: one table of routes, and a handler of a few lines for each.

Handlers take a neutral request and return a neutral response, so that any carrier can serve them:
`asgi.py` does, behind it `driver.py` does the work. They know nothing of the form of bodies and
answers: `Api` holds the decoders and the writer of one pair of forms.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar, cast

import msgspec

from indexer.errors import IndexerError
from select_service.admission_types import (
    AdmissionChange,
    AdmissionStatus,
    BusyThreshold,
    BusyThresholdChange,
    BusyThresholds,
    WorkerMetrics,
    WorkerMetricsAnswer,
)
from select_service.core.admission.queue import Ticket
from select_service.decision_types import Decision, DecisionList
from select_service.drain_types import DrainRequest, DrainStatus, ScaleDownCandidates
from select_service.edge.codec.answers import (
    JSON_WRITER,
    Response,
    Settling,
    Status,
    Writer,
    retry_after_line,
)
from select_service.edge.codec.bulk import BodyGuard
from select_service.edge.codec.forms import Form
from select_service.edge.codec.json_codec import Decoded, RequestDecoder, judge_unknown
from select_service.edge.driver import SHADOW_SCOPES_LISTED
from select_service.edge.reloading import ConfigChange, ConfigStatus
from select_service.edge.routing import (
    Route,
    read_count,
    read_id,
    read_query,
    read_switch,
    read_u64,
    unknown_in_query,
)
from select_service.edge.telling import LISTED, LISTED_MAX, Wanted
from select_service.edge.waves import WaveBody, explained
from select_service.errors import InvalidField, InvalidQuery, ServiceError
from select_service.shadow_types import ShadowStatus
from select_service.types import Answer as Decided
from select_service.types import (
    BatchAnswer,
    BatchRequest,
    BriefReady,
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
from select_service.wave_types import SelectBatchRequest, WaveAnswer, WaveItem

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator, Awaitable, Callable

    from select_service.config import FieldValidation
    from select_service.core.books.leases import Lease
    from select_service.core.decisions.record import Record
    from select_service.core.trust.trusting import TrustSeat
    from select_service.core.waves.waves import Item
    from select_service.edge.codec.msgpack_codec import MsgpackDecoder
    from select_service.edge.driver import Driver
    from select_service.edge.reloading import Reloading
    from select_service.edge.state.keeper import Keeper
    from select_service.types import RankTrustRow

__all__ = ["ROUTES", "Api", "Handler", "Request"]

R = TypeVar("R", bound=msgspec.Struct)
S = TypeVar("S", bound=SelectRequest)

JSON: Final = ((b"content-type", b"application/json"),)
BYTES: Final = ((b"content-type", b"application/octet-stream"),)
SCOPE_QUERY: Final = ("model_name", "tenant_id", "routing_group")
VERBOSE_QUERY: Final = ("verbose",)
LEASE_QUERY: Final = ("owner", "limit")
DECISION_QUERY: Final = ("worker_id", *SCOPE_QUERY, "limit", "candidates")
CANDIDATE_QUERY: Final = ("count", *SCOPE_QUERY)
SHADOW_QUERY: Final = (*SCOPE_QUERY, "limit")
SHADOW_SCOPES_MAX: Final = 200
"""Written in one go: a few µs each."""
THRESHOLD_QUERY: Final = ("model", "tenant_id")
LEASES_LISTED: Final = 100
CANDIDATES_MAX: Final = 64
"""Each costs a walk over the index; more are no answer to "whom first?" but a fleet that ends."""
_WAVE_ITEMS: Final = 8  # decoded in one go, some 10 µs each at 2,048 tokens


class Request(msgspec.Struct, frozen=True):
    """What a handler may know of a request."""

    params: tuple[str, ...]  # decoded path segments, in the order of the pattern
    query: bytes
    body: bytes  # b"" unless the route takes one


Answer: TypeAlias = "Response | Awaitable[Response]"
"""An awaitable when the request has to wait for capacity or for the disk."""

_REFUSED: Final = 400
_VERBOSE: Final = {"true": True, "1": True, "false": False, "0": False, "": False}
_CACHED_TOKENS: Final = b"cached_tokens"
_TRUST_SLICE: Final = 16
"""Rows of GET /trust sent in one go: a few µs each."""


class PeerRequest(msgspec.Struct):
    """Body of /replica_sync/register_peer and deregister_peer."""

    endpoint: str


class Api:
    """The handlers. One per pair of forms; holds no state of its own."""

    def __init__(  # noqa: PLR0913 - what it passes on, keyword only
        self,
        service: Driver,
        validation: FieldValidation,
        *,
        metrics: Callable[[], tuple[bytes, str]],
        openapi: Callable[[], bytes],
        reloading: Reloading | None = None,
        guard: BodyGuard | None = None,
        refused: Callable[[Exception], None] = lambda _: None,
        reads: Form = Form.JSON,
        writer: Writer = JSON_WRITER,
        brief: Callable[[], ServiceError] | None = None,
    ) -> None:
        """Bind the handlers.

        Args:
            service: does the work.
            validation: what happens to unknown fields.
            metrics: renders /metrics as (body, content type).
            openapi: renders /openapi.json.
            reloading: changes settings.
            guard: what bodies are held to.
            refused: counts refusals that handlers answer with.
            reads: what bodies are written in.
            writer: writes the answers.
            brief: /ready says no more than whether; why it does not, for who asks for more.
        """
        self._service = service
        self._brief = brief
        self._metrics = metrics
        self._openapi = openapi
        self._validation = validation
        self._reloading = reloading
        self._guard = guard = guard or BodyGuard()
        self._refused = refused
        self.writer = writer

        def read(kind: type[R]) -> RequestDecoder[R] | MsgpackDecoder[R]:
            if reads is Form.JSON:
                return RequestDecoder(kind, validation, guard)
            from select_service.edge.codec.msgpack_codec import MsgpackDecoder  # noqa: PLC0415 - see `late`

            return MsgpackDecoder(kind, validation, guard)

        self._worker_spec = read(WorkerSpec)
        self._worker_patch = read(WorkerPatch)
        self._drain = read(DrainRequest)
        self._select = read(SelectRequest)
        self._select_and_reserve = read(SelectAndReserveRequest)
        self._select_pair = read(SelectPairRequest)
        self._wave = read(WaveBody)
        self._wave_item = read(WaveItem)
        self._reservation = read(ReservationRequest)
        self._prefill_complete = read(PrefillCompleteRequest)
        self._output_block = read(OutputBlockRequest)
        self._batch = read(BatchRequest)
        self._lease = read(LeaseRequest)
        self._lease_renewal = read(LeaseRenewal)
        self._potential_loads = read(PotentialLoadsRequest)
        self._overlap_scores = read(OverlapScoresRequest)
        self._peer = read(PeerRequest)
        self._worker_metrics = read(WorkerMetrics)
        self._admission = read(AdmissionChange)
        self._threshold = read(BusyThresholdChange)
        self._config = read(ConfigChange)

    def speaking(
        self,
        reads: Form,
        writer: Writer,
        seen: Callable[[Driver], object] | None = None,
        brief: Callable[[], ServiceError] | None = None,
    ) -> Api:
        """Return the same handlers for bodies in another form, or answers in another.

        Args:
            reads: the form of bodies.
            writer: writes answers.
            seen: what the callers may see of the service; None: all.
            brief: as for a new one.
        """
        service = self._service if seen is None else cast("Driver", seen(self._service))
        return Api(
            *(service, self._validation),
            metrics=self._metrics,
            openapi=self._openapi,
            reloading=self._reloading,
            guard=self._guard,
            refused=self._refused,
            reads=reads,
            writer=writer,
            brief=brief,
        )

    def do(self, route: Route[Handler], request: Request) -> Answer:
        """Handle a request; what it changes is on disk before its answer is given, if asked for.

        Raises:
            ServiceError: as the handler, or because the disk refuses.
        """
        keeper = self._service.keeper
        if keeper is None or not route.changes:
            return route.handler(self, request)
        keeper.check_writable()
        answer = route.handler(self, request)
        if isinstance(answer, Response):
            return _settling(answer, keeper)
        return _settle_later(answer, keeper)

    def judge_query(self, route: Route[Handler], query: bytes) -> str | None:
        """Return the Warning header for what a query string names and the route does not know.

        A misspelt scope would otherwise be answered with all of them. The console's own routes
        are no part of the API: their page is of the same version.

        Raises:
            UnknownField: under `FieldValidation.STRICT`.
        """
        if route.answers is None:
            return None
        unknown = unknown_in_query(query, route.query)
        return judge_unknown(unknown, self._validation, "parameter") if unknown else None

    # -- state of the process ------------------------------------------------------------------

    def health(self, _: Request) -> Response:
        """Say that the process is up, and nothing else."""
        return self.writer.done()

    def ready(self, request: Request) -> Answer:
        """Say whether any worker is schedulable: 200 or 503. `verbose=true` adds what is wrong."""
        wanted = read_query(request.query, VERBOSE_QUERY).get("verbose", "")
        if wanted not in _VERBOSE:
            raise InvalidQuery("`verbose` must be true or false", field="verbose")
        is_verbose = _VERBOSE[wanted]
        if self._brief is not None:
            if is_verbose:
                raise self._brief()
            return self._say_ready(BriefReady(self._service.is_ready()))
        if is_verbose:
            return self._ready_verbose()
        return self._say_ready(self._service.ready())

    async def _ready_verbose(self) -> Response:
        return self._say_ready(await self._service.ready_verbose())

    def _say_ready(self, ready: Ready | BriefReady) -> Response:
        response = self.writer.reply(ready, 200 if ready.ready else 503)
        if not ready.ready:
            response.headers += (retry_after_line(0.0),)
        return response

    def metrics(self, _: Request) -> Response:
        """Return counters for Prometheus."""
        body, media_type = self._metrics()
        return Response(200, body, ((b"content-type", media_type.encode()),))

    def openapi(self, _: Request) -> Response:
        """Return this description."""
        return Response(200, self._openapi(), JSON)

    # -- workers -------------------------------------------------------------------------------

    def upsert_worker(self, request: Request) -> Answer:
        """Register a worker, or replace its whole record."""
        decoded = self._worker_spec.decode(request.body)
        return self._answer(decoded, lambda spec, _: self._service.upsert_worker(spec), 201)

    def patch_worker(self, request: Request) -> Answer:
        """Merge into a worker's record; null and absent change nothing."""
        worker_id = read_u64(request.params[0])
        decoded = self._worker_patch.decode(request.body)
        return self._answer(decoded, lambda patch, _: self._service.patch_worker(worker_id, patch))

    def delete_worker(self, request: Request) -> Response:
        """Remove a worker with its reservations and its index."""
        return self.writer.reply(self._service.delete_worker(read_u64(request.params[0])))

    def drain_worker(self, request: Request) -> Answer:
        """Give a worker no more work; what it has goes on. Repeatable. The body may be empty."""
        worker_id = read_u64(request.params[0])
        decoded = self._drain.decode(request.body or self._drain.nothing)
        return self._answer(decoded, lambda ask, _: self._service.drain_worker(worker_id, ask))

    def undrain_worker(self, request: Request) -> Response:
        """Let a worker be chosen again. Repeatable."""
        return self.writer.reply(self._service.undrain_worker(read_u64(request.params[0])))

    def drain_status(self, request: Request) -> Response:
        """Tell how far a worker is from being idle, whether it drains or not."""
        return self.writer.reply(self._service.drain_status(read_u64(request.params[0])))

    def scale_down_candidates(self, request: Request) -> Answer:
        """Name the workers that are cheapest to lose, `count` (1) of those asked for."""
        values = read_query(request.query, CANDIDATE_QUERY)
        count = read_count("count", values.get("count"), 1, CANDIDATES_MAX)
        return self._candidates(count, *_scope_in(values))

    async def _candidates(
        self, count: int, model_name: str | None, tenant_id: str | None
    ) -> Response:
        found = await self._service.scale_down_candidates(count, model_name, tenant_id)
        return self.writer.reply(ScaleDownCandidates(candidates=found))

    def workers(self, request: Request) -> Response:
        """List workers by ascending id."""
        return self.writer.reply(self._service.workers(*_read_scope(request.query)))

    def report(self, request: Request) -> Answer:
        """Take in what a worker says of its own load."""
        worker_id = read_u64(request.params[0])
        decoded = self._worker_metrics.decode(request.body)
        return self._answer(decoded, lambda metrics, _: self._service.report(worker_id, metrics))

    # -- selection -----------------------------------------------------------------------------

    def select(self, request: Request) -> Answer:
        """Choose the worker for a prompt; waits while every eligible rank is busy."""
        decoded = self._select.decode(request.body)
        return self._selection(decoded, self._service.select_now)

    def select_and_reserve(self, request: Request) -> Answer:
        """Choose a worker and book it in one step; waits likewise."""
        decoded = self._select_and_reserve.decode(request.body)
        return self._selection(decoded, self._service.select_and_reserve_now)

    def select_pair(self, request: Request) -> Answer:
        """Book a prefill and a decode worker in one step, or one worker if that costs less."""
        decoded = self._select_pair.decode(request.body)
        return self._selection(decoded, self._service.select_pair_now)

    def _selection(
        self, decoded: Decoded[S], verb: Callable[[S, bytes], Decided | Ticket]
    ) -> Answer:
        try:
            answer = verb(decoded.request, decoded.unknown)
        except ServiceError as error:
            if error.decision is not None:
                return self._refuse(error, decoded.warning)
            return self._refusal(error, decoded.warning)
        if isinstance(answer, Ticket):
            return self._wait(answer, decoded.request, decoded.warning)
        if decoded.request.explain:
            return self._explain(answer, decoded.request, decoded.warning)
        return self.writer.reply(answer, 200, decoded.warning)

    async def _wait(self, ticket: Ticket, request: SelectRequest, warning: str | None) -> Response:
        try:
            answer = await self._service.wait(ticket)
        except ServiceError as error:
            return await self._refuse(error, warning)
        return await self._explain(answer, request, warning)

    async def _explain(
        self, answer: Decided, request: SelectRequest, warning: str | None
    ) -> Response:
        told = await self._service.teller.finish(answer, request)
        return self.writer.reply(told, 200, warning)

    async def _refuse(self, error: ServiceError, warning: str | None) -> Response:
        await self._service.teller.finish_refusal(error)
        return self._refusal(error, warning)

    def select_batch(self, request: Request) -> Answer:
        """Choose workers for a wave of prompts together, and book them if that is wanted."""
        return self._select_batch(self._wave.decode(request.body))

    async def _select_batch(self, decoded: Decoded[WaveBody]) -> Response:
        wants, warning = decoded.request, decoded.warning
        items: list[Item] = []
        for at, raw in enumerate(wants.requests):
            try:
                one = self._wave_item.decode(bytes(raw))
            except ServiceError as refusal:  # of a body that is wrong nothing is done
                inside = "" if refusal.field is None else f".{refusal.field}"
                refusal.field = f"requests[{at}]{inside}"
                raise
            items.append((one.request, one.unknown))
            warning = warning or one.warning
            if not (at + 1) % _WAVE_ITEMS:
                await asyncio.sleep(0)
        try:
            answer = await self._service.select_batch(wants, items)
            answer = await explained(answer, self._service.teller)
        except ServiceError as refusal:
            return self._refusal(refusal, warning)
        return self.writer.reply(answer, 200, warning)

    # -- reservations --------------------------------------------------------------------------

    def reserve(self, request: Request) -> Answer:
        """Book a rank of the caller's choice."""
        return self._answer(self._reservation.decode(request.body), self._service.reserve, 201)

    def prefill_complete(self, request: Request) -> Response:
        """Take a reservation's prefill tokens out of the load: its prompt is computed."""
        if not request.body or _CACHED_TOKENS not in request.body:  # others are ignored
            self._service.prefill_complete(request.params[0])
            return self.writer.done()
        decoded = self._prefill_complete.decode(request.body)
        name = request.params[0]

        def verb(done: PrefillCompleteRequest, _: bytes) -> Status:
            self._service.prefill_complete(name, done.cached_tokens)
            return Status()

        return self._answer(decoded, verb)

    def output_block(self, request: Request) -> Answer:
        """Add one more KV block to a reservation."""
        decoded = self._output_block.decode(request.body)
        name = request.params[0]

        def verb(block: OutputBlockRequest, _: bytes) -> Status:
            self._service.output_block(name, block.decay_fraction)
            return Status()

        return self._answer(decoded, verb)

    def free(self, request: Request) -> Response:
        """End a reservation. Repeatable."""
        self._service.free(request.params[0])
        return self.writer.done()

    def batch(self, request: Request) -> Answer:
        """Carry out many lifecycle calls in order, each for itself."""
        decoded = self._batch.decode(request.body)
        try:
            answer = self._service.batch_now(decoded.request)
        except ServiceError as error:
            return self._refusal(error, decoded.warning)
        if isinstance(answer, BatchAnswer):
            return self.writer.reply(answer, 200, decoded.warning)
        return self._finish_batch(answer, decoded.warning)

    async def _finish_batch(
        self, answer: asyncio.Task[BatchAnswer], warning: str | None
    ) -> Response:
        return self.writer.reply(await asyncio.shield(answer), 200, warning)

    # -- leases --------------------------------------------------------------------------------

    def open_lease(self, request: Request) -> Answer:
        """Open a lease, or renew one's own under the same id."""
        decoded = self._lease.decode(request.body)
        return self._answer(decoded, lambda lease, _: self._service.open_lease(lease), 201)

    def renew_lease(self, request: Request) -> Answer:
        """Renew everything that lives under a lease. The body may be empty."""
        lease_id = request.params[0]
        decoded = self._lease_renewal.decode(request.body or self._lease_renewal.nothing)
        return self._answer(decoded, lambda ask, _: self._service.renew_lease(lease_id, ask))

    def close_lease(self, request: Request) -> Answer:
        """End a lease and every reservation under it. Repeatable."""
        lease = self._service.close_lease_now(request.params[0])
        return self.writer.done() if lease is None else self._clear_lease(lease)

    async def _clear_lease(self, lease: Lease) -> Response:
        await self._service.clear_lease(lease)
        return self.writer.done()

    def leases(self, request: Request) -> Response:
        """List open leases, oldest first: the first `limit` (100), and how many there are."""
        values = read_query(request.query, LEASE_QUERY)
        limit = read_count("limit", values.get("limit"), LEASES_LISTED)
        return self.writer.reply(self._service.leases(values.get("owner"), limit))

    # -- admission -----------------------------------------------------------------------------

    def admission(self, _: Request) -> Response:
        """Say which policy is in force, and what became of every class."""
        return self.writer.reply(self._service.admission())

    def change_admission(self, request: Request) -> Answer:
        """Put another policy in force at once; who waits is judged again."""
        decoded = self._admission.decode(request.body)
        return self._answer(decoded, lambda change, _: self._service.change_admission(change))

    def busy_thresholds(self, _: Request) -> Response:
        """List the busy thresholds of every model."""
        return self.writer.reply(self._service.busy_thresholds())

    def change_threshold(self, request: Request) -> Answer:
        """Set or clear busy thresholds of a model; with none given, read them."""
        decoded = self._threshold.decode(request.body)
        return self._answer(decoded, lambda change, _: self._service.change_threshold(change))

    def forget_threshold(self, request: Request) -> Response:
        """Drop what was set for a model or one tenant of it. Repeatable."""
        values = read_query(request.query, THRESHOLD_QUERY)
        model = values.get("model")
        if model is None:
            raise InvalidQuery("`model` must be given", field="model")
        return self.writer.reply(self._service.forget_threshold(model, values.get("tenant_id")))

    # -- settings ------------------------------------------------------------------------------

    def config(self, _: Request) -> Response:
        """Say what every setting is, who said so, and whether it may change without a restart."""
        assert self._reloading is not None
        return self.writer.reply(self._reloading.describe())

    def change_config(self, request: Request) -> Answer:
        """Put settings in force at once, all or none."""
        assert self._reloading is not None
        return self._answer(
            self._config.decode(request.body),
            lambda change, _: self._reloading and self._reloading.put(change),
        )

    # -- inspection ----------------------------------------------------------------------------

    def loads(self, request: Request) -> Response:
        """Return the load of every rank, by scope."""
        return self.writer.reply(self._service.loads(*_read_scope(request.query)))

    def potential_loads(self, request: Request) -> Answer:
        """Return what every rank would carry with this prompt."""
        decoded = self._potential_loads.decode(request.body)
        return self._answer(decoded, lambda prompt, _: self._service.potential_loads(prompt))

    def overlap_scores(self, request: Request) -> Answer:
        """Return what every rank holds of this prompt."""
        decoded = self._overlap_scores.decode(request.body)
        return self._answer(decoded, lambda prompt, _: self._service.overlap_scores(prompt))

    def decision(self, request: Request) -> Answer:
        """Return one decision with every rank and every term of its cost, by whichever id."""
        return self._decision(self._service.teller.find(request.params[0]))

    async def _decision(self, record: Record) -> Response:
        return self.writer.reply(await self._service.teller.tell(record))

    def decisions(self, request: Request) -> Answer:
        """List the last decisions, newest first: `limit` (50) of those asked for."""
        values = read_query(request.query, DECISION_QUERY)
        model_name, tenant_id = _scope_in(values)
        wanted = Wanted(
            worker_id=read_id("worker_id", values.get("worker_id")),
            model_name=model_name,
            tenant_id=tenant_id,
            limit=read_count("limit", values.get("limit"), LISTED, LISTED_MAX),
            candidates=read_switch("candidates", values.get("candidates")),
        )
        return self._decisions(wanted)

    async def _decisions(self, wanted: Wanted) -> Response:
        teller = self._service.teller
        records = await teller.matching(wanted)
        each = teller.each(records, candidates=wanted.candidates)
        return self.writer.reply_listing("decisions", each, len(records))

    def trust(self, request: Request) -> Response:
        """Return how far every rank's index is believed, and why."""
        seats = self._service.trust_seats(*_read_scope(request.query))
        return self.writer.reply_listing("ranks", self._trust(seats), len(seats))

    async def _trust(self, seats: list[TrustSeat]) -> AsyncIterator[RankTrustRow]:
        for number, seat in enumerate(seats, 1):
            yield self._service.trust_row(seat)
            if not number % _TRUST_SLICE:
                await asyncio.sleep(0)

    def shadow(self, request: Request) -> Answer:
        """Tell what the shadow weights would have done, in all and for `limit` (100) scopes."""
        values = read_query(request.query, SHADOW_QUERY)
        limit = read_count("limit", values.get("limit"), SHADOW_SCOPES_LISTED, SHADOW_SCOPES_MAX)
        return self._shadow(*_scope_in(values), limit)

    async def _shadow(self, model_name: str | None, tenant_id: str | None, limit: int) -> Response:
        return self.writer.reply(await self._service.shadow(model_name, tenant_id, limit))

    def dump(self, _: Request) -> Response:
        """Return the whole index, one key `model:tenant` per scope."""
        return Response(200, b"", JSON, stream=self._service.dump())

    # -- replicas ------------------------------------------------------------------------------

    def peers(self, _: Request) -> Response:
        """List the peers this process listens to."""
        plane = self._service.replicas
        return self.writer.reply([] if plane is None else plane.peers())

    def register_peer(self, request: Request) -> Answer:
        """Listen to a replica: 201, or 200 if that is so already."""
        decoded = self._peer.decode(request.body)
        try:
            is_new = self._service.register_peer(decoded.request.endpoint)
        except (ServiceError, IndexerError) as error:
            return self._refusal(error, decoded.warning)
        return self.writer.reply(Status(), 201 if is_new else 200, decoded.warning)

    def deregister_peer(self, request: Request) -> Answer:
        """Stop listening to a replica."""

        def verb(peer: PeerRequest, _: bytes) -> Status:
            self._service.deregister_peer(peer.endpoint)
            return Status()

        return self._answer(self._peer.decode(request.body), verb)

    def replica_snapshot(self, _: Request) -> Response:
        """Give a replica everything it has to know of this process, as length-prefixed frames."""
        return Response(200, b"", BYTES, stream=self._service.replica_plane().snapshot())

    def _answer(
        self, decoded: Decoded[R], verb: Callable[[R, bytes], object], status: int = 200
    ) -> Response:
        try:
            answer = verb(decoded.request, decoded.unknown)
        except (ServiceError, IndexerError) as error:
            return self._refusal(error, decoded.warning)
        return self.writer.reply(answer, status, decoded.warning)

    def _refusal(self, error: ServiceError | IndexerError, warning: str | None) -> Response:
        self._refused(error)
        return self.writer.refusal(error, warning)


def _settling(answer: Response, keeper: Keeper) -> Response | Settling:
    if answer.status >= _REFUSED:
        return answer
    written = keeper.settled()
    return answer if written is None else Settling(answer, written)


async def _settle_later(answer: Awaitable[Response], keeper: Keeper) -> Response:
    settling = _settling(await answer, keeper)
    return await settling if isinstance(settling, Settling) else settling


def _read_scope(query: bytes) -> tuple[str | None, str | None]:
    return _scope_in(read_query(query, SCOPE_QUERY))


def _scope_in(values: dict[str, str]) -> tuple[str | None, str | None]:
    tenant, group = values.get("tenant_id"), values.get("routing_group")
    if tenant is not None and group is not None and tenant != group:
        raise InvalidField(
            "routing_group and tenant_id name the same thing and must be equal",
            field="routing_group",
        )
    return values.get("model_name"), group if tenant is None else tenant


Handler: TypeAlias = "Callable[[Api, Request], Answer]"


def _route(  # noqa: PLR0913 - the columns of one row
    method: str,
    pattern: str,
    handler: Handler,
    answers: object,
    *refusals: int,  # besides those every route may answer
    scope: str,  # a token needs to use it
    of_process: bool = False,  # not for tokens that are bound to tenants
    takes: type[msgspec.Struct] | None = None,
    status: int = 200,
    status_again: int | None = None,
    query: tuple[str, ...] = (),
    body_optional: bool = False,
    body_lenient: bool = False,
    changes: bool | None = None,  # None: whatever is no GET
) -> Route[Handler]:
    summary = (handler.__doc__ or "").partition("\n")[0]
    return Route(
        *(method, pattern, handler, takes, answers, status, refusals, query, summary),
        changes=method != "GET" if changes is None else changes,
        body_optional=body_optional,
        scope=scope,
        of_process=of_process,
        body_lenient=body_lenient,
        status_again=status_again,
    )


_get, _post = partial(_route, "GET"), partial(_route, "POST")
_ask = partial(_route, "POST", changes=False)
_OPEN, _CATALOG, _SELECT, _LIFECYCLE = "open", "catalog", "select", "lifecycle"
_READ, _ADMIN = "read", "admin"
_WORKER: Final = "/workers/{worker_id}"
_DRAIN: Final = _WORKER + "/drain"
_RESERVATION: Final = "/reservations/{reservation_id}"
_LEASE: Final = "/leases/{lease_id}"

ROUTES: Final[tuple[Route[Handler], ...]] = (
    _get("/health", Api.health, Status, scope=_OPEN),
    _get("/ready", Api.ready, Ready | BriefReady, 503, scope=_OPEN, query=VERBOSE_QUERY),
    _get("/metrics", Api.metrics, None, scope=_READ, of_process=True),
    _get("/openapi.json", Api.openapi, dict[str, Any], scope=_READ),
    # the catalog
    _post(
        *("/workers", Api.upsert_worker, WorkerRecord),
        scope=_CATALOG,
        takes=WorkerSpec,
        status=201,
    ),
    _get("/workers", Api.workers, list[WorkerRecord], scope=_READ, query=SCOPE_QUERY),
    _route(
        *("PATCH", _WORKER, Api.patch_worker, WorkerRecord, 404),
        scope=_CATALOG,
        takes=WorkerPatch,
    ),
    _route("DELETE", _WORKER, Api.delete_worker, WorkerRecord, 404, scope=_CATALOG),
    _post(
        *(_DRAIN, Api.drain_worker, DrainStatus, 404),
        scope=_CATALOG,
        takes=DrainRequest,
        body_optional=True,
    ),
    _get(_DRAIN, Api.drain_status, DrainStatus, 404, scope=_READ),
    _get(
        *("/scale_down_candidates", Api.scale_down_candidates, ScaleDownCandidates),
        scope=_READ,
        query=CANDIDATE_QUERY,
    ),
    _route("DELETE", _DRAIN, Api.undrain_worker, DrainStatus, 404, scope=_CATALOG),
    _post(
        *(_WORKER + "/metrics", Api.report, WorkerMetricsAnswer, 404),
        scope=_CATALOG,
        changes=False,
        takes=WorkerMetrics,
    ),
    # selection
    _ask("/select", Api.select, Decided, 503, scope=_SELECT, takes=SelectRequest),
    _post(
        *("/select_and_reserve", Api.select_and_reserve, Decided, 404, 409, 503),
        scope=_SELECT,
        takes=SelectAndReserveRequest,
    ),
    _post(
        *("/select_pair", Api.select_pair, PairSelection, 404, 409, 503),
        scope=_SELECT,
        takes=SelectPairRequest,
    ),
    _post(
        *("/select_batch", Api.select_batch, WaveAnswer, 404, 409, 503),
        scope=_SELECT,
        takes=SelectBatchRequest,
    ),
    # reservations
    _post(
        *("/reservations", Api.reserve, ReservationAnswer, 404, 409, 503),
        scope=_LIFECYCLE,
        takes=ReservationRequest,
        status=201,
    ),
    _post(
        *(_RESERVATION + "/prefill_complete", Api.prefill_complete, Status, 404),
        scope=_LIFECYCLE,
        takes=PrefillCompleteRequest,
        body_optional=True,
        body_lenient=True,
    ),
    _post(
        *(_RESERVATION + "/output_block", Api.output_block, Status, 404),
        scope=_LIFECYCLE,
        takes=OutputBlockRequest,
    ),
    _route("DELETE", _RESERVATION, Api.free, Status, 404, scope=_LIFECYCLE),
    _post(*("/reservations/batch", Api.batch, BatchAnswer), scope=_LIFECYCLE, takes=BatchRequest),
    # leases
    _post(
        *("/leases", Api.open_lease, LeaseRecord, 409, 503),
        scope=_LIFECYCLE,
        takes=LeaseRequest,
        status=201,
    ),
    _get("/leases", Api.leases, LeaseList, scope=_READ, query=LEASE_QUERY),
    _post(
        *(_LEASE + "/renew", Api.renew_lease, LeaseRecord, 404),
        scope=_LIFECYCLE,
        changes=False,  # a sign of life must be heard also while the disk is full
        takes=LeaseRenewal,
        body_optional=True,
    ),
    _route("DELETE", _LEASE, Api.close_lease, Status, 404, scope=_LIFECYCLE),
    # admission
    _get("/admission", Api.admission, AdmissionStatus, scope=_READ, of_process=True),
    _route(
        *("PUT", "/admission", Api.change_admission, AdmissionStatus),
        scope=_ADMIN,
        of_process=True,
        takes=AdmissionChange,
    ),
    _get("/busy_threshold", Api.busy_thresholds, BusyThresholds, scope=_READ, of_process=True),
    _post(
        *("/busy_threshold", Api.change_threshold, BusyThreshold, 404, 409),
        scope=_ADMIN,
        of_process=True,
        takes=BusyThresholdChange,
    ),
    _route(
        *("DELETE", "/busy_threshold", Api.forget_threshold, BusyThreshold),
        scope=_ADMIN,
        of_process=True,
        query=THRESHOLD_QUERY,
    ),
    # settings
    _get("/config", Api.config, ConfigStatus, scope=_ADMIN, of_process=True),
    _route(
        *("PUT", "/config", Api.change_config, ConfigStatus, 409),
        scope=_ADMIN,
        of_process=True,
        takes=ConfigChange,
    ),
    # inspection
    _get("/loads", Api.loads, list[ScopeLoads], scope=_READ, query=SCOPE_QUERY),
    _ask(
        *("/potential_loads", Api.potential_loads, list[LoadRow], 503),
        scope=_SELECT,
        takes=PotentialLoadsRequest,
    ),
    _ask(
        *("/overlap_scores", Api.overlap_scores, OverlapScores, 503),
        scope=_SELECT,
        takes=OverlapScoresRequest,
    ),
    _get("/decisions", Api.decisions, DecisionList, 404, scope=_READ, query=DECISION_QUERY),
    _get("/decisions/{id}", Api.decision, Decision, 404, scope=_READ),
    _get("/trust", Api.trust, TrustTable, scope=_READ, query=SCOPE_QUERY),
    _get("/shadow", Api.shadow, ShadowStatus, scope=_READ, query=SHADOW_QUERY),
    _get("/dump", Api.dump, dict[str, dict[str, Any]], 503, scope=_READ),
    # replicas
    _get("/replica_sync/peers", Api.peers, list[str], scope=_READ, of_process=True),
    _get(
        *("/replica_sync/snapshot", Api.replica_snapshot, bytes, 409, 503),
        scope=_READ,
        of_process=True,
    ),
    _post(
        *("/replica_sync/register_peer", Api.register_peer, Status, 409),
        scope=_CATALOG,
        of_process=True,
        takes=PeerRequest,
        status=201,
        status_again=200,
    ),
    _post(
        *("/replica_sync/deregister_peer", Api.deregister_peer, Status, 404, 409),
        scope=_CATALOG,
        of_process=True,
        takes=PeerRequest,
    ),
)
