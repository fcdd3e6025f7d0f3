"""Where clients come in, and what each may do."""

from typing import Annotated, Final

from msgspec import Struct

from indexer.limits import EgressSettings, StreamLimits
from select_service.settings.row import HITS
from select_service.settings.value_types import (
    FieldValidation,
    count,
    curve_public_key,
    egress_list,
    file_mode,
    member,
    path,
    schemes,
    seconds,
    size,
    switch,
    tcp_port,
    text,
    whole,
)
from select_service.types import BodyLimits
from select_service.types.router_config import PickerLimits

_STREAMS: Final = StreamLimits()
_BODIES: Final = BodyLimits()
_PICKER: Final = PickerLimits()
_EGRESS: Final = EgressSettings()


class ListeningSettings(Struct, frozen=True, kw_only=True):
    """Where clients come in, and how much they may send, hold open and leave unfinished."""

    # The contract's default. An open process warns of it; deploy/docs/security.md closes it.
    host: Annotated[
        str,
        text("ADDRESS"),
        "address or name to listen on; 0.0.0.0 and :: mean all addresses of IPv4 and IPv6",
    ] = "0.0.0.0"  # noqa: S104  # nosec B104
    port: Annotated[
        int | None,
        tcp_port(0).static(limit=False).common(),
        "port to listen on; 0 picks a free one",
    ] = 8092  # None: no TCP
    uds: Annotated[
        str | None,
        path("PATH").static("http_connections", env="SELECT_SERVICE_UDS"),
        "listen on a Unix domain socket at this path; on TCP, too, only if --port is given",
    ] = None
    uds_mode: Annotated[
        str,
        file_mode().static(env="SELECT_SERVICE_UDS_MODE"),
        "permissions of the socket's file; a user that may write to it may connect",
    ] = "0660"  # connecting takes write permission on the file
    side_port: Annotated[
        int | None,
        tcp_port(0).static("http_connections"),
        "a second TCP port, with GET /health, /ready, /metrics and /replica_sync/snapshot "
        "alone: for probes, Prometheus and replicas where the API is on loopback or a Unix "
        "socket",
    ] = None  # entrance for replicas, probes and Prometheus only
    side_host: Annotated[
        str | None,
        text("ADDRESS"),
        "address of the side port; off: that of --host, or every address if --host is loopback",
    ] = None  # None: that of `host`, or every address if that is loopback
    threads: Annotated[
        int,
        count(0).static(limit=False),
        "accepted for compatibility; no effect, one event loop serves everything",
    ] = 4
    field_validation: Annotated[
        FieldValidation,
        member(FieldValidation),
        "unknown top-level fields and query parameters: refuse (422), warn in a header, or ignore",
    ] = FieldValidation.WARN
    max_body_bytes: Annotated[
        int,
        count(128).live(HITS),  # of fewer, PUT /config could not be taken back
        "longest request body, 413 beyond",
    ] = 8 * 1024 * 1024
    head_bytes_max: Annotated[
        int,
        count(1024).live(
            'http_connections_cut_total{reason="malformed"}'
        ),  # a token has up to 512 by default
        "longest request line with its headers, and longest line between chunks or behind "
        "them, 431 beyond",
    ] = 64 * 1024  # several times what common proxies allow
    header_lines_max: Annotated[
        int,
        count(16).live(HITS),
        "header lines of a request, 431 beyond",
    ] = 128  # each costs forty times its bytes; proxies allow some 100
    header_timeout_s: Annotated[
        float,
        seconds().live('http_connections_cut_total{reason="header_timeout"}'),
        "a connection that has not sent a whole request head by then is closed (408)",
    ] = 10.0
    body_timeout_s: Annotated[
        float,
        seconds().live('http_connections_cut_total{reason=~"(body|write)_timeout"}'),
        "the same for a request body, and for a client that does not read its answer",
    ] = 30.0
    keep_alive_timeout_s: Annotated[
        int,
        count(metavar="S").static("http_connections"),
        "an idle connection is closed after this long",
    ] = 75
    connections_max: Annotated[
        int,
        count().live("http_connections"),
        "open connections; further ones get 503, except for 16 that ask for /config, /health or "
        "/metrics once, or that show the token of a tenant that has room",
    ] = 8192
    connections_per_address_max: Annotated[
        int,
        count().live(HITS),
        "open connections from one address, 503 beyond",
    ] = 4096  # half: a gateway is one address
    descriptors_kept: Annotated[
        int,
        count(0).live(HITS),
        "open files that connections leave free for other uses, 503 beyond, except for the 16 of "
        "--connections-max; event sources of workers leave half of them free",
    ] = _STREAMS.descriptors_kept
    unread_bytes_max: Annotated[
        int,
        size().live("http_unread_bytes"),
        "bytes of answers, of all connections together, that clients have yet to read; "
        "beyond, those that have read nothing for longest are cut off, of tenants beyond "
        "their part",
    ] = 256 << 20  # a /metrics of 512 ranks and 64 scopes takes half a megabyte
    tls_handshakes_max: Annotated[
        int,
        count().live("tls_handshakes"),
        "TLS handshakes at one time, each no longer than --header-timeout-s; closed beyond",
    ] = 8192  # 60 KB each
    json_depth_max: Annotated[
        int,
        whole(8, 900).live(HITS),
        "depth of nested arrays and objects in a body, 400 beyond",
    ] = _BODIES.depth_max
    body_parts_max: Annotated[
        int,
        count(64).live(HITS),  # of fewer, PUT /config could not be taken back
        "strings, objects and arrays in a body, or in each request of a batch, 422 beyond: "
        "they are read in one go",
    ] = _BODIES.parts_max
    body_numbers_max: Annotated[
        int,
        count(64).live(HITS),
        "numbers of a body that are not packed (in JSON: commas), 422 beyond",
    ] = _BODIES.numbers_max
    body_short_bytes_max: Annotated[
        int,
        count(128).live(HITS),
        "longest body of a route that takes no prompt, 413 beyond",
    ] = _BODIES.short_bytes_max
    body_unknown_bytes_max: Annotated[
        int,
        count(64).live(HITS),
        "bytes of an unknown member, in MessagePack, unless it is text or binary; 422 beyond",
    ] = _BODIES.unknown_bytes_max
    body_media_bytes_max: Annotated[
        int,
        count(64).live(HITS),
        "bytes of an array of objects in MessagePack, as of media items; 422 beyond",
    ] = _BODIES.media_bytes_max
    listen_backlog: Annotated[
        int,
        whole(1, 65535).static("http_connections_accepted_total"),
        "connections the system holds until they are accepted",
    ] = 2048
    leave_notice_s: Annotated[
        float,
        seconds(zero=True).static('waiting_for{name="leaving"}'),
        "after SIGTERM /ready answers 503, and all requests are served for at least this long, so "
        "that callers have time to notice",
    ] = 0.0
    leave_grace_s: Annotated[
        float,
        seconds(zero=True).static('waiting_for{name="leaving"}'),
        "after SIGTERM, serve for at most this long while reservations made here are in flight; "
        "SIGINT does not wait",
    ] = 0.0
    shutdown_timeout_s: Annotated[
        int,
        count(metavar="S").static("http_requests_in_flight"),
        "how long answers under way may take after SIGTERM or SIGINT",
    ] = 5
    config: Annotated[
        str | None,
        path("FILE").static("config_reloads_total").common(),
        "YAML or TOML (.toml) file of settings, named as flags are; flags win over it; read again "
        "on SIGHUP",
    ] = None


class EndpointPickerSettings(ListeningSettings, frozen=True, kw_only=True):
    """Where gateways ask for an endpoint (Envoy's external processing), and how much they hold."""

    epp_port: Annotated[
        int | None,
        tcp_port(0).static("epp_streams", limit=False),
        "a gRPC port for Envoy's ext_proc, as the endpoint picker of an InferencePool; 0 picks a "
        "free one; needs the extra `epp`",
    ] = None
    epp_host: Annotated[str | None, text("ADDRESS"), "address of that; off: the one of --host"] = (
        None
    )
    epp_streams_max: Annotated[
        int,
        count().static(HITS),
        "open streams, one for each HTTP request that a gateway has under way; 429 beyond",
    ] = _PICKER.streams_max
    epp_body_bytes_max: Annotated[
        int,
        size(1024).static(HITS),
        "longest request body, 413 beyond",
    ] = _PICKER.body_bytes_max
    epp_buffered_bytes_max: Annotated[
        int,
        size(1024).static(HITS),
        "bytes of request bodies that wait for their end or for a choice, 429 beyond",
    ] = _PICKER.buffered_bytes_max
    epp_tokenize_timeout_s: Annotated[
        float,
        seconds(zero=True).static(HITS),
        "an engine has this long to tokenize a prompt, which is placed by load alone otherwise; "
        "0: no engine is asked",
    ] = _PICKER.tokenize_timeout_s
    epp_tokenize_calls_max: Annotated[
        int,
        count().static(HITS),
        "prompts that engines tokenize at one time; beyond, they are placed by load alone",
    ] = _PICKER.tokenize_calls_max
    epp_tokenize_cache_bytes: Annotated[
        int,
        size(0).static("epp_tokenize_cache_bytes"),
        "memory for the tokens of texts that were seen before; the oldest go",
    ] = _PICKER.tokenize_cache_bytes


class SecuritySettings(EndpointPickerSettings, frozen=True, kw_only=True):
    """What clients may do, and where the service itself may connect."""

    token_file: Annotated[
        str | None,
        path("FILE").static("auth_refused_total").common(),
        "require of every client a token that is in this file; read again on SIGHUP",
    ] = None
    token_file_bytes_max: Annotated[
        int,
        size().static('auth_reloads_total{outcome="refused"}'),
        "longest file of tokens; a longer one is refused, at the start and on SIGHUP",
    ] = 4 << 20  # some 20,000 records
    token_chars_max: Annotated[
        int,
        whole(64, 16384).static('auth_refused_total{reason="unknown"}'),
        "longest token that is looked at, 401 beyond; it has to fit into --head-bytes-max, too",
    ] = 512  # ours have 47; an identity provider's may be longer
    tls_cert: Annotated[
        str | None,
        path("FILE").static("tls_reloads_total"),
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
        path("FILE").static("replica_pulls_total"),
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
        path("FILE").static("curve_refused_total"),
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
        schemes().static('connect_refused_total{reason="scheme"}'),
        "schemes of ZMQ endpoints that are connected to; ipc opens files of this machine",
    ] = _EGRESS.schemes
    connect_allow: Annotated[
        tuple[str, ...],
        egress_list().static('connect_refused_total{reason="address"}'),
        "connect only to these networks, addresses, names and `*.suffix`; the address that a name "
        "leads to is judged at each connection",
    ] = _EGRESS.allow
    connect_deny: Annotated[
        tuple[str, ...],
        egress_list().static('connect_refused_total{reason="resolved"}'),
        "never connect to these, even if allowed; a value replaces the default (link-local, cloud "
        "metadata, multicast, unspecified)",
    ] = _EGRESS.deny
    connect_no_loopback: Annotated[
        bool,
        switch().static('connect_refused_total{reason="address"}'),
        "never connect to this machine itself",
    ] = not _EGRESS.loopback
    connect_lookup_timeout_s: Annotated[
        float,
        seconds().static('connect_lookups_total{outcome="timeout"}'),
        "longest wait for the addresses of a name, and until one of several accepts a connection; "
        "registering waits for none",
    ] = _EGRESS.lookup_timeout_s
    connect_lookup_cache_s: Annotated[
        float,
        seconds(zero=True).static("connect_lookups_total"),
        "how long the addresses of a name are remembered",
    ] = _EGRESS.lookup_cache_s
    connect_lookups_max: Annotated[
        int,
        count().static('connect_lookups_total{outcome="left_out"}'),
        "names looked up at one time, and remembered",
    ] = _EGRESS.lookups_max
