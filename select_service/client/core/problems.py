"""What a call can end with instead of an answer.

Refusals by the service become the exceptions of `select_service.errors`, the same that the embedded
service raises, rebuilt from the code and members of the answer. What only a client can meet (no
selector answers, no rank holds the prompt) is below `ClientError`.
"""

from __future__ import annotations

import inspect
import math
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import msgspec

from select_service import errors
from select_service.client.core.exchange import ExchangeOutcome, Failure
from select_service.client.core.gateway_errors import TEXT_MAX, is_of_service
from select_service.errors import (
    AdmissionRefused,
    InvalidField,
    InvalidRequest,
    NoSchedulableWorker,
    ServiceError,
    UnknownModel,
)

if TYPE_CHECKING:
    from select_service.types import CacheThreshold

_REFUSED: Final = 400
_REASONS_SHOWN: Final = 3  # in the text; all that were sent are in `details`
_OF_GATES: Final = frozenset(
    ("message", "type", "code", "error", "reason", "gate", "policy", "retry_after_s", "promised")
)


_NOT_RUNNING: Final = (
    "Is it running? `select-service` starts one, `make run` in a checkout; --url names another."
)
_REMEDIES: Final = {
    "WRONG_VERSION_NUMBER": "What listens there has no TLS: try http:// in place of https://.",
    "[Errno -": "There is no such host, or its name cannot be looked up: --url names another.",
    "RemoteProtocolError": "What listens there is no select-service, or wants https://: --url "
    "names another.",
}
"""By what is in the text of a failed connection; a negative number is one of the resolver."""


class ClientError(Exception):
    """A problem that no selector has reported."""


class Unreachable(ClientError):
    """No selector could be reached; no booking will stay."""

    @property
    def remedy(self) -> str:
        """What commands say below it."""
        text = str(self)
        return next((remedy for sign, remedy in _REMEDIES.items() if sign in text), _NOT_RUNNING)


class TimedOut(ClientError):
    """Selectors are there, but none has answered in time."""


class AnswerTooLarge(ClientError):
    """An answer with more bytes than `Options.answer_bytes_max`."""


class NotAnAnswer(ClientError):
    """The answer is not from a selection service."""


class ClientClosed(ClientError):
    """The client was closed."""


class ForkedClient(ClientError):
    """The client is in use in the process this one was forked from."""


class OtherLoop(ClientError):
    """The client is in use on another event loop than the running one."""


class BlockSizeUnknown(ClientError):
    """A prompt cannot be hashed here: no schedulable worker of its scope is known."""


class MissingPackage(ClientError):
    """An optional package is not installed; the text says which."""


class NotCached(ClientError):
    """No rank holds enough of the prompt (`cache_hit_threshold`); nothing is booked."""

    def __init__(self, answer: CacheThreshold) -> None:
        super().__init__(
            f"the best hit rate is {answer.best_hit_rate:g}, below {answer.threshold:g}"
        )
        self.answer = answer


_OF_FAILURES: Final[dict[Failure, type[ClientError]]] = {
    Failure.SLOW: TimedOut,
    Failure.TOO_LARGE: AnswerTooLarge,
    Failure.STRANGE: NotAnAnswer,
}


def raise_unless_answered(outcome: ExchangeOutcome, selectors: str) -> None:
    """Raise the exception for an outcome without a usable answer.

    Raises:
        ServiceError: the service refuses; of the class with its code.
        Unreachable: no connection, or it broke.
        TimedOut: no answer in time.
        AnswerTooLarge: the answer exceeds the limit.
        NotAnAnswer: the answer is not a selection service's.
    """
    if outcome.failure is not None:
        raise _OF_FAILURES.get(outcome.failure, Unreachable)(f"{selectors}: {outcome.reason}")
    if outcome.status >= _REFUSED:
        error = refusal(outcome)
        if not is_of_service(outcome):  # a gateway's answer: say so
            error.args = (f"{selectors}: status {outcome.status}: {error}".rstrip(": "),)
        raise error


def refusal(outcome: ExchangeOutcome) -> ServiceError:
    """Return the exception for a refusal, with the fields it carries."""
    body = _members(outcome)
    is_gate = "gate" in body
    code = str(body.get("reason" if is_gate else "code") or f"status_{outcome.status}")
    kind = AdmissionRefused if is_gate else _kinds().get(code, _by_status(outcome.status))
    status = outcome.status
    if is_unknown_model(outcome):  # 503 in the contract, as for one whose workers are away
        kind, status, code = UnknownModel, UnknownModel.status, UnknownModel.code
    error = kind.__new__(kind)
    field = body.get("field")
    # one that is no refusal in our form, such as that of /ready, says itself why
    details = body.get("details") if body.get("error") else body or None
    ServiceError.__init__(
        error,
        _text(body, details) or f"status {outcome.status}",
        field=field if isinstance(field, str) else None,
        details=details if isinstance(details, dict) else None,
    )
    error.status, error.code = status, code
    error.decision = body.get("decision")
    delay_s: Any = body.get("retry_after_s", outcome.retry_after_s)
    if isinstance(delay_s, int | float) and not isinstance(delay_s, bool):
        error.retry_after_s = float(delay_s)
    elif never_fits(outcome):
        error.retry_after_s = math.inf
    if isinstance(error, AdmissionRefused):
        error.gate, error.policy = str(body["gate"]), str(body.get("policy"))
        error.promised = bool(body.get("promised"))
        error.facts = {name: one for name, one in body.items() if name not in _OF_GATES}
    return error


def _text(body: dict[str, Any], details: object) -> str:
    """Return the sentence of a refusal, with the first reasons that its details have."""
    text = str(body.get("error") or "")
    reasons = details.get("reasons") if text and isinstance(details, dict) else None
    if not isinstance(reasons, list) or not reasons:
        return text
    more = len(reasons) - _REASONS_SHOWN
    shown = "; ".join(map(str, reasons[:_REASONS_SHOWN]))
    return f"{text}: {shown}" + (f"; and {more} more" if more > 0 else "")


def never_fits(outcome: ExchangeOutcome) -> bool:
    """Tell whether the refusal says that the same request never fits.

    Its time to return is null then; of a batch, `never_fits` names the limit.
    """
    if outcome.status < _REFUSED or outcome.retry_after_s is not None:
        return False
    body = _members(outcome)
    details = body.get("details")
    if isinstance(details, dict) and "never_fits" in details:
        return True
    return "gate" in body and body.get("retry_after_s", 0.0) is None


def is_unknown_model(outcome: ExchangeOutcome) -> bool:
    """Tell whether the refusal says that the model has never had a worker: waiting is of no use."""
    if code_of(outcome) != NoSchedulableWorker.code:
        return False
    details = _members(outcome).get("details")
    return isinstance(details, dict) and details.get("is_known") is False


def code_of(outcome: ExchangeOutcome) -> str:
    """Return the code of a refusal, "" for anything else."""
    code = _members(outcome).get("code")
    return code if isinstance(code, str) else ""


def _members(outcome: ExchangeOutcome) -> dict[str, Any]:
    decode = (
        msgspec.msgpack.decode
        if outcome.content_type.startswith("application/msgpack")
        else msgspec.json.decode
    )
    try:
        body = decode(outcome.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        text = outcome.body.decode(errors="replace").strip()[:TEXT_MAX]
        return {"error": text}  # from something in between
    return body if isinstance(body, dict) else {}


def _by_status(status: int) -> type[ServiceError]:
    """Return the exception class for a code that is newer than this client."""
    return {400: InvalidRequest, 422: InvalidField}.get(status, ServiceError)


@cache
def _kinds() -> dict[str, type[ServiceError]]:
    found: dict[str, type[ServiceError]] = {}
    for _, kind in inspect.getmembers(errors, inspect.isclass):
        if issubclass(kind, ServiceError) and kind.code != ServiceError.code:
            held = found.get(kind.code)
            if held is None or issubclass(held, kind):  # of two with the same code, the wider one
                found[kind.code] = kind
    return found
