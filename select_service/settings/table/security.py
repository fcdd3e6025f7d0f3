"""Who may do what, and where the service itself may connect."""

from typing import Annotated, Final

from indexer.limits import EgressSettings
from select_service.settings.table.endpoint_picker import EndpointPickerSettings
from select_service.settings.value_types import (
    count,
    curve_public_key,
    egress_list,
    path,
    schemes,
    seconds,
    size,
    switch,
    whole,
)

_EGRESS: Final = EgressSettings()


class SecuritySettings(EndpointPickerSettings, frozen=True, kw_only=True):
    """Who may do what, and where the service itself may connect."""

    token_file: Annotated[
        str | None,
        path("FILE").watched("auth_refused_total").common(),
        "require of every client a token that is in this file; read again on SIGHUP",
    ] = None
    token_file_bytes_max: Annotated[
        int,
        size().watched('auth_reloads_total{outcome="refused"}'),
        "longest file of tokens; a longer one is refused, at the start and on SIGHUP",
    ] = 4 << 20  # some 20,000 records
    token_chars_max: Annotated[
        int,
        whole(64, 16384).watched('auth_refused_total{reason="unknown"}'),
        "longest token that is looked at, 401 beyond; it has to fit into --head-bytes-max, too",
    ] = 512  # ours have 47; an identity provider's may be longer
    tls_cert: Annotated[
        str | None,
        path("FILE").watched("tls_reloads_total"),
        "speak TLS on the TCP port: the certificate chain, PEM; read again when it changes",
    ] = None
    tls_key: Annotated[
        str | None, path("FILE"), "the private key of --tls-cert, if it is in another file"
    ] = None
    tls_client_ca: Annotated[
        str | None,
        path("FILE"),
        "require of every client a certificate that one of these authorities signed",
    ] = None
    peer_token_file: Annotated[
        str | None,
        path("FILE"),
        "the token shown to --indexer-peers and to replicas whose snapshot is fetched",
    ] = None
    peer_ca: Annotated[
        str | None,
        path("FILE").watched("replica_pulls_total"),
        "fetch from peers and replicas over TLS, and trust certificates that one of these "
        "authorities signed",
    ] = None
    proxy_from_environment: Annotated[
        bool,
        switch(),
        "reach the Kubernetes API and the collector of traces through the proxies that HTTP_PROXY, "
        "HTTPS_PROXY and ALL_PROXY name, except for NO_PROXY; replicas and peers never",
    ] = False
    curve_key: Annotated[
        str | None,
        path("FILE").watched("curve_refused_total"),
        "encrypt the replica plane with this key pair (`select-service keys new`), read "
        "again on SIGHUP",
    ] = None
    curve_replica_keys: Annotated[
        str | None,
        path("FILE"),
        "public keys of the replicas that may listen, a line each, with their endpoints if "
        "they differ; off: those with our own key",
    ] = None
    curve_worker_key: Annotated[
        str | None,
        curve_public_key(),
        "public key of every worker's event and replay sockets; off: as each record says",
    ] = None
    connect_schemes: Annotated[
        tuple[str, ...],
        schemes().watched('connect_refused_total{reason="scheme"}'),
        "schemes of ZMQ endpoints that are connected to; ipc opens files of this machine",
    ] = _EGRESS.schemes
    connect_allow: Annotated[
        tuple[str, ...],
        egress_list().watched('connect_refused_total{reason="address"}'),
        "connect only to these networks, addresses, names and `*.suffix`; the address that a name "
        "leads to is judged at each connection",
    ] = _EGRESS.allow
    connect_deny: Annotated[
        tuple[str, ...],
        egress_list().watched('connect_refused_total{reason="resolved"}'),
        "never connect to these, even if allowed; a value replaces the default (link-local, cloud "
        "metadata, multicast, unspecified)",
    ] = _EGRESS.deny
    connect_no_loopback: Annotated[
        bool,
        switch().watched('connect_refused_total{reason="address"}'),
        "never connect to this machine itself",
    ] = not _EGRESS.loopback
    connect_lookup_timeout_s: Annotated[
        float,
        seconds().watched('connect_lookups_total{outcome="timeout"}'),
        "longest wait for the addresses of a name, and until one of several accepts a connection; "
        "registering waits for none",
    ] = _EGRESS.lookup_timeout_s
    connect_lookup_cache_s: Annotated[
        float,
        seconds(zero=True).watched("connect_lookups_total"),
        "how long the addresses of a name are remembered",
    ] = _EGRESS.lookup_cache_s
    connect_lookups_max: Annotated[
        int,
        count().watched('connect_lookups_total{outcome="left_out"}'),
        "names looked up at one time, and remembered",
    ] = _EGRESS.lookups_max
