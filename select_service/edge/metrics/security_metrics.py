"""Metrics of tokens, certificates and keys; never their names or contents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client.metrics_core import Metric
from typing_extensions import override

from select_service.edge.metrics.families import Collector, counter, gauge
from select_service.edge.security.exposure import open_doors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from select_service.edge.driver.driver import Driver
    from select_service.settings import Settings

__all__ = ["SecurityMetrics"]

_DOORS: Final = ("tokens", "tls", "replicas")


class SecurityMetrics(Collector):
    """Families of what is not used stay empty."""

    def __init__(self, service: Driver, settings: Settings) -> None:
        self._service = service
        self._unguarded = open_doors(settings)

    @override
    def collect(self) -> Iterator[Metric]:
        security = self._service.security
        is_open = gauge(
            "security_open",
            "1 where the process is open to anyone who reaches it, by what is missing.",
            ("missing",),
        )
        tokens = gauge("auth_tokens", "Records of the token file in force.")
        refused = counter("auth_refused", "Requests turned away for their token.", ("reason",))
        foreign = counter(
            "auth_foreign", "Other tenants' things named with a token bound to tenants."
        )
        auth_reloads = counter("auth_reloads", "Readings of a changed token file.", ("outcome",))
        tls_reloads = counter("tls_reloads", "Readings of changed certificates.", ("outcome",))
        reloads = counter("security_reloads", "Readings of all files, on SIGHUP.", ("outcome",))
        for missing in _DOORS:
            is_open.add_metric([missing], int(missing in self._unguarded))
        if security is not None:
            for outcome, count in security.reloads.items():
                reloads.add_metric([outcome], count)
            authority, certificates = security.authority, security.certificates
            if authority is not None:
                tokens.add_metric((), len(authority.book))
                foreign.add_metric((), authority.foreign)
                for reason, count in authority.refused.items():
                    refused.add_metric([reason], count)
                for outcome, count in authority.reloads.items():
                    auth_reloads.add_metric([outcome], count)
            if certificates is not None:
                for outcome, count in certificates.reloads.items():
                    tls_reloads.add_metric([outcome], count)
        yield from (is_open, tokens, refused, foreign, auth_reloads, tls_reloads, reloads)
        yield from self._keys()

    def _keys(self) -> Iterator[Metric]:
        accepted = counter("curve_accepted", "Replicas let in to listen, by their key.")
        refused = counter("curve_refused", "Listeners with a key that is not listed.")
        failed = counter(
            "handshakes_failed",
            "Handshakes with publishers that ended before we could listen.",
            ("plane", "reason"),
        )
        withheld = counter(
            "peer_token_withheld",
            "Fetches without the token, because the other side is not vouched for.",
        )
        failures = counter("peer_token_failures", "Times --peer-token-file had no token to show.")
        plane, credentials = self._service.replicas, self._service.credentials
        if plane is not None and plane.publisher.key_check is not None:
            accepted.add_metric((), plane.publisher.key_check.accepted)
            refused.add_metric((), plane.publisher.key_check.refused)
        if credentials is not None:
            withheld.add_metric((), credentials.passport.withheld)
            failures.add_metric((), credentials.passport.failures)
        planes = {
            "events": self._service.event_handshakes_failed,
            "replicas": {} if plane is None else plane.subscriptions.handshakes_failed,
        }
        for name, counts in planes.items():
            for reason, count in counts.items():
                failed.add_metric([name, reason], count)
        yield from (accepted, refused, failed, withheld, failures)
