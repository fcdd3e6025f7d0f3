"""Refused for who asks: nobody known, not enough rights, somebody else's tenant."""

from __future__ import annotations

from typing import ClassVar

from select_service.errors.refusal import ServiceError


class Unauthenticated(ServiceError):
    """The request has no valid token or certificate."""

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
    """The token or certificate does not have the scope of the route."""

    status = 403
    code = "missing_scope"

    def __init__(self, scope: str) -> None:
        super().__init__(f"the token has not the scope {scope}", details={"scope": scope})
        self.challenge = b'Bearer error="insufficient_scope", scope="%b"' % scope.encode()


class TokenIsBound(ServiceError):
    """A route of the whole process, with a token that is bound to tenants."""

    status = 403
    code = "token_bound"

    def __init__(self) -> None:
        super().__init__(
            "this concerns the whole process, and the token is bound to some of its tenants"
        )


class TenantNotFound(ServiceError):
    """A tenant that the bound token may not know of."""

    status = 404
    code = "tenant_not_found"

    def __init__(self, tenant_id: str) -> None:
        super().__init__(f"tenant {tenant_id} not found", field="tenant_id")
