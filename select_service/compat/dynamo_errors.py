"""Errors of the Dynamo binding, made from ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from select_service.errors import ServiceError

_INVALID: Final = frozenset({400, 413, 422})
_KINDS: Final = {404: "not_found", 409: "conflict"}
_KINDS_BY_CODE: Final = {
    "no_schedulable_worker": "not_ready",
    "shutting_down": "not_ready",
    "rank_not_found": "sequence",
}
_SCHEDULER: Final = frozenset({"pinned_worker_not_allowed"})


class DynamoException(Exception):
    """Base of what the binding raises, but for arguments that are wrong in themselves."""


class SelectionServiceError(DynamoException):
    """A call cannot be carried out.

    Attributes:
        kind: `not_ready`, `not_found`, `conflict`, `sequence` or `scheduler`.
        status_code: of the HTTP route.
        code, field: additions of this product, as in its HTTP answers.
    """

    def __init__(
        self,
        message: str,
        kind: str = "scheduler",
        status_code: int = 503,
        code: str | None = None,
        field: str | None = None,
    ) -> None:
        super().__init__(message)
        self.kind, self.status_code, self.code, self.field = kind, status_code, code, field

    def __reduce__(self) -> tuple[type[SelectionServiceError], tuple[object, ...]]:
        """Pickle all of it; Ray carries exceptions between processes."""
        return type(self), (str(self), self.kind, self.status_code, self.code, self.field)


def dynamo_error(error: ServiceError) -> Exception:
    """Return what the binding raises in the place of one of our errors."""
    status, code = error.status, error.code
    if status in _INVALID and code not in _SCHEDULER:
        field = "" if error.field is None or error.field in str(error) else f"{error.field}: "
        return ValueError(f"{field}{error}")
    kind = _KINDS_BY_CODE.get(code) or _KINDS.get(status, "scheduler")
    return SelectionServiceError(str(error), kind, status, code, error.field)
