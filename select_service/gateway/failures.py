"""A worker that failed, and how errors are told to OpenAI's clients."""

from __future__ import annotations

from typing import Final

_TOO_MANY: Final = 429
_BROKE: Final = 500


class EngineFailed(Exception):
    """The chosen worker did not answer; the text says why."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 502,
        code: str = "engine_failed",
        may_retry: bool = True,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.may_retry = may_retry


def error_body(
    status: int, message: str, code: str | None, param: str | None = None
) -> dict[str, object]:
    """Return an error as OpenAI's clients read it."""
    if status == _TOO_MANY:
        kind = "rate_limit_error"
    else:
        kind = "server_error" if status >= _BROKE else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
