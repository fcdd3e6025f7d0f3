"""The route table, which is the API: every operation that a handler declares, by topic.

`application.py` finds the route of a request and calls its handler; /openapi.json, the API
reference and the access matrix are generated from this table, and `embedded.py` has the same
operations.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Final

from select_service.edge.http.handlers import (
    inspection,
    operation,
    process,
    replicas,
    reservations,
    selection,
    workers,
)
from select_service.edge.routing import Route

if TYPE_CHECKING:
    from select_service.edge.http.api import Handler

TOPICS: Final[dict[ModuleType, list[Route[Handler]]]] = {
    topic: [route for route in vars(topic).values() if isinstance(route, Route)]
    for topic in (process, workers, selection, reservations, operation, inspection, replicas)
}
"""The routes that each of these modules declares, in that order."""

ROUTES: Final = tuple(route for routes in TOPICS.values() for route in routes)

OPERATIONS: Final = {route.name: route for route in ROUTES}
"""The same by name: that of the handler, and of the method of an embedded service."""
