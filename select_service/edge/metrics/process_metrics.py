"""Metrics of the process itself: decisions kept, security, tracing, findings, bounds, settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from select_service.core.diagnostics.causes import CAUSES
from select_service.edge.security.exposure import open_doors
from select_service.metric_rows import MetricRow, table, total, value

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Set as AbstractSet
    from typing import TypeVar

    from indexer.edge.sockets import KeyCheck
    from select_service.edge.config_reload import ConfigReload, Outcome
    from select_service.edge.doctor import Doctor
    from select_service.edge.driver.driver import Driver
    from select_service.edge.security.authority import Authority
    from select_service.edge.security.credentials import Credentials
    from select_service.edge.security.security_files import SecurityFiles
    from select_service.edge.security.tls import Certificates
    from select_service.metric_rows import Collector, Reading
    from select_service.settings import Settings

    T = TypeVar("T")

_MISSING: Final = ("tokens", "tls", "replicas")
_CHANGED_BY: Final = ("put", "sighup", "restored")
_CHANGES: Final[tuple[Outcome, ...]] = ("applied", "unchanged", "refused")
_SPANS: Final = ("exported", "dropped", "failed")


def _of(part: T | None, read: Callable[[T], Reading]) -> Reading:
    """Return a reading of a part that may be absent."""
    return None if part is None else read(part)


# -- decisions -----------------------------------------------------------------------------------

_DECISIONS: Final[tuple[MetricRow[Driver], ...]] = (
    value("decision_records", "Decisions kept.", lambda driver: len(driver.core.decisions)),
    value(
        "decision_bytes",
        "Memory charged for the decisions kept.",
        lambda driver: driver.core.decisions.bytes,
    ),
    total(
        "decision_records_evicted",
        "Decisions dropped to make room for later ones.",
        lambda driver: driver.core.decisions.evicted,
    ),
)


# -- security ------------------------------------------------------------------------------------


def _handshakes_failed(driver: Driver) -> dict[tuple[str, str], int]:
    plane = driver.replicas
    planes = {
        "events": driver.sources.handshakes_failed,
        "replicas": {} if plane is None else plane.subscriptions.handshakes_failed,
    }
    return {
        (name, reason): count for name, counts in planes.items() for reason, count in counts.items()
    }


# What is shown of tokens, certificates and keys is never their names or contents.

_OPEN: Final[tuple[MetricRow[AbstractSet[str]], ...]] = (
    value(
        "security_open",
        "1 where the process is open to anyone who reaches it, by what is missing.",
        lambda missing: {name: int(name in missing) for name in _MISSING},
        "missing",
    ),
)
_AUTHORITY: Final[tuple[MetricRow[Authority], ...]] = (
    value("auth_tokens", "Records of the token file in force.", lambda one: len(one.book)),
    total(
        "auth_refused", "Requests turned away for their token.", lambda one: one.refused, "reason"
    ),
    total(
        "auth_foreign",
        "Other tenants' things named with a token bound to tenants.",
        lambda one: one.foreign,
    ),
    total("auth_reloads", "Readings of a changed token file.", lambda one: one.reloads, "outcome"),
)
_CERTIFICATES: Final[tuple[MetricRow[Certificates], ...]] = (
    total("tls_reloads", "Readings of changed certificates.", lambda one: one.reloads, "outcome"),
)
_FILES: Final[tuple[MetricRow[SecurityFiles], ...]] = (
    total(
        "security_reloads", "Readings of all files, on SIGHUP.", lambda one: one.reloads, "outcome"
    ),
)
_KEY_CHECK: Final[tuple[MetricRow[KeyCheck], ...]] = (
    total("curve_accepted", "Replicas let in to listen, by their key.", lambda one: one.accepted),
    total("curve_refused", "Listeners with a key that is not listed.", lambda one: one.refused),
)
_HANDSHAKES: Final[tuple[MetricRow[Driver], ...]] = (
    total(
        "handshakes_failed",
        "Handshakes with publishers that ended before we could listen.",
        _handshakes_failed,
        "plane",
        "reason",
    ),
)
_CREDENTIALS: Final[tuple[MetricRow[Credentials], ...]] = (
    total(
        "peer_token_withheld",
        "Fetches without the token, because the other side is not vouched for.",
        lambda one: one.passport.withheld,
    ),
    total(
        "peer_token_failures",
        "Times --peer-token-file had no token to show.",
        lambda one: one.passport.failures,
    ),
)


# -- tracing, findings ---------------------------------------------------------------------------

_TRACING: Final[tuple[MetricRow[Driver], ...]] = (
    value("tracing", "1 where requests are traced.", lambda driver: driver.tracing is not None),
    total(
        "traced_requests",
        "Requests traced.",
        lambda driver: _of(driver.tracing, lambda tracing: tracing.sampled) or 0,
    ),
    value(
        "trace_queue_spans",
        "Spans that wait to be exported.",
        lambda driver: _of(driver.tracing, lambda tracing: tracing.export.queued) or 0,
    ),
    total(
        "trace_spans",
        "Spans by what became of them: dropped for a full queue, failed at the collector.",
        lambda driver: (
            _of(
                driver.tracing,
                lambda tracing: {name: getattr(tracing.export, name) for name in _SPANS},
            )
            or dict.fromkeys(_SPANS, 0)
        ),
        "outcome",
    ),
)


_FINDINGS: Final[tuple[MetricRow[Driver], ...]] = (
    value(
        "doctor_findings",
        "What is wired wrong, by the last examination.",
        lambda driver: _findings(driver.diagnosed),
        "code",
        "severity",
    ),
    total(
        "doctor_examinations",
        "Examinations made.",
        lambda driver: _of(driver.diagnosed, lambda doctor: doctor.examiner.rounds) or 0,
    ),
    total(
        "doctor_faults",
        "Examinations that failed by our error.",
        lambda driver: _of(driver.diagnosed, lambda doctor: doctor.faults) or 0,
    ),
)


def _findings(doctor: Doctor | None) -> dict[tuple[str, str], int]:
    counts = {} if doctor is None else doctor.examiner.suspicions.counts()
    return {(cause.code, cause.severity): counts.get(cause.code, 0) for cause in CAUSES}


# -- bounds, settings ----------------------------------------------------------------------------


def _changes(reload: ConfigReload) -> dict[tuple[str, str], int]:
    return {(by, outcome): reload.counts[by, outcome] for by in _CHANGED_BY for outcome in _CHANGES}


_BOUNDS: Final[tuple[MetricRow[Driver], ...]] = (
    total(
        "connect_refused",
        "Endpoints and URLs that were not connected to, by what forbade it.",
        lambda driver: driver.addresses.refused,
        "reason",
    ),
    total(
        "connect_lookups", "Names looked up.", lambda driver: driver.addresses.lookups, "outcome"
    ),
    total(
        "connect_unreachable",
        "Trials of a name's several addresses that ended without a connection.",
        lambda driver: driver.addresses.unreachable,
    ),
    value(
        "index_budget_bytes",
        "Estimate for all indexes, of the last round.",
        lambda driver: driver.core.registry.budget.bytes,
    ),
    total(
        "scopes_closed",
        "Scopes given up because they had no worker.",
        lambda driver: driver.core.membership.scopes_closed,
    ),
)
_RELOADS: Final[tuple[MetricRow[ConfigReload], ...]] = (
    total("config_reloads", "Changes of settings while running.", _changes, "by", "outcome"),
    value(
        "config_after_restart",
        "Settings of the file that a restart would change.",
        lambda reload: reload.waiting,
    ),
)


def process_tables(
    driver: Driver, settings: Settings, reload: ConfigReload | None
) -> tuple[Collector, ...]:
    """Return the tables; of the security those of what is not in use have no series."""
    missing = open_doors(settings).keys()

    def authority() -> Authority | None:
        return None if driver.security is None else driver.security.authority

    def certificates() -> Certificates | None:
        return None if driver.security is None else driver.security.certificates

    def key_check() -> KeyCheck | None:
        return None if driver.replicas is None else driver.replicas.publisher.key_check

    return (
        table((*_DECISIONS, *_HANDSHAKES, *_TRACING, *_FINDINGS, *_BOUNDS), lambda: driver),
        table(_OPEN, lambda: missing),
        table(_AUTHORITY, authority),
        table(_CERTIFICATES, certificates),
        table(_FILES, lambda: driver.security),
        table(_KEY_CHECK, key_check),
        table(_CREDENTIALS, lambda: driver.credentials),
        table(_RELOADS, lambda: reload),
    )
