"""The gate's no, and what cannot be set of it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from select_service.errors.refusal import RETRY_AFTER_S, ServiceError

if TYPE_CHECKING:
    from collections.abc import Mapping

BUSY_GATE: Final = "busy"


class AdmissionRefused(ServiceError):
    """The gate says no, why, and when to come again; infinity: the request never fits."""

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
        again_s = self.retry_after_s
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
            "retry_after_s": round(again_s, 3) if math.isfinite(again_s) else None,
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


class ModelNotFound(ServiceError):
    """Busy thresholds for a model without workers."""

    status = 404
    code = "model_not_found"

    def __init__(self, model: str, tenant_id: str | None) -> None:
        name = model if tenant_id is None else f"{model} of tenant {tenant_id}"
        super().__init__(
            f"model {name} is not known: busy thresholds can only be set for discovered models",
            field="model",
        )
