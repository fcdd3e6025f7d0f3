"""A refusal as an answer: its status, its body, and when to come again."""

from __future__ import annotations

import math
from typing import Final

from select_service.errors.admission_errors import AdmissionRefused
from select_service.errors.refusal import ServiceError

_TRY_AGAIN: Final = frozenset({429, 503})
_ROUNDING_S: Final = 1e-9


def problem(error: ServiceError) -> tuple[int, dict[str, object]]:
    """Turn a refusal into (status, JSON body)."""
    body = error.body()
    if error.decision is not None:
        body["decision"] = error.decision
    return error.status, body


def retry_after(error: ServiceError) -> int | None:
    """Return the seconds of a Retry-After header; None: coming again is of no use.

    Every 429 and 503 has one, and so has a refusal for load under any other status, unless the
    request exceeds a limit that no waiting changes.
    """
    if error.retry_after_s == math.inf:
        return None
    if error.status in _TRY_AGAIN or isinstance(error, AdmissionRefused):
        return retry_after_header(error.retry_after_s)
    return None


def retry_after_header(seconds: float) -> int:
    """Return whole seconds: never early, at least 1."""
    return max(1, math.ceil(seconds - _ROUNDING_S))
