"""The query that narrows a listing to one scope: `model_name`, `tenant_id` or `routing_group`."""

from __future__ import annotations

from typing import Final

from select_service.edge.routing import read_query
from select_service.errors import InvalidField

SCOPE_QUERY: Final = ("model_name", "tenant_id", "routing_group")


def read_scope(query: bytes) -> tuple[str | None, str | None]:
    """Return the model and the tenant in a query; None: any."""
    return scope_in(read_query(query, SCOPE_QUERY))


def scope_in(values: dict[str, str]) -> tuple[str | None, str | None]:
    """Return the model and the tenant in a parsed query; None: any.

    Raises:
        InvalidField: `tenant_id` and its synonym `routing_group` differ.
    """
    tenant, group = values.get("tenant_id"), values.get("routing_group")
    if tenant is not None and group is not None and tenant != group:
        raise InvalidField(
            "routing_group and tenant_id name the same thing and must be equal",
            field="routing_group",
        )
    return values.get("model_name"), group if tenant is None else tenant
