"""What every refusal is: a text for people, a stable code, an HTTP status."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct

if TYPE_CHECKING:
    from select_service.types import Scope

RETRY_AFTER_S: Final = 1.0
"""When to ask again where nothing drains that could be measured: nobody is there to compute, no
wish is met by anybody, the process is leaving. It is the shortest time the header can say; asking
costs little, and whoever comes or takes over is not waited for longer than needed."""


class ServiceError(Exception):
    """An internal error, unless a subclass says otherwise; `str(error)` is the text for people."""

    status: int = 500
    code: str = "internal_error"
    retry_after_s: float = RETRY_AFTER_S
    """When to ask again, for the statuses that say so (see `retry_after`); what raises it says so
    where something drains: a queue, a gate's room, leases, the journal's next attempt. Infinity:
    the same request never fits, so it is given no time."""
    decision: object = None
    """What led to it, when that was to be explained; read by what answers."""
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


class Crowded(Struct, frozen=True):
    """Why a tenant gets no more of a bound that it has in common with others."""

    bound: str  # the setting
    most: int  # what all may hold together
    tenant: str | None  # of the token file; None: callers of no such tenant together
    held: int
    part: int  # promised to it: no other can use it up
    share: float  # of the bound that is promised to all of them

    @property
    def text(self) -> str:
        """The sentence for people."""
        flag = "--" + self.bound.replace("_", "-")
        holders = "callers of no tenant of the token file hold"
        if self.tenant is not None:
            holders = f"tenant {self.tenant} holds"
        return (
            f"{holders} {self.held} of {self.most} ({flag}), and {self.part} are kept for it; "
            f"the rest is others' or kept for them (--tenant-share {self.share:g})"
        )

    @property
    def details(self) -> dict[str, object]:
        """The same for programs."""
        details: dict[str, object] = {"limit": self.bound, "held": self.held, "share": self.part}
        if self.tenant is not None:
            details["tenant_id"] = self.tenant
        return details


class BoundReached(ServiceError):
    """Something is held as often as it may be, by all together or by one tenant."""

    def __init__(
        self, plain: str, crowded: Crowded | None = None, *, field: str | None = None
    ) -> None:
        """Word it.

        Args:
            plain: the text where tenants have no parts.
            crowded: the tenant's part, where they have.
            field: of the request that asks for too much.
        """
        if crowded is None:
            super().__init__(plain, field=field)
        else:
            super().__init__(f"{plain}: {crowded.text}", field=field, details=crowded.details)


def scope_text(scope: Scope) -> str:
    """How a scope is written in errors."""
    return f"model={scope.model_name} tenant={scope.tenant_id}"
