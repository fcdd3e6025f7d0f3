"""What the page shows besides workers and ranks: admission, replicas, and overall state.

Each section is a JSON text; `stream.py` sends those that have changed since they were last sent.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import orjson
from msgspec.structs import replace

from select_service.core.admission.status import status_in_steps
from select_service.edge.console.browser import for_browser, for_browser_rows
from select_service.edge.http.routes import ROUTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from select_service.edge.cooperative import TimeSlices
    from select_service.edge.driver.driver import Driver
    from select_service.types.admission import BusyThreshold, ScopeAdmission


async def sections(service: Driver, slices: TimeSlices) -> dict[str, bytes]:
    """Return all sections by name, yielding to the loop in between."""
    admission = await _admission(service, slices)
    await slices.yield_if_due()
    replicas = _replicas(service)
    await slices.yield_if_due()
    return {
        "admission": admission,
        "replicas": orjson.dumps(replicas),
        "state": orjson.dumps(_state(service)),
    }


def _state(service: Driver) -> dict[str, Any]:
    core = service.core
    waiting_for = service.readiness.missing()
    keeper = service.keeper
    return {
        "ready": core.reader.schedulable > 0 and not waiting_for,
        "waiting_for": waiting_for,
        "schedulable_workers": core.reader.schedulable,
        "reservations": len(core.lifecycle.bookings),
        "leases": len(core.lifecycle.leases),
        "waiting": service.waiting,
        "selections": core.counters.selections,
        "failed": dict(sorted(core.counters.selections_failed.items())),
        "on_disk": None if keeper is None else for_browser(keeper.status()),
    }


async def _admission(service: Driver, slices: TimeSlices) -> bytes:
    """Describe admission like GET /admission, plus the refusals by reason."""
    core = service.core
    steps = status_in_steps(core.admission_controller, core.membership)
    status = await slices.through(steps)
    reasons: Counter[tuple[str, ...]] = Counter()
    for partition in list(core.partitions.values()):
        if partition.admission is not None:
            reasons.update(partition.admission.gate.tallies.decisions)
        await slices.yield_if_due()
    facts: dict[str, Any] = for_browser(replace(status, thresholds=[], scopes=[]))
    facts["decisions"] = [
        [*labels, count] for labels, count in sorted(reasons.items(), key=lambda one: -one[1])
    ]
    facts["gates"] = len(status.scopes)
    lists: dict[str, Sequence[BusyThreshold | ScopeAdmission]]
    lists = {"thresholds": status.thresholds, "scopes": status.scopes}  # one row per model or pool
    members = [
        b'"%b":%b' % (name.encode(), orjson.dumps(value))
        for name, value in facts.items()
        if name not in lists
    ]
    for name, rows in lists.items():
        members.append(b'"%b":%b' % (name.encode(), await for_browser_rows(rows, slices)))
    return b"{" + b",".join(members) + b"}"


def _replicas(service: Driver) -> dict[str, Any]:
    plane = service.replicas
    if plane is None:
        return {"enabled": False, "router_id": None, "peers": [], "publishers": []}
    return {
        "enabled": True,
        "router_id": str(service.core.lifecycle.announcer.claims.router_id),
        "peers": [
            {"endpoint": endpoint, "link": link.value}
            for endpoint, link in plane.subscriptions.states()
        ],
        "publishers": for_browser(service.replica_status()),
    }


def actions() -> dict[str, bool]:
    """Return which changes the page may offer: those with a route.

    The routes themselves decide whether the caller is allowed to.
    """
    there = {(route.method, route.pattern) for route in ROUTES}
    return {
        "drain_worker": ("POST", "/workers/{worker_id}/drain") in there,
        "cap_worker": ("PATCH", "/workers/{worker_id}") in there,
        "remove_worker": ("DELETE", "/workers/{worker_id}") in there,
        "busy_threshold": ("POST", "/busy_threshold") in there,
        "policy": ("PUT", "/admission") in there,
    }
