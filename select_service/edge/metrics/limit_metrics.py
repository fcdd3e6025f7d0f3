"""All limits by name: their values, and how often each was reached, if that is counted.

Flags that bound something are limits under the name of their setting; so are the budgets of one
turn of the event loop, which have no flag. /metrics exposes both, deploy/reference lists them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from select_service.metric_rows import MetricRow, MetricTable, paced, table, total, value
from select_service.settings import FLAGS
from select_service.types import CoreLimits

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from select_service.core.tenancy.shares import Party, Shares
    from select_service.edge.config_reload import ConfigReload
    from select_service.edge.driver.driver import Driver
    from select_service.edge.http.traffic import Traffic
    from select_service.edge.metrics.scope_series import Sources
    from select_service.metric_rows import Collector
    from select_service.settings import Settings

TURN_BUDGETS: Final = {
    "expired_per_turn_max": "reservations ended that expired, or whose lease did",
    "let_in_per_turn_max": "waiting requests placed, or refused with a reason, when load has gone",
    "judged_per_turn_max": "waiting requests judged again under another policy",
    "dropped_per_turn_max": "reservations of ranks that went cleared away",
    "scopes_per_turn_max": "scopes looked after, and as many again that have work left",
    "sources_weighed_per_turn_max": "ranks whose share of the index is looked at",
    "swept_nodes_per_turn_max": "nodes of the radix tree given back",
    "streams_watched_per_turn_max": "KV-event streams looked at for lag and gaps",
    "replica_items_per_message_max": "statements to replicas in one message",
    "replica_resolved_per_turn_max": "reservations of replicas looked at again",
    "turn_s": "seconds for all KV-event sockets together",
    "pause_s": "seconds in which KV events gather once some were read",
    "tick_s": "seconds between looks for silent event sources",
}
"""What one turn of the event loop may do of each; fixed, chosen to hold it for under half a ms."""


class _Limits(NamedTuple):
    driver: Driver
    traffic: Traffic
    settings: Settings


_VALUES: Final[tuple[MetricRow[_Limits], ...]] = (
    value("limit", "Value of a limit.", lambda one: limit_values(one.settings), "name"),
)
_HITS: Final[tuple[MetricRow[_Limits], ...]] = (
    total(
        "limit_hits",
        "Times a limit was reached, where counted.",
        lambda one: limit_hits(
            one.driver, one.traffic, one.driver.core.registry.orphan_blocks_dropped
        ),
        "name",
    ),
)


def limit_tables(
    driver: Driver, traffic: Traffic, settings: Settings, reload: ConfigReload | None
) -> tuple[Collector, ...]:
    """Return limits in force, and how often they were reached."""

    def limits() -> _Limits:
        return _Limits(driver, traffic, settings if reload is None else reload.settings)

    return table(_VALUES, limits), table(_HITS, limits)


def limit_values(settings: Settings) -> dict[str, float]:
    """Return every limit in force."""
    values: dict[str, float] = {
        flag.field: getattr(settings, flag.field) for flag in FLAGS if flag.is_limit
    }
    core, streams = settings.core_limits, settings.stream_limits
    for name in TURN_BUDGETS:
        values[name] = getattr(core if name in CoreLimits.__struct_fields__ else streams, name)
    return values


def limit_hits(service: Driver, traffic: Traffic, orphans_dropped: int) -> dict[str, int]:
    """Return how often a limit was reached, for those that have a count of their own."""
    core, cut, plane = service.core, traffic.connections, service.replicas
    doctor = service.diagnosed
    return {
        "reservation_ttl_s": core.counters.reservations_expired,
        "reservations_max": core.counters.reservations_refused,
        "workers_max": core.catalog.too_many,
        "worker_bytes_max": core.catalog.too_long,
        "scopes_max": core.membership.scopes_refused,
        "unserved_scopes_max": core.reader.unserved.evicted,
        "event_sources_max": core.membership.sources_refused,
        "tokens_per_request_max": core.counters.selections_failed.get("too_many_tokens", 0),
        "kv_source_blocks_max": core.registry.budget.refused,
        "index_bytes_max": core.registry.budget.forgotten,
        "leases_max": core.lifecycle.leases.refused,
        "lease_copies_max": core.lifecycle.announcer.claims.copies.refused,
        "freed_ids_max": core.lifecycle.bookings.freed.lost,
        "cached_token_reports_max": core.cached_tokens.lost,
        "data_parallel_size_max": core.catalog.too_parallel,
        "kv_orphan_blocks_max": orphans_dropped,
        **traffic.limit_hits,
        **traffic.epp.limit_hits,
        "header_lines_max": cut.head_lines,
        "header_timeout_s": cut.header_timeouts,
        "body_timeout_s": cut.body_timeouts + cut.write_timeouts,
        "connections_max": cut.refused,
        "connections_per_address_max": cut.refused_by_address,
        "descriptors_kept": cut.refused_for_descriptors + service.sources.without_descriptor,
        "unread_bytes_max": cut.unread,
        "dumps_max": service.dumps.outcomes["refused"],
        "dump_timeout_s": service.dumps.outcomes["timeout"],
        "tls_handshakes_max": cut.refused_handshakes,
        "console_clients_max": traffic.console.refused,
        "replica_send_messages_max": plane.publisher.dropped if plane else 0,
        "replica_pull_timeout_s": plane.pulls.outcomes["timeout"] if plane else 0,
        "replica_pull_bytes_max": plane.pulls.outcomes["too_large"] if plane else 0,
        "replica_snapshots_max": plane.snapshots["refused"] if plane else 0,
        "replica_claims_max": core.replicas.counters.claims_refused,
        "replica_publishers_max": core.replicas.counters.publishers_refused,
        "replica_peers_max": plane.peers_refused if plane else 0,
        "doctor_findings_max": doctor.examiner.suspicions.left_out if doctor else 0,
    }


_REST: Final = "other"
"""Label of callers of no tenant of the token file, and of tenants beyond `--tenant-labels-max`."""


class _Bound(NamedTuple):
    held: dict[str, int]
    share: float | None
    refused: dict[str, int]


_BOUNDS: Final[tuple[MetricRow[_Bound], ...]] = (
    value(
        "tenant_bound_held",
        "What a tenant holds of a bound.",
        lambda bound: bound.held,
        "tenant_id",
    ),
    value(
        "tenant_bound_share", "What is kept for each tenant of a bound.", lambda bound: bound.share
    ),
    total(
        "tenant_bound_refused",
        "Times a tenant got no more of a bound.",
        lambda bound: bound.refused,
        "tenant_id",
    ),
)


def tenant_table(shares: Shares, labels_max: int) -> Collector:
    """Return a series for each bound and tenant of the token file; without such there are none."""
    labels = _TenantLabels(labels_max)

    def bounds() -> Sources[_Bound]:
        for bound in list(shares.bounds.values()):
            share = bound.kept if shares.parties else None
            held = yield from labels.sums(bound.rows())
            refused = yield from labels.sums(bound.refused.items())
            yield (bound.name,), (_Bound(held, share, refused),)

    return MetricTable(_BOUNDS, bounds, ("bound",))


class _TenantLabels:
    """A tenant keeps its own label: counters must not fall."""

    def __init__(self, labels_max: int) -> None:
        self._labels_max = labels_max
        self._labels: dict[Party, str] = {}

    def sums(self, rows: Iterable[tuple[Party, int]]) -> Generator[None, None, dict[str, int]]:
        """Return numbers of tenants by label."""
        sums: dict[str, int] = {}
        for row in paced(list(rows)):
            if row is None:
                yield None
                continue
            label = self._label(row[0])
            sums[label] = sums.get(label, 0) + row[1]
        return sums

    def _label(self, party: Party) -> str:
        label = self._labels.get(party)
        if label is None:
            is_listed = party is not None and len(self._labels) < self._labels_max
            label = party if party is not None and is_listed else _REST
            if is_listed:
                self._labels[party] = label
        return label
