"""Every refusal of the service in one tree: a text for people, a stable code, an HTTP status.

Raised by the core and the codec, turned into a response by exactly one function, `problem`.
Texts of the classes below are part of the contract (sections 2 to 6) and compared by tests.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Final

from msgspec import UnsetType

from select_service.types import Scope

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from select_service.wave_types import WaveResult


_TRY_AGAIN: Final = frozenset({429, 503})
RETRY_AFTER_S: Final = 1.0
"""When to ask again where nothing drains that could be measured: nobody is there to compute, no
wish is met by anybody, the process is leaving. It is the shortest time the header can say; asking
costs little, and whoever comes or takes over is not waited for longer than needed."""
BUSY_GATE: Final = "busy"
_ROUNDING_S: Final = 1e-9
_NAMED_MAX: Final = 8
"""Workers a refusal names."""


class ServiceError(Exception):
    """An error of ours, where no kind below says otherwise; `str(error)` is the text for people."""

    status: int = 500
    code: str = "internal_error"
    retry_after_s: float = RETRY_AFTER_S
    """When to ask again, for the statuses that say so (see `retry_after`); who raises it says so
    where something drains: a queue, a gate's room, leases, the journal's next attempt."""
    decision: object = None
    """What led to it, when that was to be explained; whoever answers reads it."""
    limit: str | None = None
    """The setting that was crossed, of those that are counted where the refusal is answered."""

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        details: dict[str, object] | None = None,
        limit: str | None = None,
    ) -> None:
        super().__init__(message)
        self.field = field
        self.details = details
        self.limit = limit

    def body(self) -> dict[str, object]:
        """Return what the answer says."""
        body: dict[str, object] = {"error": str(self), "code": self.code}
        if self.field is not None:
            body["field"] = self.field
        if self.details:
            body["details"] = self.details
        return body


# -- the door: codec and HTTP --------------------------------------------------------------------


class InvalidJson(ServiceError):
    """Not JSON at all."""

    status = 400
    code = "invalid_json"


class InvalidMsgpack(ServiceError):
    """Said to be MessagePack, and it is not."""

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


class TooManyBlocks(InvalidField):
    """A prompt of more blocks than `--blocks-per-request-max`."""

    code = "too_many_blocks"

    def __init__(self, field: str, most: int) -> None:
        super().__init__(f"{field}: a prompt may have at most {most} blocks", field=field)


class TooMuchInBody(InvalidField):
    """A body of more small things than are read in one go; the text names the flag."""

    code = "too_much_in_body"

    def __init__(self, why: str, limit: str, field: str | None = None) -> None:
        where, flag = f"{field}: " if field else "", limit.replace("_", "-")
        super().__init__(f"{where}{why} (--{flag})", field=field, limit=limit)


class UnknownField(ServiceError):
    """A field nobody knows, under `--field-validation strict`."""

    status = 422
    code = "unknown_field"


class UnsupportedMediaType(ServiceError):
    """A body that does not claim to be JSON, or is compressed."""

    status = 415
    code = "unsupported_media_type"


class BodyTooLarge(ServiceError):
    """More bytes than `--max-body-bytes`, or than a body has that brings no prompt."""

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
    """A request line and headers beyond any use."""

    status = 431
    code = "head_too_large"


class TooManyConnections(ServiceError):
    """More open connections than `--connections-max`."""

    status = 503
    code = "too_many_connections"


class HttpVersionTooOld(ServiceError):
    """An answer without an end, to a client that must be told its length."""

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


# -- who may -------------------------------------------------------------------------------------


class Unauthenticated(ServiceError):
    """Nobody is known by what the request shows."""

    status = 401
    code = "unauthenticated"
    _TEXTS: ClassVar = {
        "missing": "a token is needed: Authorization: Bearer <token>",
        "unknown": "the token is not known",
        "expired": "the token has expired",
    }

    def __init__(self, reason: str) -> None:
        super().__init__(self._TEXTS[reason], details={"reason": reason})
        self.challenge = b"Bearer" if reason == "missing" else b'Bearer error="invalid_token"'


class MissingScope(ServiceError):
    """Somebody is known, and may not do this."""

    status = 403
    code = "missing_scope"

    def __init__(self, scope: str) -> None:
        super().__init__(f"the token has not the scope {scope}", details={"scope": scope})
        self.challenge = b'Bearer error="insufficient_scope", scope="%b"' % scope.encode()


class TokenIsBound(ServiceError):
    """What concerns the whole process is not for a token that is bound to tenants."""

    status = 403
    code = "token_bound"

    def __init__(self) -> None:
        super().__init__(
            "this concerns the whole process, and the token is bound to some of its tenants"
        )


class TenantNotFound(ServiceError):
    """A tenant that does not exist, as far as the bearer of a bound token may know."""

    status = 404
    code = "tenant_not_found"

    def __init__(self, tenant_id: str) -> None:
        super().__init__(f"tenant {tenant_id} not found", field="tenant_id")


# -- semantics -----------------------------------------------------------------------------------


class InvalidRequest(ServiceError):
    """Well-formed, but it means nothing we can serve."""

    status = 400
    code = "invalid_request"


class PinnedNotAllowed(InvalidRequest):
    """pinned_worker is outside allowed_worker_ids."""

    code = "pinned_worker_not_allowed"


class NoSchedulableWorker(ServiceError):
    """Nothing schedulable, in the process or in the scope: ask again in a second."""

    status = 503
    code = "no_schedulable_worker"

    @classmethod
    def anywhere(cls) -> NoSchedulableWorker:
        """The whole process has none."""
        return cls("no schedulable workers are available")

    @classmethod
    def in_scope(cls, scope: Scope) -> NoSchedulableWorker:
        """The scope asked for has none."""
        return cls(f"no schedulable workers for {scope_text(scope)}")


class NoEligibleWorker(ServiceError):
    """Workers exist, and none of them may take this prompt: time alone does not help."""

    status = 503
    code = "no_eligible_worker"

    def __init__(self) -> None:
        super().__init__("no endpoints available to route work")


class NoWorkerForRole(NoEligibleWorker):
    """Eligible workers exist, and nobody among them does what the request needs."""

    code = "no_worker_for_role"

    def __init__(self, role: str) -> None:
        text = f"no eligible {role} worker to route work to"
        if role == "aggregated":
            text += ": those there are only prefill or decode, which POST /select_pair books"
        ServiceError.__init__(self, text, details={"role": role})


class WorkerDraining(NoEligibleWorker):
    """Whoever may take this prompt drains: it takes no more work until an operator says so."""

    code = "worker_draining"

    def __init__(self, worker_ids: Iterable[int]) -> None:
        ids = list(worker_ids)
        if len(ids) == 1:
            text = f"worker {ids[0]} is draining: it takes no new work"
        else:
            named = ", ".join(map(str, ids[:_NAMED_MAX]))
            more = f" and {len(ids) - _NAMED_MAX} more" if len(ids) > _NAMED_MAX else ""
            text = f"all workers that may take this are draining: {named}{more}"
        ServiceError.__init__(self, text, details={"worker_ids": ids[:_NAMED_MAX]})


class NoTransfer(NoEligibleWorker):
    """Prefill and decode workers exist, and KV blocks may not move between any two of them."""

    code = "no_kv_transfer"

    def __init__(self) -> None:
        ServiceError.__init__(
            self, "no prefill and decode worker share the KV transfer domain they require"
        )


class QueueFull(ServiceError):
    """A queue limit of the policy class is reached; ask again when one of it has been computed."""

    status = 503
    code = "queue_full"


class WouldWait(ServiceError):
    """One of a wave would have to wait for a worker, which nobody does there."""

    status = 503
    code = "would_wait"

    def __init__(self, retry_after_s: float) -> None:
        super().__init__("every worker that could take it is busy, and a wave does not wait")
        self.retry_after_s = retry_after_s


class BatchNotPlaced(ServiceError):
    """All of a wave were to be placed, or none, and one cannot be."""

    code = "batch_not_placed"

    def __init__(self, result: WaveResult, sample: int) -> None:
        placed = isinstance(result.error, UnsetType)
        error = "nobody holds enough of it" if placed else result.error
        super().__init__(
            f"sample {sample} of the batch (requests[{result.request}]) cannot be placed: {error}",
            field=None if isinstance(result.field, UnsetType) else result.field,
            details={
                "request": result.request,
                "sample": sample,
                "code": "cache_threshold" if placed else result.code,
            },
        )
        self.status = 409 if placed else result.status
        if not isinstance(result.retry_after_s, UnsetType):
            self.retry_after_s = result.retry_after_s


class AdmissionRefused(ServiceError):
    """The gate says no, why, and when to come again."""

    def __init__(
        self,
        message: str,
        *,
        status: int,
        code: str,
        gate: str,
        policy: str,
        retry_after_s: float = RETRY_AFTER_S,
        promised: bool = False,
        facts: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.gate = gate
        self.policy = policy
        self.retry_after_s = retry_after_s
        self.promised = promised
        self.facts = facts or {}

    def body(self) -> dict[str, object]:
        """Return why in one form for every gate; of busy workers in the reference's, and ours."""
        if self.gate == BUSY_GATE:
            body: dict[str, object] = {
                "message": f"Service temporarily unavailable: {self}",
                "type": "service_unavailable",
                "code": self.status,
                "error": str(self),
            }
        else:
            body = {"error": str(self), "code": self.code}
        return body | {
            "reason": self.code,
            "gate": self.gate,
            "policy": self.policy,
            "retry_after_s": round(self.retry_after_s, 3),
            "promised": self.promised,
            "knob": None,
            "value": None,
            "limit": None,
            **self.facts,
        }


class AdmissionControlOff(ServiceError):
    """Busy thresholds are set while `--admission-control` keeps them out of force."""

    status = 409
    code = "admission_control_off"

    def __init__(self) -> None:
        super().__init__(
            "busy thresholds have no effect while --admission-control is none: "
            "start with --admission-control token-capacity"
        )


class NeedsRestart(ServiceError):
    """A setting that PUT /config cannot change."""

    status = 409
    code = "needs_restart"

    def __init__(self, field: str) -> None:
        super().__init__(
            f"{field} cannot change while the process runs: restart it", field=f"settings.{field}"
        )


class ModelNotFound(ServiceError):
    """Busy thresholds for a model nobody serves."""

    status = 404
    code = "model_not_found"

    def __init__(self, model: str, tenant_id: str | None) -> None:
        name = model if tenant_id is None else f"{model} of tenant {tenant_id}"
        super().__init__(
            f"model {name} is not known: busy thresholds can only be set for discovered models",
            field="model",
        )


class WorkerNotFound(ServiceError):
    """No such worker."""

    status = 404
    code = "worker_not_found"


class WorkerConflict(ServiceError):
    """The worker was registered by another source, which is at work and alone may change it."""

    status = 409
    code = "worker_conflict"

    def __init__(self, worker_id: int, source: str) -> None:
        super().__init__(f"worker {worker_id} comes from source {source}, which keeps it")


class WorkerIdTaken(ServiceError):
    """The number is in use, and not by a worker of the token's tenants."""

    status = 409
    code = "worker_conflict"

    def __init__(self, worker_id: int) -> None:
        super().__init__(f"worker id {worker_id} is not free", field="worker_id")


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


class RankNotFound(ServiceError):
    """The worker exists and has no such rank."""

    status = 404
    code = "rank_not_found"


class ReservationNotFound(ServiceError):
    """An id never seen."""

    status = 404
    code = "reservation_not_found"

    def __init__(self, reservation_id: str) -> None:
        super().__init__(f"reservation {reservation_id} not found")


class ReservationConflict(ServiceError):
    """The id is live with another body or in another scope."""

    status = 409
    code = "reservation_conflict"


class ReservationUnderWay(ServiceError):
    """A wave that is not done has booked the id: nobody is told of what may be taken back."""

    status = 503
    code = "reservation_under_way"

    def __init__(self, reservation_id: str, prefix: str = "") -> None:
        super().__init__(
            f"{prefix}Request {reservation_id} is being booked by a batch", field="reservation_id"
        )


class LeaseNotFound(ServiceError):
    """No such lease, as far as anybody remembers."""

    status = 404
    code = "lease_not_found"
    what: ClassVar[str] = "not found"

    def __init__(self, lease_id: str) -> None:
        super().__init__(f"lease {lease_id} {self.what}", field="lease_id")


class LeaseExpired(LeaseNotFound):
    """Nobody renewed it in time; what was booked under it is freed."""

    code = "lease_expired"
    what = "has expired, and what was booked under it is freed"


class LeaseClosed(LeaseNotFound):
    """The lease's owner has closed it."""

    code = "lease_closed"
    what = "is closed"


class LeaseReopened(ServiceError):
    """The lease's owner has just closed it: this is a request that came late, or again."""

    status = 409
    code = "lease_reopened"

    def __init__(self, lease_id: str, wait_s: float) -> None:
        super().__init__(
            f"lease {lease_id} was closed just now; open another, or this one in {wait_s:.3g} s",
            field="lease_id",
        )


class LeaseConflict(ServiceError):
    """The id of the lease is another owner's."""

    status = 409
    code = "lease_conflict"

    def __init__(self, lease_id: str) -> None:
        super().__init__(f"lease {lease_id} is open for another owner", field="lease_id")


class TooManyLeases(ServiceError):
    """More open leases than `--leases-max`; ask again when the first ends unless it is renewed."""

    status = 503
    code = "too_many_leases"

    def __init__(self, most: int) -> None:
        super().__init__(f"{most} leases are open, no more may be")


class TooManyReservations(ServiceError):
    """More live reservations, and requests that wait to become some, than `--reservations-max`."""

    status = 503
    code = "too_many_reservations"

    def __init__(self, most: int) -> None:
        super().__init__(f"{most} reservations are live, no more may be")


class TooManyWorkers(ServiceError):
    """As many workers as `--workers-max` allows; time alone does not help."""

    status = 409
    code = "too_many_workers"

    def __init__(self, most: int) -> None:
        super().__init__(f"no more than {most} workers may be registered", field="worker_id")


class ReplicaSyncDisabled(ServiceError):
    """The process runs without `--replica-sync-port`."""

    status = 409
    code = "replica_sync_disabled"

    def __init__(self) -> None:
        super().__init__("replica sync is disabled")


class PeerRefused(ServiceError):
    """A replica's endpoint that ZMQ will not connect to, or must not."""

    status = 400
    code = "replica_peer_refused"

    def __init__(self, endpoint: str, reason: str) -> None:
        super().__init__(
            f"failed to register replica peer `{endpoint}`",
            field="endpoint",
            details={"reason": reason},
        )


class InvalidReplicaPeer(ServiceError):
    """An endpoint of `--replica-sync-peers` that cannot be one; the process does not start."""

    status = 400
    code = "invalid_replica_peer"

    def __init__(self, endpoint: str, why: str) -> None:
        super().__init__(f"invalid replica peer endpoint `{endpoint}`: {why}")


class TooManyConsoles(ServiceError):
    """As many pages of the console as `--console-clients-max` allows."""

    status = 503
    code = "too_many_console_clients"

    def __init__(self, clients_max: int) -> None:
        super().__init__(f"{clients_max} pages of the console are open, no more may be")


class TooManyPeers(ServiceError):
    """As many replicas as `--replica-peers-max` allows."""

    status = 409
    code = "too_many_replica_peers"

    def __init__(self, peers_max: int) -> None:
        super().__init__(f"no more than {peers_max} replica peers")


class PeerNotFound(ServiceError):
    """A replica's endpoint nobody registered."""

    status = 404
    code = "replica_peer_not_found"

    def __init__(self) -> None:
        super().__init__("peer not found")


class DecisionNotFound(ServiceError):
    """No decision of that name is kept: there was none, or it had to go for later ones."""

    status = 404
    code = "decision_not_found"

    def __init__(self, name: str) -> None:
        super().__init__(f"decision {name} not found; only the last ones are kept")


class DecisionsOff(ServiceError):
    """The process runs with `--decision-ring 0`."""

    status = 404
    code = "decision_ring_off"

    def __init__(self) -> None:
        super().__init__("decisions are not kept: --decision-ring is 0")


class TooManyDumps(ServiceError):
    """As many dumps under way as `--dumps-max` allows; they end when they end."""

    status = 503
    code = "too_many_dumps"

    def __init__(self, most: int) -> None:
        super().__init__(f"{most} dumps are under way, no more may be: ask again")


class TooManySnapshots(ServiceError):
    """As many snapshots under way as `--replica-snapshots-max` allows; they end when they end."""

    status = 503
    code = "too_many_snapshots"

    def __init__(self) -> None:
        super().__init__("too many snapshots under way, ask again")


class StateUnwritable(ServiceError):
    """The state directory cannot be written: nothing is acknowledged that would not survive.

    Ask again when the journal tries again.
    """

    status = 503
    code = "state_unwritable"

    def __init__(self) -> None:
        super().__init__("the state cannot be written to disk, ask again")


class StateDiskFull(ServiceError):
    """The same, and we know why."""

    status = 503
    code = "state_disk_full"

    def __init__(self) -> None:
        super().__init__("the disk of the state directory is full, ask again when it has room")


class SecurityFileUnusable(Exception):
    """A file of tokens, certificates or keys cannot be used; the text says where and why.

    It never shows what stands there.
    """


class TokenFileUnusable(SecurityFileUnusable):
    """`--token-file`."""


class CertificatesUnusable(SecurityFileUnusable):
    """`--tls-cert`, `--tls-key` or `--tls-client-ca`."""


class StateDirUnusable(Exception):
    """The service cannot start with this state directory; `str(error)` says why."""


class RecordingUnusable(Exception):
    """The service cannot start with this file to record to; `str(error)` says why."""


class ShuttingDown(ServiceError):
    """The process is leaving; waiting requests are sent away, to whoever stands in for it."""

    status = 503
    code = "shutting_down"

    def __init__(self) -> None:
        super().__init__("the service is shutting down")


def scope_text(scope: Scope) -> str:
    """How a scope is written in errors."""
    return f"model={scope.model_name} tenant={scope.tenant_id}"


def problem(error: ServiceError) -> tuple[int, dict[str, object]]:
    """Turn a refusal into (status, JSON body)."""
    body = error.body()
    if error.decision is not None:
        body["decision"] = error.decision
    return error.status, body


def retry_after(error: ServiceError) -> int | None:
    """Return the seconds of a Retry-After header; None: coming again is of no use.

    Every 429 and 503 has one, and so has a refusal for load under any other status.
    """
    if error.status in _TRY_AGAIN or isinstance(error, AdmissionRefused):
        return retry_after_header(error.retry_after_s)
    return None


def retry_after_header(seconds: float) -> int:
    """Return whole seconds: never early, at least 1."""
    return max(1, math.ceil(seconds - _ROUNDING_S))
