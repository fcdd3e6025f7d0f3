"""What has answered: the service, a proxy without a backend, or something else entirely.

A proxy's "no backend" is not a refusal by the service. It is treated like no answer: whether the
request was carried out is unknown, the next selector may be asked, and if all are gone the client
chooses by itself. `attempts.py` judges the result.
"""

from __future__ import annotations

from typing import Final

from select_service.client.core.exchange import ExchangeOutcome, Failure

TEXT_MAX: Final = 300
"""Characters of a body that are quoted."""

_ITS_TYPES: Final = ("application/json", "application/msgpack")
_REFUSED, _NOT_FOUND, _BROKE, _TIMED_OUT = 400, 404, 500, 504


def is_of_service(outcome: ExchangeOutcome) -> bool:
    """Whether an answer looks like the service's: it has a body, in one of its formats."""
    return bool(outcome.body) and outcome.content_type.startswith(_ITS_TYPES)


def as_received(outcome: ExchangeOutcome) -> ExchangeOutcome:
    """Return an outcome unchanged, or as a failure if something else has answered.

    Refusals below 500 are kept (a gateway has limits of its own), and so is any answer that says
    when to come again.
    """
    status = outcome.status
    if outcome.failure is not None or is_of_service(outcome):
        return outcome
    if status >= _BROKE:
        if outcome.retry_after_s is not None:
            return outcome
        kind = Failure.SLOW if status == _TIMED_OUT else Failure.BROKEN
    elif (status < _REFUSED or status == _NOT_FOUND) and outcome.content_type.startswith("text/h"):
        kind = Failure.STRANGE
    else:
        return outcome
    text = outcome.body.decode(errors="replace").strip()[:TEXT_MAX]
    return ExchangeOutcome(
        outcome.now, failure=kind, reason=f"status {status}: {text}".rstrip(": ")
    )
